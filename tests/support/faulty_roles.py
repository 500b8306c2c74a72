"""The real roles, whose forward passes hang or are slow on request.

`python -m support.faulty_roles` is `role_main` with them. `FAULTY_FOLDER` in the environment names a
folder. While it has a file `hang-<role>`, the passes of that role do not begin, but its heartbeats go on.
While it has a file `slow-<role>`, each pass begins 0.1 s late.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from alignedserve.cluster.launch import role_main
from alignedserve.control import runtime
from alignedserve.control.runtime import RoleServer, RoleSettings

FOLDER = "FAULTY_FOLDER"


def make_faulty(role: str) -> None:
    from alignedserve.engine.runner import ModelRunner

    folder, forward = Path(os.environ[FOLDER]), ModelRunner.forward
    hang, slow = folder / f"hang-{role}", folder / f"slow-{role}"

    def faulty(self: ModelRunner, items: Any, on_layer: Any = None) -> Any:
        while hang.exists():
            time.sleep(0.005)
        if slow.exists():
            time.sleep(0.1)
        return forward(self, items, on_layer)

    ModelRunner.forward = faulty  # type: ignore[method-assign]


def _new_role(settings: RoleSettings) -> RoleServer:
    if settings.role in ("prefill", "decode"):
        make_faulty(settings.role)
    return runtime.new_role(settings)


if __name__ == "__main__":
    role_main.new_role = _new_role  # type: ignore[attr-defined]
    role_main.main()
