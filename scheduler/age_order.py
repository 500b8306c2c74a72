"""Requests in the order of the time since which they wait: O(1) for nearly all, which come in order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge

from alignedserve.request import RequestKey


class AgeOrder:
    """Keys by `since_s`, oldest first. The few that come back late (older than the last one) are kept sorted aside."""

    __slots__ = ("_early", "_in_order", "_last_s")

    def __init__(self) -> None:
        self._in_order: OrderedDict[RequestKey, float] = OrderedDict()
        self._early: list[tuple[float, RequestKey]] = []
        self._last_s = 0.0

    def __len__(self) -> int:
        return len(self._in_order) + len(self._early)

    def __iter__(self) -> Iterator[RequestKey]:
        """Oldest first. Not to be changed while it is iterated over."""
        if not self._early:
            return iter(self._in_order)
        return (key for _, key in self._merged())

    def add(self, key: RequestKey, since_s: float) -> None:
        if self._in_order and since_s < self._last_s:
            insort(self._early, (since_s, key))
        else:
            self._in_order[key] = since_s
            self._last_s = since_s

    def remove(self, key: RequestKey, since_s: float) -> None:
        """`since_s` as it was added with; it must be there."""
        if self._in_order.pop(key, None) is None:
            del self._early[bisect_left(self._early, (since_s, key))]

    def first(self) -> tuple[float, RequestKey] | None:
        """(since_s, key) of the oldest; None where there is none."""
        oldest = next(iter(self._in_order), None)
        if oldest is None:
            return self._early[0] if self._early else None
        place = (self._in_order[oldest], oldest)
        return min(place, self._early[0]) if self._early else place

    def _merged(self) -> Iterator[tuple[float, RequestKey]]:
        ordered = ((since_s, key) for key, since_s in self._in_order.items())
        return merge(self._early, ordered, key=lambda place: place[0])
