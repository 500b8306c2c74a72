"""A decode instance of several ranks: every iteration takes as long as its slowest rank.

Ranks plan one by one, each when something of its own happens: a request ended, its cache fills up, a copy arrived, the
placement gave it a request. The others run on as planned, and iterations at which no rank plans are leapt over.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.core.actions import ReleasePool
from alignedserve.scheduler.core.pool_relief import PATIENCE_TICKS
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.instance.plan import BufferKind, Candidate, Evict, IterationPlan
from alignedserve.scheduler.ranks.base import Members, Move, Placement, Ready
from alignedserve.simulator.clock import Event
from alignedserve.simulator.links import transfer
from alignedserve.simulator.pool import Write
from alignedserve.simulator.ranks.rank import SimulatedRank
from alignedserve.simulator.report.steps import StepRecorder

if TYPE_CHECKING:
    from alignedserve.simulator.ranks.cell import RankCell

MOST_AHEAD = 16  # iterations timed at once; bounds the work lost when something happens meanwhile


class RankedInstance(Members):
    """`clock_rank`: its rank in the clock. `leap`: False plans at every boundary, with the same results.

    `own_s`: for each iteration the sum of what its ranks take alone. `gap_s`: time charged before each iteration.
    """

    def __init__(
        self,
        cell: RankCell,
        name: str,
        placement: Placement,
        cost: StepCost,
        *,
        clock_rank: int,
        leap: bool,
        gap_s: float,
    ) -> None:
        self.name = name
        self.steps = StepRecorder()
        self.own_s: array[float] = array("d")
        self.gap_s = gap_s
        self.moved_bytes = 0
        self.requests = 0  # that it was given and that have not ended
        self.ranks = [SimulatedRank(cell, f"{name}/{n}", n, cost, leap) for n in range(placement.ranks)]
        self._cell = cell
        self._clock = cell.clock
        self._clock_rank = clock_rank
        self._placement = placement
        self._most_ahead = MOST_AHEAD if leap else 1
        self._home: dict[RequestKey, SimulatedRank] = {}  # of each request that holds blocks of a rank
        self._ready: dict[RequestKey, Ready] = {}  # requests that wait in the pool, or are being copied in
        self._number: dict[RequestKey, int] = {}
        self._moving: dict[RequestKey, tuple[SimulatedRank, Evict]] = {}  # where the KV of an offered request is
        self._ends_s: array[float] = array("d")  # of every iteration
        self._begun: dict[RequestKey, int] = {}  # of each running request: its first iteration
        self._ahead: list[tuple[float, float, float, float]] = []  # coming: end, seconds, balanced, sum over ranks
        self._ahead_s: list[float] = []  # their ends
        self._settled = 0  # of `_ahead`
        self._lengths = (0, 0, 0, 0)
        self._changed = True  # since the placement was last asked
        self._wake: Event | None = None

    # requests

    def add(self, key: RequestKey, kv_tokens: int) -> None:
        """The request can decode: its KV is in the pool."""
        self._interrupt()
        self.requests += 1
        self._number[key] = self._cell.numbered()
        self._wait(key, kv_tokens, None)

    def _wait(self, key: RequestKey, kv_tokens: int, home: SimulatedRank | None) -> None:
        """The request waits: at its rank `home` if it has been placed and stays with it."""
        self._changed = True
        request = Ready(key, kv_tokens, self._cell.blocks_for(kv_tokens + 1), self._number[key])
        self._ready[key] = request
        if home is not None and self._placement.STICKY:
            home.enqueue(request, first=True)
            return
        if self._placement.LOOKS_AT_RANKS:
            for rank in self.ranks:
                rank.count(self._iterations)
        number = self._placement.add(request, [rank.counters for rank in self.ranks])
        if number is not None:
            self.ranks[number].enqueue(request)

    @property
    def _iterations(self) -> int:
        """Those that have ended."""
        return len(self._ends_s)

    # boundaries

    def _interrupt(self, rank: SimulatedRank | None = None) -> None:
        """Something happened, at `rank` if given: settle what is past, and plan at the next boundary."""
        self._settle()
        if rank is not None:
            rank.settle(self._iterations)
            rank.alarmed = self._changed = True
        if not self._ahead:
            self._wake = self._wake or self._clock.at(self._clock.now_s, self._boundary, rank=self._clock_rank)
            return
        del self._ahead[self._settled + 1 :], self._ahead_s[self._settled + 1 :]
        end_s = self._ahead_s[-1]
        if self._wake is not None and self._wake[0] != end_s:
            self._clock.cancel(self._wake)
            self._wake = self._clock.at(end_s, self._boundary, rank=self._clock_rank)

    def _settle(self) -> None:
        """Record the iterations that have ended, except the last one ahead, which ends with a boundary."""
        if not self._ahead:
            return
        last = len(self._ahead) - 1
        done = bisect_left(self._ahead_s, self._clock.now_s, self._settled, max(last, self._settled))
        while done < last and self._clock.passed(self._ahead_s[done], self._clock_rank):
            done += 1
        self._record(done)

    def _record(self, done: int) -> None:
        first, self._settled = self._settled, done
        passed = self._ahead[first:done]
        if not passed:
            return
        seconds = [one[1] for one in passed]
        starts_s = [one[0] - one[1] for one in passed]
        count, shortest, longest, total = self._lengths
        lengths = count, shortest + first, longest + first, total + count * first
        self.steps.add_decodes(starts_s, seconds, [one[2] for one in passed], lengths, False)
        self.own_s.extend(one[3] for one in passed)
        self._ends_s.extend(one[0] for one in passed)

    def _boundary(self) -> None:
        self._wake = None
        self._record(len(self._ahead))
        self._ahead, self._ahead_s, self._settled = [], [], 0
        for rank in self.ranks:
            if rank.alarmed or (rank.keys and rank.wakes <= self._iterations):
                rank.alarmed = False
                self._prepare(rank)
        if self._changed:
            self._changed = False
            self._place()
        for rank in self.ranks:
            if rank.planning:
                rank.planning = False
                self._plan(rank)
        self._look_ahead()

    def _prepare(self, rank: SimulatedRank) -> None:
        """The rank plans at this boundary: bring it up to here."""
        if rank.planning:
            return
        rank.planning = True
        for key in rank.finish(self._iterations):
            self._changed = True
            self._end_run(key, rank)
            del self._home[key], self._number[key]
            self.requests -= 1
            self._cell.end(self._cell.request(key))

    def _plan(self, rank: SimulatedRank) -> None:
        plan = rank.scheduler.plan(self._clock.now_s)
        self._cell.counters["stalled"] += plan.stalled
        for evict in plan.evictions:
            self._evict(evict, rank)
        for join in plan.joins:
            self._join(join.key, len(join.block_ids), rank)
        joined = {join.key for join in plan.joins}
        offered, rank.offered = rank.offered, []
        for request in offered:
            if request.key not in joined:
                self._take_back(request, rank)
        self._follow(plan, rank)
        rank.begin(plan, self._iterations)

    def _look_ahead(self) -> None:
        """Time the iterations up to the next boundary at which a rank plans."""
        busy = [rank for rank in self.ranks if rank.keys]
        if not busy:
            return
        now, end_s = self._iterations, self._clock.now_s
        count = min(self._most_ahead, min(rank.wakes for rank in busy) - now)
        times = zip(*(rank.seconds[now - rank.planned : now - rank.planned + count] for rank in busy), strict=True)
        for number, seconds in enumerate(times):
            slowest = max(seconds)
            end_s = (end_s + self.gap_s) + slowest
            rank = busy[seconds.index(slowest)]
            balanced_s = rank.balanced_s[now - rank.planned + number]
            self._ahead.append((end_s, slowest, balanced_s, sum(seconds)))
            self._ahead_s.append(end_s)
        grown = [(now - rank.planned, *rank.lengths) for rank in busy]
        self._lengths = (
            sum(requests for _, requests, _, _, _ in grown),
            min(shortest + more for more, _, shortest, _, _ in grown),
            max(longest + more for more, _, _, longest, _ in grown),
            sum(total + more * requests for more, requests, _, _, total in grown),
        )
        self._wake = self._clock.at(end_s, self._boundary, rank=self._clock_rank)

    def _follow(self, plan: IterationPlan, rank: SimulatedRank) -> None:
        keys = [item.key for item in plan.run]
        if keys == rank.keys:
            return
        now_s, count = self._clock.now_s, self._iterations
        running = set(keys)
        for key in [key for key in rank.due if key not in running]:
            self._end_run(key, rank)
        for key in keys:
            if key not in rank.due:
                request = self._cell.request(key)
                self._begun[key], rank.due[key] = count, count + request.missing_tokens
                request.enter(Stage.DECODE, now_s)
                request.stop_waiting(now_s)
                self._cell.joined(key)
        rank.keys = keys

    def _end_run(self, key: RequestKey, rank: SimulatedRank) -> None:
        """The request stops running: credit it with the tokens of the iterations in which it ran."""
        begun = self._begun.pop(key, None)
        if begun is not None:
            del rank.due[key]
            self._cell.request(key).generate(self._ends_s[begun:])

    # placement

    def of(self, rank: int) -> Iterator[Ready]:
        one = self.ranks[rank]
        self._prepare(one)
        for member in one.scheduler.running():
            if member.iterations:
                blocks = self._cell.blocks_for(member.kv_tokens + 1)
                yield Ready(member.key, member.kv_tokens, blocks, self._number[member.key])

    def _place(self) -> None:
        now = self._iterations
        counters = [rank.count(now) for rank in self.ranks]
        for rank in self.ranks:
            while rank.queue and rank.counters.takes(rank.queue[0]):
                request = rank.dequeue()
                rank.counters.take(request)
                self._offer(request, rank)
        for move in self._placement.moves(counters, self):
            self._move(move)
        for place in self._placement.refill(counters):
            self._offer(self._ready[place.key], self.ranks[place.rank])

    def _offer(self, request: Ready, rank: SimulatedRank) -> None:
        self._prepare(rank)
        rank.offered.append(request)
        most = self._cell.max_total_tokens(self._cell.request(request.key))
        candidate = Candidate(request.key, request.tokens, most, None, BufferKind.REQUESTS, 0)
        rank.scheduler.offer(candidate, self._clock.now_s)

    def _take_back(self, request: Ready, rank: SimulatedRank) -> None:
        """The request that was offered to the rank did not fit after all."""
        self._cell.counters["bounced"] += 1
        key = request.key
        rank.scheduler.withdraw(key)
        source, _ = self._moving.pop(key, (None, None))
        if source is None:
            self._wait(key, request.tokens, rank)
        elif source.scheduler.copy_failed(key):
            source.alarmed = True

    def _move(self, move: Move) -> None:
        source, target, key = self.ranks[move.from_rank], self.ranks[move.to_rank], move.key
        self._prepare(source)
        self._end_run(key, source)
        source.keys = [one for one in source.keys if one != key]
        evict = source.scheduler.move_out(key, self._clock.now_s)
        self._moving[key] = source, evict
        request = self._cell.request(key)
        request.enter(Stage.HANDOVER, self._clock.now_s)
        request.wait(self._clock.now_s)
        blocks = self._cell.blocks_for(evict.kv_tokens + 1)
        self._offer(Ready(key, evict.kv_tokens, blocks, self._number[key]), target)

    # copies

    def _join(self, key: RequestKey, blocks: int, rank: SimulatedRank) -> None:
        cell, now_s = self._cell, self._clock.now_s
        size = blocks * cell.block_bytes
        source, evict = self._moving.pop(key, (None, None))
        if source is not None and evict is not None:
            self.moved_bytes += size
            cell.counters["moves"] += 1
            self._clock.at(transfer(now_s, size, source.to_ranks, rank.from_ranks), self._moved, key, source, rank)
            return
        cell.request(key).enter(Stage.HANDOVER, now_s)
        self._clock.at(transfer(now_s, size, rank.from_pool), self._copied_in, key, rank)

    def _copied_in(self, key: RequestKey, rank: SimulatedRank) -> None:
        self._interrupt(rank)
        rank.scheduler.copied_in(key)
        del self._ready[key]
        self._home[key] = rank
        self._cell.release(key)

    def _moved(self, key: RequestKey, source: SimulatedRank, target: SimulatedRank) -> None:
        self._interrupt(source)
        self._interrupt(target)
        source.scheduler.copied_out(key)
        target.scheduler.copied_in(key)
        self._home[key] = target

    def _evict(self, evict: Evict, rank: SimulatedRank) -> None:
        cell, now_s, key = self._cell, self._clock.now_s, evict.key
        self._end_run(key, rank)
        request = cell.request(key)
        if request.kv_tokens != evict.kv_tokens:
            raise AccountingError(f"{key} has {request.kv_tokens} tokens of KV, and leaves with {evict.kv_tokens}")
        request.result.preemptions += 1
        request.enter(Stage.POOL, now_s)
        request.wait(now_s)
        cell.hold(key, evict.kv_tokens)
        write = Write(self, key, evict.kv_tokens, rank.to_pool, partial(self._returned, evict, rank))
        cell.pool.write(write)
        if not write.fresh:
            self._clock.after(PATIENCE_TICKS * cell.config.scheduler.tick_s, self._give_up, write)

    def _give_up(self, write: Write) -> None:
        """Cancel the write of an evicted request if it still waits for room.

        Otherwise the pool, full of requests that wait for room in ranks, and the ranks could wait for each other.
        """
        if not write.fresh:
            self._cell.pool.release(ReleasePool((write.key,)))

    def _returned(self, evict: Evict, rank: SimulatedRank, new_blocks: int | None) -> None:
        key = evict.key
        self._interrupt(rank)
        rank.scheduler.copied_out(key)
        del self._home[key]
        if new_blocks is not None:
            self._wait(key, evict.kv_tokens, rank)
            return
        del self._number[key]
        self.requests -= 1
        self._cell.compute_again(key)

    def report(self) -> None:
        """Nothing here depends on how many blocks its writes wait for."""

    def check_nothing_is_left(self) -> None:
        """Raises AccountingError."""
        for rank in self.ranks:
            rank.scheduler.check_integrity()
            counters = rank.counters
            left = rank.queue or rank.due or counters.queued or counters.queued_tokens
            if left or not rank.scheduler.holds_nothing() or rank.cache.owned_blocks:
                raise AccountingError(f"{rank.name} holds something at the end")
        if self._placement.waiting() or self._ready or self._home or self._moving or self.requests or self._begun:
            raise AccountingError(f"{self.name} has requests at the end")
