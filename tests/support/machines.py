"""How long the state machines of the tests run: the same short walks each time, or more random walks on request."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = float(os.environ.get("ALIGNEDSERVE_FUZZ", "1"))  # `make fuzz` sets this factor


def machine_settings(examples: int, steps: int = 50) -> settings:
    """`examples` walks of at most `steps` rules each, times `FACTOR`."""
    return settings(
        max_examples=max(1, round(examples * FACTOR)),
        stateful_step_count=steps,
        deadline=None,
        derandomize=FACTOR == 1.0,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
