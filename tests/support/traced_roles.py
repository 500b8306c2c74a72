"""The real roles, whose scheduler records which class formed its batches.

`python -m support.traced_roles` is `role_main` with them. `TRACE_FILE` in the environment names a file: a
line for each batch is appended to it, the module and the name of the policy's class. Decode instances hang as
`faulty_roles` says. With `EVEN_TIMES` set they report times of iterations that depend on the work alone, as on a
machine without other load whose attention takes each request by itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from alignedserve.cluster.launch import role_main
from alignedserve.control import runtime
from alignedserve.control.runtime import RoleServer, RoleSettings
from support.faulty_roles import make_faulty

TRACE, EVEN = "TRACE_FILE", "EVEN_TIMES"


def _install() -> None:
    from alignedserve.scheduler import systems
    from alignedserve.scheduler.policies.base import BatchPolicy

    trace, policy_class = Path(os.environ[TRACE]), systems.policy_class

    def traced(system: systems.System) -> type[BatchPolicy]:
        found = policy_class(system)
        form = found.form

        def told(self: BatchPolicy, *arguments: Any) -> Any:
            batch = form(self, *arguments)
            if batch:
                with trace.open("a") as lines:
                    lines.write(f"{type(self).__module__}:{type(self).__name__}\n")
            return batch

        found.form = told  # type: ignore[assignment,method-assign]
        return found

    systems.policy_class = traced


def _report_even_times() -> None:
    from alignedserve.control.passes import PassMeter
    from alignedserve.decode_worker import loop

    class EvenMeter(PassMeter):
        def add(
            self, tokens: int, cached_tokens: int, seconds: float, predicted_s: float = 0.0, padded_tokens: int = 0
        ) -> None:
            even_s = 1e-3 + 1e-4 * tokens + 1e-6 * cached_tokens
            super().add(tokens, cached_tokens, even_s, predicted_s, padded_tokens)

    loop.PassMeter = EvenMeter  # type: ignore[attr-defined]


def _new_role(settings: RoleSettings) -> RoleServer:
    if settings.role == "scheduler":
        _install()
    if settings.role == "decode":
        make_faulty(settings.role)
        if os.environ.get(EVEN):
            _report_even_times()
    return runtime.new_role(settings)


if __name__ == "__main__":
    role_main.new_role = _new_role  # type: ignore[attr-defined]
    role_main.main()
