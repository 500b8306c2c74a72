"""The command's eye on what Ray and Serve have started for it: nobody else notices that one of those is stopped.

Roles and gateways are ended sooner by their supervisor. But while Serve's controller is stopped, no gateway and no
supervisor is replaced, and while HAProxy is, nobody gets in.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from alignedserve.cluster.descendants import Descendants

STOPPED_S = 2.0
NOTE_S = 2.0
REPLACED = ("ray::", "haproxy")  # how those call themselves that somebody starts again


class StoppedWatch:
    """`look` is to be called again and again. What a debugger stops is left alone."""

    def __init__(self, descendants: Descendants, after_s: float = STOPPED_S) -> None:
        self._descendants = descendants
        self._after_s = after_s
        self._noted_at = float("-inf")
        self._since: dict[int, float] = {}

    def look(self) -> list[str]:
        """Kill those that have been stopped for `after_s`; how each calls itself."""
        now, ended = time.monotonic(), []
        if now - self._noted_at >= NOTE_S:
            self._noted_at = now
            self._descendants.note()
        self._since = {pid: self._since.get(pid, now) for pid in self._descendants.stopped()}
        for pid, since in self._since.items():
            name = _name(pid)
            if now - since >= self._after_s and name.startswith(REPLACED):
                self._descendants.kill(pid)
                ended.append(f"{name} (pid {pid})")
        return ended


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return os.path.basename(command.decode(errors="replace"))
    return ""
