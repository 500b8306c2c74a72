"""Measures a compute thread's progress, to detect whether it hangs. That thread writes it, any thread may read it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# A step with more work than all before may take longer. But work that shares a pass costs less than work alone.
SHARING = 0.2


class StepMeter:
    """`count` grows with every step and message; `waiting` is True while the thread has nothing to do."""

    def __init__(self) -> None:
        self.count = 0
        self.waiting = True
        self._longest_s = 0.0
        self._most_work = 1.0
        self._work = 0.0

    @property
    def longest_s(self) -> float:
        """The seconds that the present step may take, estimated from the longest step so far."""
        return self._longest_s * max(1.0, SHARING * self._work / self._most_work)

    @contextmanager
    def step(self, work: float) -> Iterator[None]:
        """Encloses one step. `work` is a measure by which steps are compared, for example new tokens."""
        self._work = work
        begun = time.monotonic()
        yield
        self._longest_s = max(self._longest_s, time.monotonic() - begun)
        self._most_work = max(self._most_work, work)
        self._work = 0.0
        self.count += 1

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Encloses a wait for a message."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
            self.count += 1
