"""Virtual time: calls in order of time; calls at equal times always in the same order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

Event = list[Any]  # time, rank, number, call (None after cancellation), arguments


class Clock:
    """Calls at the same time are ordered by rank.

    Those of rank 0 come first, in the order in which they were scheduled. An iteration boundary has its instance's own
    rank above 0, so that its place does not depend on when it was scheduled. So a run that leaps over boundaries and
    one that takes each of them order everything else alike.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._rank = 0  # the highest rank called at `now_s`
        self._heap: list[Event] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any, rank: int = 0) -> Event:
        event: Event = [max(time_s, self.now_s), rank, next(self._numbers), call, arguments]
        heapq.heappush(self._heap, event)
        return event

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> Event:
        event: Event = [self.now_s + seconds, 0, next(self._numbers), call, arguments]
        heapq.heappush(self._heap, event)
        return event

    def cancel(self, event: Event) -> None:
        event[3] = None

    def passed(self, time_s: float, rank: int) -> bool:
        """Whether a call with this time and rank would already have run."""
        return time_s < self.now_s or (time_s == self.now_s and rank <= self._rank)

    def run(self) -> None:
        """Run until no calls are left."""
        heap = self._heap
        while heap:
            time_s, rank, _, call, arguments = heapq.heappop(heap)
            if call is None:
                continue
            if time_s > self.now_s:
                self.now_s, self._rank = time_s, rank
            elif rank > self._rank:
                self._rank = rank
            call(*arguments)
