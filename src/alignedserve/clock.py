"""Clocks are arguments: real ones here, and one that tests and the simulator move by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a clock that never goes back."""

    def now_s(self) -> float: ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until told otherwise."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._now_s += seconds
