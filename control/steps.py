"""What a compute thread has done, for whoever must tell whether it hangs. Written by that thread, read by any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# A step with more work than any before it may take longer, but work that shares a pass costs less than work alone.
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
        """Seconds that the present step may well take, by the longest so far."""
        return self._longest_s * max(1.0, SHARING * self._work / self._most_work)

    @contextmanager
    def step(self, work: float) -> Iterator[None]:
        """One step; `work` compares steps: new tokens, say."""
        self._work = work
        begun = time.monotonic()
        yield
        self._longest_s = max(self._longest_s, time.monotonic() - begun)
        self._most_work = max(self._most_work, work)
        self._work = 0.0
        self.count += 1

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Waiting for a message."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
            self.count += 1
