"""Ends Serve's HAProxyManager while HAProxy lets no request through although gateways are ready. Serve starts another.

Serve's health check of HAProxy asks its admin socket only. After three failed reloads a manager waits for the next
change of the replicas, and HAProxy answers 503 until then (ray 2.60, `HAProxyManager._coalesce_and_apply`). A manager
that does not get ready is waited for longer with every one before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from alignedserve.cluster.launch.descendants import Descendants
from alignedserve.cluster.records import fetch_json
from alignedserve.errors import UnavailableError

MANAGER = "ray::HAProxyManager"
SILENT_S = 15.0  # Serve's own replacement took 3.5 to 4.3 s on two busy cores (docs/failures.md)
PROBE_S = 2.0


class FrontWatch:
    """`look` must be called periodically. `live_url` is HAProxy's own frontend for probes. `ready` tells whether a
    gateway is ready, or None if that is not known."""

    def __init__(
        self, live_url: str, ready: Callable[[], bool | None], descendants: Descendants, after_s: float = SILENT_S
    ) -> None:
        self._url = live_url + "/live"
        self._ready = ready
        self._descendants = descendants
        self._after_s = self._limit_s = after_s
        self._since: dict[int, float] = {}  # when each manager was first seen in this silence

    def look(self) -> str:
        """Ask once. Returns a message if a manager was ended, else ""."""
        answers, ready, now = self._answers(), self._ready(), time.monotonic()
        if answers:
            self._limit_s = self._after_s
        if answers or ready is False:
            self._since.clear()
            return ""
        self._descendants.note()
        self._since = {pid: self._since.get(pid, now) for pid in self._descendants.named(MANAGER)}
        overdue = [pid for pid, since in self._since.items() if now - since >= self._limit_s]
        if not overdue or not ready or answers is None:
            return ""
        for pid in overdue:
            self._descendants.kill(pid)
        silent = f"HAProxy let no request through for {self._limit_s:g} s"
        self._limit_s *= 2  # on a slow machine a start takes longer
        return f"{silent}, so {MANAGER} (pid {overdue[0]}) was ended: Ray starts a new one"

    def _answers(self) -> bool | None:
        """Whether a gateway answers. None if HAProxy accepts the connection only: clients may hold all others."""
        try:
            return "error" not in fetch_json(self._url, PROBE_S)
        except UnavailableError as error:
            refused = isinstance(getattr(error.__cause__, "reason", None), ConnectionRefusedError)
            return False if refused else None
