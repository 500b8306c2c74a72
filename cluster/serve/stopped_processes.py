"""The command's eye on what Ray and Serve have started for it: nobody else notices that one of those is stopped.

Roles and gateways are ended sooner by their supervisor. But while Serve's controller is stopped, no gateway and no
supervisor is replaced, and while HAProxy is, no request gets in. Without its raylet or GCS nothing is replaced either:
the command ends when one of them has ended, so one that stays stopped is ended too.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from alignedserve.cluster.launch.descendants import Descendants

STOPPED_S = 2.0
UNREPLACED_STOPPED_S = 10.0  # the whole cluster ends with it
NOTE_S = 2.0
REPLACED = ("ray::", "haproxy")  # how those call themselves that somebody starts again
UNREPLACED = ("raylet", "gcs_server")


class StoppedWatch:
    """`look` is to be called again and again. What a debugger stops is left alone."""

    def __init__(
        self, descendants: Descendants, after_s: float = STOPPED_S, unreplaced_s: float = UNREPLACED_STOPPED_S
    ) -> None:
        self._descendants = descendants
        self._limits = dict.fromkeys(REPLACED, after_s) | dict.fromkeys(UNREPLACED, unreplaced_s)
        self._noted_at = float("-inf")
        self._since: dict[int, float] = {}

    def look(self) -> list[str]:
        """Kill those that have been stopped for too long; what to say of each."""
        now, said = time.monotonic(), []
        if now - self._noted_at >= NOTE_S:
            self._noted_at = now
            self._descendants.note()
        self._since = {pid: self._since.get(pid, now) for pid in self._descendants.stopped()}
        for pid, since in self._since.items():
            name = _name(pid)
            limit_s = next((limit for word, limit in self._limits.items() if name.startswith(word)), None)
            if limit_s is not None and now - since >= limit_s:
                self._descendants.kill(pid)
                follows = ": Ray starts another" if name.startswith(REPLACED) else ""
                said.append(f"{name} (pid {pid}) had been stopped for {limit_s:g} s, and was ended{follows}")
        return said


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return os.path.basename(command.decode(errors="replace"))
    return ""
