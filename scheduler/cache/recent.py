"""Where prompts with long common beginnings are queued, are computed, or were stored of late, by their marks.

A shard says what it has of a prompt when the prompt is submitted. That misses what is being computed then, and what is
stored while the prompt waits. So prompts of one moment that begin alike go where that beginning is computed, unless
another instance is quicker, and only what each of them adds counts as work. What a shard says goes before what it
stored earlier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.prefix_marks import MARK_BYTES, MARK_LENGTHS
from alignedserve.request import RequestKey

MOST_MARKS = 1 << 16


@dataclass(slots=True)
class Place:
    """Where a beginning is. `prefill_id`: the instance that computes it; "" while its request is queued.

    `pool_id`: the shard that has it, since `stored_s`; "" until it is stored.
    """

    key: RequestKey
    prefill_id: str = ""
    pool_id: str = ""
    stored_s: float = 0.0

    @property
    def queued(self) -> bool:
        return not self.prefill_id and not self.pool_id

    def near(self, prefill_id: str, pool_id: str) -> bool:
        """Whether this instance, which writes to this shard, would find it."""
        return self.pool_id == pool_id if self.pool_id else bool(self.prefill_id) and self.prefill_id == prefill_id


class RecentPrefixes:
    """The newest MOST_MARKS marks. Hints: nothing is held, and what a shard gives up is here until it says so."""

    def __init__(self, most_marks: int = MOST_MARKS) -> None:
        self._most = most_marks
        self._places: OrderedDict[bytes, Place] = OrderedDict()  # by mark, the one used least recently first

    def __len__(self) -> int:
        return len(self._places)

    def find(self, marks: bytes) -> list[tuple[int, Place]]:
        """(tokens, place) for each beginning of the prompt with these marks that is known, the longest first."""
        found = []
        for number in range(len(marks) // MARK_BYTES - 1, -1, -1):
            place = self._places.get(marks[number * MARK_BYTES : (number + 1) * MARK_BYTES])
            if place is not None:
                found.append((MARK_LENGTHS[number], place))
        return found

    def queued(self, key: RequestKey, marks: bytes) -> int:
        """The request waits for a prefill instance. Returns how many of its first tokens come without it."""
        known = self.find(marks)
        self._put(marks, Place(key), only_new=True)
        return known[0][0] if known else 0

    def sent(self, key: RequestKey, marks: bytes, prefill_id: str, pool_id: str) -> None:
        """The instance, which writes to this shard, computes what the shard lacks of the request's prompt."""
        place = Place(key, prefill_id)
        for mark in _each(marks):
            there = self._places.get(mark)
            if there is None or not there.near(prefill_id, pool_id):
                self._set(mark, place)

    def stored(self, key: RequestKey, marks: bytes, pool_id: str, now_s: float) -> None:
        """The shard has the request's prompt."""
        self._put(marks, Place(key, "", pool_id, now_s))

    def told(self, marks: bytes, has: Iterable[tuple[str, int]], since_s: float) -> None:
        """(shard, tokens) of what these shards have of a prompt, as they said after `since_s`: what they had before,
        and is longer, has gone.
        """
        tokens_of = dict(has)
        for mark, length in zip(_each(marks), MARK_LENGTHS, strict=False):
            place = self._places.get(mark)
            if place is None or place.stored_s >= since_s:
                continue
            if place.pool_id in tokens_of and tokens_of[place.pool_id] < length:
                del self._places[mark]

    def ended(self, key: RequestKey, marks: bytes) -> None:
        """The request is over. What it was to compute, and has not stored, does not come."""
        for mark in _each(marks):
            place = self._places.get(mark)
            if place is not None and place.key == key and not place.pool_id:
                del self._places[mark]

    def lose_shard(self, pool_id: str) -> None:
        for mark in [mark for mark, place in self._places.items() if place.pool_id == pool_id]:
            del self._places[mark]

    def _put(self, marks: bytes, place: Place, *, only_new: bool = False) -> None:
        for mark in _each(marks):
            if only_new and mark in self._places:
                self._places.move_to_end(mark)
            else:
                self._set(mark, place)

    def _set(self, mark: bytes, place: Place) -> None:
        self._places[mark] = place
        self._places.move_to_end(mark)
        if len(self._places) > self._most:
            self._places.popitem(last=False)


def _each(marks: bytes) -> list[bytes]:
    return [marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES)]
