"""The iteration scheduler of ranks that have a cache each, over one candidate buffer.

A candidate joins if a rank has room for it; the placement decides among those that have. When the growth of requests
has filled a rank's cache, one moves to a rank with room, or else is evicted. A move pays then: it is one copy, over a
faster link than the two of an eviction and a return. The placement moves more of them where loads have come apart, as
far as it finds that worth the copies (`scheduler/ranks/`). A request pauses while it is copied.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import count as counting

from alignedserve.config import Config, DecodeConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.cache_room import Shortfall, to_relieve
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import Candidate, Evict, IterationPlan, IterationStatus, Relocate
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from alignedserve.scheduler.instance.running_batch import Phase, RunningRequest, Seat
from alignedserve.scheduler.ranks.base import ASKED_AFTER, Members, Placement, Ready
from alignedserve.scheduler.ranks.group_room import GroupRoom, count
from alignedserve.scheduler.ranks.ranked_batch import RankedBatch, Share

STAYS_FOR = 256  # plans in which a request whose move has failed stays where it is


class GroupScheduler(IterationScheduler):
    """`allocator` has a range for each rank of the placement. A request that is relocated has `copied_in` called for it
    when the copy has completed, or `copy_failed`: then it runs on where it was.

    No iteration may be under way when a plan is made.
    """

    _batch: RankedBatch

    def __init__(
        self,
        config: DecodeConfig,
        allocator: RangedAllocator,
        block_size: int,
        placement: Placement,
        *,
        starvation_after_s: float = math.inf,
        join_window: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        super().__init__(
            config, allocator, block_size, starvation_after_s=starvation_after_s, join_window=join_window, pace=pace
        )
        self._batch = RankedBatch(allocator, block_size)
        self._placement = placement
        self._numbers = counting()  # of requests, in the order in which they join
        self._moves: list[Relocate] = []  # of the plan that is being made
        self._moved = 0  # since the start
        self._asked_of: list[tuple[RequestKey, Phase]] = []  # members when the placement was last asked for moves
        self._unasked = 0  # plans since then
        self._plans = 0  # since the start
        self._stays: dict[RequestKey, int] = {}  # requests whose move has failed, until which plan

    @classmethod
    def of_ranks(
        cls, config: Config, allocator: RangedAllocator, block_size: int, placement: Placement, pace: Pace | None = None
    ) -> GroupScheduler:
        """The scheduler of a decode instance. Until its `starvation_after_s` is set, no request is overdue."""
        return cls(config.decode, allocator, block_size, placement, join_window=config.scheduler.join_window, pace=pace)

    def copied_in(self, key: RequestKey, *, ready: bool = True) -> bool:
        member = self._copying(key, Phase.ENTERING)
        self._batch.arrive(member.key)
        return super().copied_in(key, ready=ready)

    def copy_failed(self, key: RequestKey) -> bool:
        if key not in self._batch.departures:
            return super().copy_failed(key)
        member = self._copying(key, Phase.ENTERING)
        self._batch.turn_back(member)
        self._stays[key] = self._plans + STAYS_FOR
        if member.cancelled:
            self._batch.remove(member)
        return not member.cancelled

    def plan(self, now_s: float) -> IterationPlan:
        self._moves = []
        self._plans += 1
        if self._stays:
            self._stays = {key: until for key, until in self._stays.items() if until > self._plans}
        plan = super().plan(now_s)
        if not self._draining and self._waiting.first_due_s() == math.inf:  # an overdue candidate waits for room
            self._even_out()
        if not self._moves:
            return plan
        self._decided = True
        run = tuple(item for item in plan.run if item.key in self._batch.running)
        return replace(plan, run=run, moves=tuple(self._moves))

    def quiet_iterations(self, most: int) -> int:
        """None: ranks are planned for in each iteration."""
        return 0

    def status(self) -> IterationStatus:
        return replace(super().status(), moves=self._moved)

    # how it decides

    def _room(self) -> GroupRoom:
        limits = self._config, self._max_running, self._pace
        return GroupRoom(self._batch, *limits, self._placement, self._numbers)

    def _relieve(self, now_s: float) -> list[Evict]:
        """Of each rank on its own, as if the others were not there: move what another has room for, evict the rest."""
        evictions: list[Evict] = []
        size = self._batch.size
        plenty = size + max(size, self._config.watermark_blocks)  # each needs at most one block now and one later
        if min(self._batch.available()) >= plenty and len(self._batch.running) <= self._max_running:
            return evictions
        shares = self._batch.shares()
        for share in shares:
            self._move_away(share, shares)
            others = len(self._batch.running) - len(share.running)
            for victim in to_relieve(share, self._config, self._max_running - others, self._batch_id):
                evictions.append(self._evict(victim, now_s))
                share.leave(victim)
        return evictions

    def _move_away(self, share: Share, shares: Sequence[Share]) -> None:
        """Until the rank's free blocks, with those on their way out, reach the watermark, or no other rank has room.

        The first to move is the one that would be evicted first. One request always stays: alone it has room. Room that
        an overdue candidate waits for is not taken.
        """
        watermark = self._config.watermark_blocks
        if self._placement.STICKY or self._waiting.first_due_s() < math.inf:
            return
        if len(share.running) <= 1 or Shortfall(share, watermark).blocks() <= 0:
            return
        room, others = self._room(), [rank for rank in range(self._batch.ranks) if rank != share.rank]
        movable = [
            member for member in reversed(share.running.values()) if member.iterations and member.key not in self._stays
        ]
        for member in sorted(movable, key=lambda each: each.eviction_rank(self._batch_id), reverse=True):
            grown = _grown(member)
            open_to = [rank for rank in others if room.has_room(grown, Seat(rank, []))]
            if not open_to:
                continue
            rank = min(open_to, key=lambda rank: (room.counters[rank].tokens, rank))
            self._relocate(member, rank)
            share.depart(self._batch.departures[member.key])
            shares[rank].entering[member.key] = member
            if len(share.running) <= 1 or Shortfall(share, watermark).blocks() <= 0:
                return
            room = self._room()

    def _even_out(self) -> None:
        """Moves that the placement finds worth their copies, once members have changed or grown for a while."""
        present = [(member.key, member.phase) for member in self._batch.present()]
        self._unasked += 1
        if not present or (present == self._asked_of and self._unasked < ASKED_AFTER):
            return
        self._asked_of, self._unasked = present, 0
        shares, members = self._batch.shares(), _Movable(self._batch, self._stays)
        counters = [count(share, self._config, slots=self._max_running) for share in shares]
        for move in self._placement.moves(counters, members):
            self._relocate(self._batch.running[move.key], move.to_rank)

    def _relocate(self, member: RunningRequest, rank: int) -> None:
        seat = self._batch.seat_in(_grown(member), rank) or Seat(rank, [])
        self._moves.append(self._batch.relocate(member, seat))
        self._moved += 1


class _Movable(Members):
    """Requests that have run since they joined or moved, but those that must stay."""

    def __init__(self, batch: RankedBatch, stays: Container[RequestKey]) -> None:
        self._batch, self._stays = batch, stays

    def of(self, rank: int) -> Iterable[Ready]:
        batch = self._batch
        return [
            Ready(member.key, member.kv_tokens, batch.blocks_for(member.kv_tokens + 1), number)
            for number, member in enumerate(batch.running.values())
            if member.iterations and member.key not in self._stays and batch.rank_of(member) == rank
        ]


def _grown(member: RunningRequest) -> Candidate:
    """The member as a candidate for another rank."""
    return replace(member.candidate, kv_tokens=member.kv_tokens)
