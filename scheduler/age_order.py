"""Requests ordered by the time since which they wait.

Insertion is O(1) for nearly all, because most arrive in order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import TYPE_CHECKING, Generic, TypeVar

from alignedserve.request import RequestKey

if TYPE_CHECKING:
    from alignedserve.scheduler.quad_tree import Entry

Item = TypeVar("Item")
SLACK = 64  # removed places that a dict may keep; it is rebuilt when it has more than this and more than its live items
FEW_GONE = 4096  # removed places that are cheap to skip: microseconds
ANEW = 8  # rebuilding a dict takes about this many times as long as skipping as many removed places


class _ByAge(Generic[Item]):
    """Items by key, oldest first.

    The few that are added late (older than the last one) are kept in a sorted side list.
    """

    __slots__ = ("_early", "_in_order", "_last_s")

    def __init__(self, in_order: dict[RequestKey, Item]) -> None:
        self._in_order = in_order
        self._early: list[tuple[float, RequestKey, Item]] = []
        self._last_s = 0.0

    def __len__(self) -> int:
        return len(self._in_order) + len(self._early)

    def _add(self, key: RequestKey, since_s: float, item: Item) -> None:
        if self._in_order and since_s < self._last_s:
            insort(self._early, (since_s, key, item), key=_place)
        else:
            self._in_order[key] = item
            self._last_s = since_s

    def _remove(self, key: RequestKey, since_s: float) -> bool:
        """Remove the key. Returns whether it was in `_in_order` (else it was in the side list)."""
        if self._in_order.pop(key, None) is not None:
            return True
        del self._early[bisect_left(self._early, (since_s, key), key=_place)]
        return False


class AgeOrder(_ByAge[float]):
    """Keys by `since_s`, oldest first.

    The first is read at every event, in O(1) however many were removed before it.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(OrderedDict())

    def __iter__(self) -> Iterator[RequestKey]:
        """Oldest first. Must not be changed during iteration."""
        if not self._early:
            return iter(self._in_order)
        ordered = ((since_s, key) for key, since_s in self._in_order.items())
        return (key for _, key in merge(map(_place, self._early), ordered, key=_since))

    def add(self, key: RequestKey, since_s: float) -> None:
        self._add(key, since_s, since_s)

    def remove(self, key: RequestKey, since_s: float) -> None:
        """Remove a key. `since_s` is the value it was added with; the key must be present."""
        self._remove(key, since_s)

    def first(self) -> tuple[float, RequestKey] | None:
        """(since_s, key) of the oldest key; None if empty."""
        oldest = next(iter(self._in_order), None)
        if oldest is None:
            return _place(self._early[0]) if self._early else None
        place = (self._in_order[oldest], oldest)
        return min(place, _place(self._early[0])) if self._early else place


class EntryOrder(_ByAge["Entry"]):
    """Entries, oldest first.

    They are in a plain dict because its items are contiguous in memory, which matters when a million of them exceed the
    processor's caches. A dict keeps the places of removed items, and reading from the front passes over them. It is
    rebuilt, preferably at a removal, when as many places have been passed over as a rebuild costs.
    """

    __slots__ = ("_gone", "_passed")

    def __init__(self) -> None:
        super().__init__({})
        self._gone = 0  # removed from the dict since it was made
        self._passed = 0  # removed places that iterations passed over, at most; counted only above FEW_GONE

    def __iter__(self) -> Iterator[Entry]:
        """Oldest first. Must not be changed during iteration."""
        if self._gone > FEW_GONE:
            self._passed += self._gone
            if self._passed > 2 * ANEW * len(self._in_order):  # for the case without removals
                self._make_anew()
        if not self._early:
            return iter(self._in_order.values())
        early = (entry for _, _, entry in self._early)
        return merge(early, self._in_order.values(), key=lambda entry: entry.since_s)

    def add(self, entry: Entry) -> None:
        self._add(entry.key, entry.since_s, entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry; it must be present."""
        self._gone += self._remove(entry.key, entry.since_s)
        if self._gone > len(self._in_order) + SLACK or self._passed > ANEW * len(self._in_order):
            self._make_anew()

    def _make_anew(self) -> None:
        self._in_order = dict(self._in_order)
        self._gone = self._passed = 0


def _place(early: tuple[float, RequestKey, object]) -> tuple[float, RequestKey]:
    return early[:2]


def _since(place: tuple[float, RequestKey]) -> float:
    return place[0]
