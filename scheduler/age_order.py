"""Items ordered by the time since which they wait, in chunks.

A chunk is an array of times and a list of items, both contiguous in memory, so that the oldest n are read as slices.
That matters when a million items exceed the processor's caches: one that is passed over is not read. Chunks and places
in them are found by bisecting; a change moves at most a chunk.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

Item = TypeVar("Item")
CHUNK = 512  # items that a chunk gets in order; items added late may double it


class AgeOrder(Generic[Item]):
    """Items by `since_s`, oldest first; of equals, the one added first.

    Adding in order, which nearly all items are, and reading the first are O(1).
    """

    __slots__ = ("_ages", "_items", "_starts")

    def __init__(self) -> None:
        """At least one chunk; the only one may be empty."""
        self._ages = [array("d")]
        self._items: list[list[Item]] = [[]]
        self._starts = [-math.inf]  # of each chunk: at most its first age, at least the last age of the chunk before

    def __len__(self) -> int:
        """O(chunks); whether there are any is O(1)."""
        return sum(map(len, self._items))

    def __bool__(self) -> bool:
        return bool(self._items[0])

    def __iter__(self) -> Iterator[Item]:
        """Oldest first. Must not be changed during iteration."""
        return chain.from_iterable(self._items)

    def first(self) -> tuple[float, Item] | None:
        """(since_s, item) of the oldest; None if empty."""
        items = self._items[0]
        return (self._ages[0][0], items[0]) if items else None

    def oldest(self, most: int, until_s: float = math.inf) -> list[Item]:
        """The oldest `most`, without those that wait since after `until_s`."""
        found: list[Item] = []
        for ages, items in zip(self._ages, self._items, strict=True):
            count = min(most - len(found), len(items))
            if until_s < math.inf:
                count = bisect_right(ages, until_s, 0, count)
            found += items[:count]
            if count < len(items):
                break
        return found

    def add(self, item: Item, since_s: float) -> None:
        ages = self._ages[-1]
        if ages and since_s < ages[-1]:
            self._add_late(item, since_s)
        elif len(ages) < CHUNK:
            ages.append(since_s)
            self._items[-1].append(item)
        else:
            self._ages.append(array("d", (since_s,)))
            self._items.append([item])
            self._starts.append(since_s)

    def remove(self, item: Item, since_s: float) -> None:
        """Remove an item. `since_s` is the value it was added with; the item must be present."""
        chunk = bisect_left(self._starts, since_s, 1) - 1  # the first that may hold it
        while True:
            ages, items = self._ages[chunk], self._items[chunk]
            place = bisect_left(ages, since_s)
            if place == len(items) or items[place] is not item:
                place = _place(items, item, place, bisect_right(ages, since_s, place))
            if place >= 0:
                break
            chunk += 1
        del ages[place], items[place]
        if len(self._starts) > 1 and 2 * len(items) < CHUNK:
            self._merge(chunk)

    def _add_late(self, item: Item, since_s: float) -> None:
        chunk = bisect_right(self._starts, since_s, 1) - 1
        ages, items = self._ages[chunk], self._items[chunk]
        place = bisect_right(ages, since_s)
        ages.insert(place, since_s)
        items.insert(place, item)
        if len(items) > 2 * CHUNK:
            self._ages.insert(chunk + 1, ages[CHUNK:])
            self._items.insert(chunk + 1, items[CHUNK:])
            self._starts.insert(chunk + 1, ages[CHUNK])
            del ages[CHUNK:], items[CHUNK:]

    def _merge(self, chunk: int) -> None:
        """Merge a short chunk with one beside it, if they fit into one. An empty one always does."""
        for left in range(max(chunk - 1, 0), min(chunk + 1, len(self._items) - 1)):
            if len(self._items[left]) + len(self._items[left + 1]) <= 2 * CHUNK:
                self._ages[left] += self._ages.pop(left + 1)
                self._items[left] += self._items.pop(left + 1)
                del self._starts[left + 1]
                return


def _place(items: list[Item], item: Item, begin: int, end: int) -> int:
    """The place of an item among equally old ones; -1 if it is not there."""
    for place in range(begin, end):
        if items[place] is item:  # an entry compares slowly
            return place
    return items.index(item, begin, end) if item in items[begin:end] else -1
