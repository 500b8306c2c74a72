"""Which rank computes a running request, where ranks share a mixture's experts and wait for each other in each layer.

A placement (`scheduler/ranks/`) decides, as in the simulator. Ranks on CPUs share one cache, so that a request can go
to another rank from one iteration to the next without a copy. Where each has a cache of its own, the iteration
scheduler has asked the placement before the request joined (`scheduler/ranks/group_scheduler.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Protocol

from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import RunItem
from alignedserve.scheduler.ranks.base import ASKED_AFTER, Members, Placement, Rank, Ready

_ROOM = 1 << 40  # blocks: the cache is everyone's
_REMEMBERED = 4096  # requests that do not run now: some pause for an iteration


class Placer(Protocol):
    def place(self, run: Sequence[RunItem]) -> list[int]:
        """The rank of each request of an iteration."""
        ...


class RankOfBlocks:
    """Where each rank has a cache of its own, with `each` blocks: the rank that has the request's blocks."""

    def __init__(self, each: int) -> None:
        self._each = each

    def place(self, run: Sequence[RunItem]) -> list[int]:
        return [item.block_ids[0] // self._each for item in run]


class RankPlacer(Members):
    """Used by the decode thread."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        placement.share_cache()
        self._numbers = count()
        self._unasked = 0  # iterations since the placement was asked
        self._running: dict[RequestKey, Ready] = {}
        self._rank_of: OrderedDict[RequestKey, tuple[int, int]] = OrderedDict()  # (rank, number), the last used last

    def of(self, rank: int) -> Iterable[Ready]:
        return [one for key, one in self._running.items() if key in self._rank_of and self._rank_of[key][0] == rank]

    def place(self, run: Sequence[RunItem]) -> list[int]:
        before, self._running = self._running, {}
        new = []
        for item in run:
            known = self._rank_of.get(item.key)
            number = next(self._numbers) if known is None else known[1]
            self._running[item.key] = one = Ready(item.key, item.kv_tokens, 0, number)
            if known is None:
                new.append(one)
            else:
                self._rank_of.move_to_end(item.key)
        self._unasked += 1
        if new or before.keys() != self._running.keys() or self._unasked >= ASKED_AFTER:
            self._refill(new)
        while len(self._rank_of) > _REMEMBERED + len(run):
            self._rank_of.popitem(last=False)
        return [self._rank_of[item.key][0] for item in run]

    def _refill(self, new: Sequence[Ready]) -> None:
        """Requests have come or gone, or have grown for a while."""
        self._unasked = 0
        ranks = self._counters()
        for one in new:
            rank = self._placement.add(one, ranks)
            if rank is not None:
                self._put(one.key, rank)
                ranks[rank].take(one)
        for move in self._placement.moves(ranks, self):
            self._put(move.key, move.to_rank)
        for place in self._placement.refill(ranks):
            self._put(place.key, place.rank)

    def _put(self, key: RequestKey, rank: int) -> None:
        self._rank_of[key] = rank, self._running[key].number

    def _counters(self) -> list[Rank]:
        """Of the requests that have a rank. Each has room for all."""
        ranks = [Rank(number, room_blocks=_ROOM) for number in range(self._placement.ranks)]
        for key, one in self._running.items():
            if key in self._rank_of:
                ranks[self._rank_of[key][0]].take(one)
        for rank in ranks:
            rank.slots = len(self._running) - rank.requests
        return ranks
