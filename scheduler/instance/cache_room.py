"""How much room a decode instance has: for growth (when to evict) and for another request (when to join).

There are two marks. The watermark is the number of blocks that must stay free: one for each request that can still
grow, since aligned requests cross block boundaries together, or a configured number. A join requires that the watermark
still holds after `join_iterations` iterations of the whole batch. So a join does not cause an eviction right away, and
an evicted request does not return at once. With a TPOT objective a join also requires that an iteration with it meets
the objective, counting each member with half of the growth that is expected of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain

from alignedserve.config import DecodeConfig
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import Candidate
from alignedserve.scheduler.instance.running_batch import Leaving, Occupancy, RunningRequest, Seat


class Shortfall:
    """Blocks missing for the next iteration plus the watermark, once every copy out has completed.

    Computed once over all running requests; leaving members are subtracted.
    """

    def __init__(self, batch: Occupancy, watermark_blocks: int) -> None:
        self._batch = batch
        self._block_size = batch.block_size
        self._watermark_blocks = watermark_blocks
        self._needed = self._growing = 0
        most = batch.size + max(batch.size, watermark_blocks)  # each needs at most one now and one later
        self._plenty = batch.allocator.available_blocks >= most
        if not self._plenty:
            self._look_at_all()

    def blocks(self) -> int:
        """The number of missing blocks; 0 or less if none are missing."""
        if self._plenty:
            return 0
        wanted = self._needed + (self._watermark_blocks or self._growing)
        return wanted - self._batch.allocator.available_blocks - self._batch.leaving_blocks()

    def leave(self, member: RunningRequest) -> None:
        """The member is about to be evicted."""
        if not self._plenty:
            held = len(member.block_ids)
            needs = member.kv_tokens >= held * self._block_size
            self._needed -= needs
            self._growing -= (held + needs) * self._block_size < member.max_total_tokens

    def _look_at_all(self) -> None:
        """`leave` for all members, inlined: this runs in every plan of a full cache."""
        size = self._block_size
        needed = growing = 0
        for member in self._batch.present():
            covered = len(member.block_ids) * size
            if member.kv_tokens >= covered:
                needed += 1
                covered += size
            growing += covered < member.max_total_tokens
        self._needed, self._growing = needed, growing


def to_relieve(batch: Occupancy, config: DecodeConfig, most: int, batch_id: int) -> Iterator[RunningRequest]:
    """Members to evict, by `eviction_rank`, until the free blocks, with those on their way out, reach the watermark.

    `most`: requests that may run; more can after a failed copy out. Of equals the last to join is evicted. One request
    always stays: alone it has room. No request is evicted before its first iteration, for which it has a block, so
    every evicted request has grown since it joined. The caller evicts each before it takes the next.
    """
    running = batch.running
    if len(running) <= 1:
        return
    shortfall = Shortfall(batch, config.watermark_blocks)
    victims: list[RunningRequest] | None = None
    while len(running) > 1:
        if len(running) <= most and shortfall.blocks() <= 0:
            return
        if victims is None:
            victims = [member for member in reversed(running.values()) if member.iterations]
        if not victims:
            return
        ranks = [member.eviction_rank(batch_id) for member in victims]
        victim = victims.pop(ranks.index(max(ranks)))
        shortfall.leave(victim)
        yield victim


class CacheRoom:
    """The room left for joins in one plan. If there is plenty, it is found without looking at every request."""

    def __init__(self, batch: Occupancy, config: DecodeConfig, max_running: int, pace: Pace | None) -> None:
        self.held = False  # a candidate with room for it was kept from joining by the pace
        self._pace = pace
        # Lengths of present members, grown: of all, for candidates that only take what others leave, and of the others
        self._lengths: dict[bool, list[int]] = {}  # filled when first needed
        self._batch = batch
        self._block_size = batch.block_size
        self._join_iterations = config.join_iterations
        self._watermark_blocks = config.watermark_blocks  # 0: one for each request that can still grow
        self._available = batch.allocator.available_blocks
        self._size = batch.size
        self.slots = max_running - batch.size
        # The most that one request can need within `join_iterations`, and one block for the watermark.
        self._most_growth = -(-config.join_iterations // self._block_size) + 1
        self._measured = False
        self._growth = 0  # blocks that the batch needs within `join_iterations`
        self._growing = 0  # requests that can still grow after those

    def take(self, candidate: Candidate, seats: Sequence[Seat]) -> Seat | None:
        """Account for the candidate as joined in one of `seats`. Returns None, unchanged, if there is no room."""
        seat = seats[0]
        if self.slots <= 0 or self.missing(candidate, len(seat.resident)) > 0 or not self.keeps_pace(candidate):
            return None
        self.fill(candidate, seat)
        return seat

    def keeps_pace(self, candidate: Candidate) -> bool:
        """Whether the objective, if any, is met with the candidate, which then counts as a member."""
        self.held |= not (kept := self._pace is None or self._keeps_pace(self._pace, candidate))
        return kept

    def fill(self, candidate: Candidate, seat: Seat) -> None:
        """The candidate, which has room, takes the seat."""
        need = self._blocks_for(candidate.kv_tokens + 1)
        self._available -= need - len(seat.resident)
        if self._measured:
            self._grow(candidate.kv_tokens, need, candidate.max_total_tokens, 1)
        self.slots -= 1
        self._size += 1

    def yielding(self, candidate: Candidate, batch_id: int) -> list[RunningRequest]:
        """Members that only take what others leave, to evict for the candidate; none if too few, or if it has room."""
        victims = [member for member in self._batch.running.values() if member.background and member.iterations]
        if not victims or self.never_enough(candidate, victims):
            return []
        victims.sort(key=lambda member: member.eviction_rank(batch_id), reverse=True)
        return self.chosen(candidate, victims)

    def never_enough(self, candidate: Candidate, victims: Sequence[RunningRequest]) -> bool:
        """Whether the candidate would not fit even without all `victims`; then they need not be sorted."""
        freed = Leaving(self._batch.allocator, chain(self._batch.going(), victims))
        return self._blocks_for(candidate.kv_tokens + 1) > self._available + freed.blocks

    def chosen(self, candidate: Candidate, victims: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Which of `victims` must go to make room for the candidate: the first ones; none if all are too few.

        Nothing joins afterwards.
        """
        return list(victims[: self.victims_needed(candidate, victims, self.victims_for_pace(candidate, victims)) or 0])

    def victims_for_pace(self, candidate: Candidate, victims: Sequence[RunningRequest]) -> int:
        """How many of `victims`, from the front, must go for the objective; more than all if none help."""
        return 0 if self._pace is None else self._victims_of(self._pace, candidate, victims)

    def victims_needed(self, candidate: Candidate, victims: Sequence[RunningRequest], least: int) -> int | None:
        """How many of `victims`, from the front and at least `least`, must go; None if all are too few."""
        self._measure()
        missing_slots = 1 - self.slots - len(self._batch.leaving)
        freed = Leaving(self._batch.allocator, self._batch.going())
        for count in range(len(victims) + 1):
            if count:
                member = victims[count - 1]
                freed.add(member)
                missing_slots -= 1
                self._size -= 1
                self._grow(member.kv_tokens, len(member.block_ids), member.max_total_tokens, -1)
            if count >= least and missing_slots <= 0 and self.missing(candidate, 0) <= freed.blocks:
                return count
        return None

    def _keeps_pace(self, pace: Pace, candidate: Candidate) -> bool:
        """Whether the objective is met with the candidate, which is then counted as a member.

        Members that only take what others leave pause for others.
        """
        every = candidate.background
        if every not in self._lengths:
            self._lengths[every] = [
                _grown(member, pace.growth(member.iterations))
                for member in self._batch.present()
                if every or not member.background
            ]
        lengths, own = self._lengths[every], _grown(candidate, pace.growth(0))
        if lengths and not pace.meets([*lengths, own]):
            return False
        for kind, counted in self._lengths.items():
            if kind or not candidate.background:
                counted.append(own)
        return True

    def _victims_of(self, pace: Pace, candidate: Candidate, victims: Sequence[RunningRequest]) -> int:
        """How many of `victims`, from the front, must go for the candidate to keep pace; more than all if none help."""
        leave = {member.key: place for place, member in enumerate(victims)}
        own = _grown(candidate, pace.growth(0))
        members = [
            (leave.get(member.key, len(victims)), _grown(member, pace.growth(member.iterations)))
            for member in self._batch.present()
            if candidate.background or not member.background
        ]

        def meets(count: int) -> bool:
            lengths = [length for place, length in members if place >= count]
            return not lengths or pace.meets([*lengths, own])

        return bisect_left(range(len(victims) + 1), True, key=meets)

    def missing(self, candidate: Candidate, resident_blocks: int) -> int:
        """Blocks that are missing for the candidate to join; 0 or less if none are."""
        need = self._blocks_for(candidate.kv_tokens + 1)
        missing = need - resident_blocks - self._available
        if not self._size:
            return missing  # nothing runs: the first candidate that fits at all may join
        if not self._measured:
            most = missing + (self._size + 1) * self._most_growth + self._watermark_blocks
            if missing > 0 or most <= 0:
                return max(missing, most)
            self._measure()
        soon, after = self._growth_of(candidate.kv_tokens, need, candidate.max_total_tokens)
        return missing + self._growth + soon + (self._watermark_blocks or self._growing + after)

    def _measure(self) -> None:
        """`_growth_of` for every member, inlined: O(running requests), and this may run in every plan."""
        if self._measured:
            return
        self._measured = True
        size, iterations = self._block_size, self._join_iterations
        growth = growing = 0
        for member in self._batch.present():
            most = member.max_total_tokens
            covered = len(member.block_ids) * size
            tokens = member.kv_tokens + iterations
            if tokens > most:
                tokens = most
            if tokens > covered:
                blocks = -((covered - tokens) // size)
                growth += blocks
                covered += blocks * size
            if covered < most:
                growing += 1
        self._growth, self._growing = growth, growing

    def _grow(self, kv_tokens: int, held_blocks: int, max_total_tokens: int, sign: int) -> None:
        soon, after = self._growth_of(kv_tokens, held_blocks, max_total_tokens)
        self._growth += sign * soon
        self._growing += sign * after

    def _growth_of(self, kv_tokens: int, held_blocks: int, max_total_tokens: int) -> tuple[int, int]:
        """Blocks needed within `join_iterations`, and 1 if the request can still grow after those."""
        tokens = min(kv_tokens + self._join_iterations, max_total_tokens)
        blocks = max(self._blocks_for(tokens), held_blocks)
        return blocks - held_blocks, int(blocks * self._block_size < max_total_tokens)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _grown(request: Candidate | RunningRequest, growth: int) -> int:
    return min(request.kv_tokens + growth, request.max_total_tokens)
