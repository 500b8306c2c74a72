"""Starts `alignedserve serve` with fake roles, and waits for roles."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from alignedserve.cluster.cli.serve_process import ServeProcess


class FakeServeProcess(ServeProcess):
    """`alignedserve serve` with roles that only join (`fake_roles`): Ray and Serve start, without a model."""

    @property
    def command(self) -> Sequence[str]:
        words = list(super().command)
        words[words.index("alignedserve.cluster.cli.main")] = "support.fake_serve"
        return words


def wait_ready(server: ServeProcess, role_id: str, old_pid: int = 0, timeout_s: float = 30.0) -> int:
    """The pid of the role's process once it is ready, and another than `old_pid`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the supervisor itself may be the one that is replaced
            for role in server.get("/alignedserve/status", timeout_s=5.0)["roles"]:
                if role["id"] == role_id and role["pid"] != old_pid and role["state"] == "ready":
                    return int(role["pid"])
        time.sleep(0.1)
    raise AssertionError(f"{role_id} did not come back")
