"""Switches reading or writing off for a while after repeated faults of the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_FAULTS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 900.0


class Breaker:
    """`open` after `MOST_FAULTS` in a row, or one `hang`, for a time that doubles until something succeeds."""

    def __init__(self, doing: str, clock: Callable[[], float]) -> None:
        """`doing`: what is switched off, as it is called in the log. `clock`: in seconds."""
        self.faults = 0  # of all time
        self._doing, self._clock = doing, clock
        self._in_a_row = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether nothing may be tried now."""
        return self._clock() < self._until

    def succeeded(self) -> None:
        self._in_a_row, self._pause_s, self._until = 0, FIRST_PAUSE_S, 0.0

    def failed(self, reason: object) -> None:
        self.faults += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_FAULTS:
            self._pause(reason)
        else:
            logger.info("%s failed: %s", self._doing, reason)

    def hung(self, reason: object) -> None:
        """No end is in sight: one such fault is enough."""
        self.faults += 1
        self._in_a_row = MOST_FAULTS
        self._pause(reason)

    def _pause(self, reason: object) -> None:
        if self.open:
            return
        self._until = self._clock() + self._pause_s
        logger.warning("%s is off for %.0f s, for the disk has failed: %s", self._doing, self._pause_s, reason)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
