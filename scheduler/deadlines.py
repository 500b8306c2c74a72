"""Requests by the time at which each is due, by its own wait objective."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from alignedserve.request import RequestKey

SPARE = 64  # entries of removed requests before the heap is rebuilt


class Deadlines:
    """A heap; removed requests are skipped when they reach the top. O(log n) an operation, amortised."""

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
        """Set the deadline of a request, replacing the previous one; infinite: never due."""
        self._due_s[key] = due_s
        if due_s < math.inf:
            heappush(self._heap, (due_s, key))
            if len(self._heap) > 2 * len(self._due_s) + SPARE:
                self._heap = [(due_s, key) for key, due_s in self._due_s.items() if due_s < math.inf]
                heapify(self._heap)

    def discard(self, key: RequestKey) -> None:
        self._due_s.pop(key, None)

    def first(self) -> tuple[float, RequestKey] | None:
        """(deadline, key) of the request that is due first; None if none has a finite deadline."""
        heap = self._heap
        while heap and self._due_s.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None

    def next_s(self) -> float:
        """The first deadline; infinite if there is none."""
        first = self.first()
        return math.inf if first is None else first[0]

    def pop_due(self, now_s: float) -> list[tuple[float, RequestKey]]:
        """Remove and return (deadline, key) of the requests that are due, earliest first."""
        found = []
        while self.next_s() <= now_s:
            due = heappop(self._heap)
            del self._due_s[due[1]]
            found.append(due)
        return found
