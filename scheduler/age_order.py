"""Requests in the order of the time since which they wait: O(1) for nearly all, which come in order."""

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
SLACK = 64  # removed places that a dict may keep; with more than it has items it is made anew
FEW_GONE = 4096  # removed places that nobody minds to pass over: microseconds
ANEW = 8  # to make a dict anew takes about so many times as long as to pass over as many removed places


class _ByAge(Generic[Item]):
    """Items by key, oldest first. The few that come back late (older than the last one) are kept sorted aside."""

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
        """Whether it was among those in order."""
        if self._in_order.pop(key, None) is not None:
            return True
        del self._early[bisect_left(self._early, (since_s, key), key=_place)]
        return False


class AgeOrder(_ByAge[float]):
    """Keys by `since_s`, oldest first. The first is asked for with each event: O(1), whoever has left before it."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(OrderedDict())

    def __iter__(self) -> Iterator[RequestKey]:
        """Oldest first. Not to be changed while it is iterated over."""
        if not self._early:
            return iter(self._in_order)
        ordered = ((since_s, key) for key, since_s in self._in_order.items())
        return (key for _, key in merge(map(_place, self._early), ordered, key=_since))

    def add(self, key: RequestKey, since_s: float) -> None:
        self._add(key, since_s, since_s)

    def remove(self, key: RequestKey, since_s: float) -> None:
        """`since_s` as it was added with; it must be there."""
        self._remove(key, since_s)

    def first(self) -> tuple[float, RequestKey] | None:
        """(since_s, key) of the oldest; None where there is none."""
        oldest = next(iter(self._in_order), None)
        if oldest is None:
            return _place(self._early[0]) if self._early else None
        place = (self._in_order[oldest], oldest)
        return min(place, _place(self._early[0])) if self._early else place


class EntryOrder(_ByAge["Entry"]):
    """Entries, oldest first.

    In a plain dict: they lie one behind the other, which counts where a million are not in the processor's caches. But
    it keeps the places of those that were removed, and reading it from the front passes over all of them: it is made
    anew, best with a removal, when as many have been passed over as that takes.
    """

    __slots__ = ("_gone", "_passed")

    def __init__(self) -> None:
        super().__init__({})
        self._gone = 0  # removed from the dict since it was made
        self._passed = 0  # of those, where they were many, by all who read it: at most

    def __iter__(self) -> Iterator[Entry]:
        """Oldest first. Not to be changed while it is iterated over."""
        if self._gone > FEW_GONE:
            self._passed += self._gone
            if self._passed > 2 * ANEW * len(self._in_order):  # nothing is removed
                self._make_anew()
        if not self._early:
            return iter(self._in_order.values())
        early = (entry for _, _, entry in self._early)
        return merge(early, self._in_order.values(), key=lambda entry: entry.since_s)

    def add(self, entry: Entry) -> None:
        self._add(entry.key, entry.since_s, entry)

    def remove(self, entry: Entry) -> None:
        """It must be there."""
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
