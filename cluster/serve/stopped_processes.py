"""Ends processes of Ray and Serve that stay stopped (SIGSTOP). No other process detects them.

The supervisor ends stopped roles and gateways sooner. But while Serve's controller is stopped, no gateway or supervisor
is replaced, and while HAProxy is stopped, no request gets in. A stopped raylet or GCS is ended too: nothing can be
replaced without it, and the command ends when it has ended.
"""

from __future__ import annotations

import time

from alignedserve.cluster.launch.descendants import Descendants
from alignedserve.cluster.launch.processes import name_of

STOPPED_S = 2.0
UNREPLACED_STOPPED_S = 10.0  # longer, because the whole cluster ends with such a process
NOTE_S = 2.0
REPLACED = ("ray::", "haproxy")  # name prefixes of processes that are started again
UNREPLACED = ("raylet", "gcs_server")


class StoppedWatch:
    """`look` must be called periodically. Processes stopped by a debugger are left alone."""

    def __init__(
        self, descendants: Descendants, after_s: float = STOPPED_S, unreplaced_s: float = UNREPLACED_STOPPED_S
    ) -> None:
        self._descendants = descendants
        self._limits = dict.fromkeys(REPLACED, after_s) | dict.fromkeys(UNREPLACED, unreplaced_s)
        self._noted_at = float("-inf")
        self._since: dict[int, float] = {}

    def look(self) -> list[str]:
        """Kill processes that have been stopped for too long. Returns a message for each."""
        now, said = time.monotonic(), []
        if now - self._noted_at >= NOTE_S:
            self._noted_at = now
            self._descendants.note()
        self._since = {pid: self._since.get(pid, now) for pid in self._descendants.stopped()}
        for pid, since in self._since.items():
            name = name_of(pid)
            limit_s = next((limit for word, limit in self._limits.items() if name.startswith(word)), None)
            if limit_s is not None and now - since >= limit_s:
                self._descendants.kill(pid)
                follows = ": Ray starts a new one" if name.startswith(REPLACED) else ""
                said.append(f"{name} (pid {pid}) was stopped for {limit_s:g} s, and was ended{follows}")
        return said
