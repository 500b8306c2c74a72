"""The room of ranks that have a cache each: blocks in each rank's, requests and the TPOT objective of all together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alignedserve.config import DecodeConfig
from alignedserve.scheduler.instance.cache_room import CacheRoom
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import Candidate
from alignedserve.scheduler.instance.running_batch import RunningRequest, Seat
from alignedserve.scheduler.ranks.base import Placement, Rank, Ready
from alignedserve.scheduler.ranks.ranked_batch import RankedBatch, Share


class GroupRoom(CacheRoom):
    """Of one plan. `placement` decides which of the ranks with room a candidate joins; `numbers`: of those that do."""

    def __init__(
        self,
        batch: RankedBatch,
        config: DecodeConfig,
        max_running: int,
        pace: Pace | None,
        placement: Placement,
        numbers: Iterator[int],
    ) -> None:
        super().__init__(batch, config, max_running, pace)
        self._members, self._placement = batch, placement
        self.shares = batch.shares()
        self._rooms = [CacheRoom(share, config, max_running, None) for share in self.shares]
        self.counters = [count(share, config) for share in self.shares]
        self._numbers = numbers

    def has_room(self, candidate: Candidate, seat: Seat) -> bool:
        """Whether the seat's rank has the blocks, now and until the next join."""
        return self._rooms[seat.rank].missing(candidate, len(seat.resident)) <= 0

    def take(self, candidate: Candidate, seats: Sequence[Seat]) -> Seat | None:
        if self.slots <= 0:
            return None
        fitting = {seat.rank: seat for seat in seats if self.has_room(candidate, seat)}
        if not fitting or not self.keeps_pace(candidate):
            return None
        seat = fitting[self._choose(candidate, fitting)]
        self.fill(candidate, seat)
        return seat

    def fill(self, candidate: Candidate, seat: Seat) -> None:
        self._rooms[seat.rank].fill(candidate, seat)
        self.slots -= 1
        self._size += 1

    def _choose(self, candidate: Candidate, fitting: dict[int, Seat]) -> int:
        need = self._blocks_for(candidate.kv_tokens + 1)
        for rank in self.counters:
            rank.slots, rank.room_blocks = self.slots, need if rank.number in fitting else 0
        ready = Ready(candidate.key, candidate.kv_tokens, need, next(self._numbers))
        return self._placement.choose(ready, self.counters)

    def never_enough(self, candidate: Candidate, victims: Sequence[RunningRequest]) -> bool:
        return all(
            room.never_enough(candidate, own) for room, own in zip(self._rooms, self._split(victims), strict=True)
        )

    def chosen(self, candidate: Candidate, victims: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Of one rank: the fewest that make room there."""
        found = []
        for share, room, own in zip(self.shares, self._rooms, self._split(victims), strict=True):
            room.slots = self.slots + len(self._members.leaving) - len(share.leaving)
            count = room.victims_needed(candidate, own, self.victims_for_pace(candidate, own))
            if count is not None:
                found.append((count, sum(member.kv_tokens for member in own[:count]), share.rank, own[:count]))
        return min(found)[-1] if found else []

    def _split(self, victims: Sequence[RunningRequest]) -> list[list[RunningRequest]]:
        """By rank, in order."""
        found: list[list[RunningRequest]] = [[] for _ in self._rooms]
        for member in victims:
            found[self._members.rank_of(member)].append(member)
        return found


def count(share: Share, config: DecodeConfig, slots: int = 0) -> Rank:
    """The counters of a rank. `room_blocks` is at most what it takes: each request may grow before the next join.

    An empty rank keeps nothing: its first request may be as large as its cache.
    """
    lengths = [member.kv_tokens for member in share.present()]
    most_growth = -(-config.join_iterations // share.block_size) + 1  # of each request, with one for the watermark
    kept = (share.size + 1) * most_growth + config.watermark_blocks if share.size else 0
    return Rank(
        share.rank,
        share.size,
        sum(lengths),
        max(lengths, default=0),
        min(lengths, default=0),
        slots=slots,
        room_blocks=share.available_blocks - kept,
    )
