"""Keys (of requests, say) by the time at which each is due."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=tuple[Any, ...])

SPARE = 64  # entries of removed keys before the heap is rebuilt


class Deadlines(Generic[Key]):
    """A heap; removed keys are skipped when they reach the top. O(log n) an operation, amortised."""

    def __init__(self) -> None:
        self._due_s: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._due_s)

    def __contains__(self, key: Key) -> bool:
        return key in self._due_s

    def __iter__(self) -> Iterator[Key]:
        return iter(self._due_s)

    def set(self, key: Key, due_s: float) -> None:
        """Set the deadline of a key, replacing the previous one; infinite: never due."""
        self._due_s[key] = due_s
        if due_s < math.inf:
            heappush(self._heap, (due_s, key))
            if len(self._heap) > 2 * len(self._due_s) + SPARE:
                self._heap = [(due_s, key) for key, due_s in self._due_s.items() if due_s < math.inf]
                heapify(self._heap)

    def get(self, key: Key) -> float | None:
        """The deadline of a key; None if it has none here."""
        return self._due_s.get(key)

    def discard(self, key: Key) -> None:
        self._due_s.pop(key, None)

    def first(self) -> tuple[float, Key] | None:
        """(deadline, key) of the key that is due first; None if none has a finite deadline."""
        heap = self._heap
        while heap and self._due_s.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None

    def next_s(self) -> float:
        """The first deadline; infinite if there is none."""
        first = self.first()
        return math.inf if first is None else first[0]

    def pop_due(self, now_s: float) -> list[tuple[float, Key]]:
        """Remove and return (deadline, key) of the keys that are due, earliest first."""
        found = []
        while self.next_s() <= now_s:
            due = heappop(self._heap)
            del self._due_s[due[1]]
            found.append(due)
        return found
