"""How long the state machines of the tests run: the same short walk each time, or longer random ones on request."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = float(os.environ.get("ALIGNEDSERVE_FUZZ", "1"))  # `make fuzz` sets it: so many times the examples, at random


def machine_settings(examples: int, steps: int = 50) -> settings:
    """`examples` walks of at most `steps` rules each, `FACTOR` times as many where that is asked for."""
    return settings(
        max_examples=max(1, round(examples * FACTOR)),
        stateful_step_count=steps,
        deadline=None,
        derandomize=FACTOR == 1.0,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
