"""Reports the progress of a start to the operator: in each heartbeat, and at intervals in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

SAY_EVERY_S = 2.0
WIDTH = 24

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


class StepProgress:
    """`text` is the progress at the last call; empty before the first, and once all is done."""

    def __init__(self, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = ""
        self._instance, self._clock = instance, clock
        self._said_s = clock()

    def of(self, what: str, unit: str) -> Progress:
        """To be called after each part of a step. `unit`: what is counted."""

        def note(done: int, count: int) -> None:
            bar = "#" * (WIDTH * done // count)
            text = f"{what} [{bar:-<{WIDTH}}] {done} of {count} {unit}"
            if done == count or self._clock() - self._said_s >= SAY_EVERY_S:
                self._said_s = self._clock()
                logger.info("%s: %s", self._instance, text)
            self.text = "" if done == count else text

        return note
