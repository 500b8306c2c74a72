"""Requests by the time at which each is due, by its own objective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from alignedserve.request import RequestKey

SPARE = 64  # entries of requests that have gone, before the heap is made anew


class Deadlines:
    """A heap; who has gone is skipped when it comes to the top. O(log n) an operation, amortised."""

    def __init__(self) -> None:
        self._due_s: dict[RequestKey, float] = {}
        self._heap: list[tuple[float, RequestKey]] = []

    def __len__(self) -> int:
        return len(self._due_s)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._due_s

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._due_s)

    def set(self, key: RequestKey, due_s: float) -> None:
        """In place of what was known; infinite: never."""
        self._due_s[key] = due_s
        if due_s < math.inf:
            heappush(self._heap, (due_s, key))
            if len(self._heap) > 2 * len(self._due_s) + SPARE:
                self._heap = [(due_s, key) for key, due_s in self._due_s.items() if due_s < math.inf]
                heapify(self._heap)

    def discard(self, key: RequestKey) -> None:
        self._due_s.pop(key, None)

    def first(self) -> tuple[float, RequestKey] | None:
        """(when, who) of the one that is due first; None where none ever is."""
        heap = self._heap
        while heap and self._due_s.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None

    def next_s(self) -> float:
        """When the first is due; infinite where none is."""
        first = self.first()
        return math.inf if first is None else first[0]

    def pop_due(self, now_s: float) -> list[tuple[float, RequestKey]]:
        """(when, who) of those that are due, the one that was first first; they are known no more."""
        found = []
        while self.next_s() <= now_s:
            due = heappop(self._heap)
            del self._due_s[due[1]]
            found.append(due)
        return found
