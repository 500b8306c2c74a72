"""Events that stay in an alarm for a minute."""

from __future__ import annotations

from collections import deque

ALARM_S = 60.0


class LastMinute:
    """How often an event happened within the last `ALARM_S`."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque()

    def add(self, now_s: float, times: int = 1) -> None:
        self._times_s.extend([now_s] * times)

    def count(self, now_s: float) -> int:
        while self._times_s and now_s - self._times_s[0] > ALARM_S:
            self._times_s.popleft()
        return len(self._times_s)
