"""The waiting requests that may be placed next, by length, so that none is overtaken by more than a fixed number."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort

from alignedserve.scheduler.ranks.base import Ready


class Window:
    """Waiting requests: the oldest, and those that came within `size` of it, by length; the others later."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_tokens: list[tuple[int, int]] = []  # tokens, number of the requests in the window
        self._oldest: list[int] = []  # heap of the numbers in the window, and of removed ones
        self._later: list[int] = []  # heap
        self._requests: dict[int, Ready] = {}
        self._tokens = self._blocks = 0  # of the window
        self._furthest = -1  # the greatest number that was removed

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def mean_blocks(self) -> float:
        return self._blocks / len(self._by_tokens) if self._by_tokens else 0.0

    @property
    def mean_tokens(self) -> float:
        return self._tokens / len(self._by_tokens) if self._by_tokens else 0.0

    def add(self, request: Ready) -> None:
        self._requests[request.number] = request
        heapq.heappush(self._later, request.number)
        self._extend()

    def remove(self, request: Ready) -> None:
        del self._requests[request.number]
        del self._by_tokens[bisect_left(self._by_tokens, (request.tokens, request.number))]
        self._tokens -= request.tokens
        self._blocks -= request.blocks
        self._furthest = max(self._furthest, request.number)
        self._extend()

    def overtaken(self) -> Ready | None:
        """The oldest request, if half as many as may have overtaken it; else None."""
        oldest = self._first()
        return self._requests[oldest] if oldest is not None and self._furthest - oldest > self._size // 2 else None

    def longest_first(self) -> list[Ready]:
        """The requests of the window, as it is now."""
        return [self._requests[number] for _, number in reversed(self._by_tokens)]

    def longest(self, most: float, most_blocks: int) -> Ready | None:
        """The longest request of at most `most` tokens, else the shortest; None if none has at most `most_blocks`."""
        by_tokens, requests = self._by_tokens, self._requests
        at = max(1, bisect_right(by_tokens, most, key=lambda one: one[0]))
        found = (requests[number] for _, number in reversed(by_tokens[:at]))
        return next((one for one in found if one.blocks <= most_blocks), None)

    def _first(self) -> int | None:
        while self._oldest and self._oldest[0] not in self._requests:
            heapq.heappop(self._oldest)
        return self._oldest[0] if self._oldest else None

    def _extend(self) -> None:
        """Take from the later ones those that now belong to the window."""
        later = self._later
        while later:
            first = self._first()
            if first is not None and later[0] >= first + self._size:
                return
            number = heapq.heappop(later)
            request = self._requests[number]
            heapq.heappush(self._oldest, number)
            insort(self._by_tokens, (request.tokens, number))
            self._tokens += request.tokens
            self._blocks += request.blocks
