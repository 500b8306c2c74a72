"""Algorithm 2, batch-level scheduling (paper, section 3.4), at every iteration boundary of one decode instance.

    there is room      case 1: join from the candidate request buffer
                       case 2: it is empty: join from the candidate batch buffer, which begins a batch switch
    there is too little case 3: evict the longest request, during a switch the longest of the old batch

It runs in the decode worker and decides alone: no I/O, no clock, no call to another process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from alignedserve.batch_size import automatic_max_running
from alignedserve.config import Config, DecodeConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.deadlines import Deadlines
from alignedserve.scheduler.instance.beside import Beside
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.cache_room import CacheRoom, to_relieve
from alignedserve.scheduler.instance.candidates import CandidateBuffers
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import (
    BufferKind,
    CancelOutcome,
    Candidate,
    Evict,
    GiveBack,
    IterationPlan,
    IterationStatus,
    Join,
)
from alignedserve.scheduler.instance.running_batch import Phase, RunningBatch, RunningRequest
from alignedserve.scheduler.instance.skip_ahead import count_blocked, count_quiet, pass_iterations
from alignedserve.scheduler.length_ranges import join_range
from alignedserve.scheduler.priorities import BACKGROUND, objective_s

MOST_MISFITS = 8  # candidates without room that one plan skips for smaller ones behind them
PAST_BATCHES = 8  # earlier batches that are remembered: their late candidates do not begin a switch back


class IterationScheduler:
    """Decides which requests join, are evicted and run. Called from one thread.

    The worker's loop: `plan`, start its copies, run its iteration, `advance`; `copied_in` and `copied_out` as copies
    complete. `advance` may be called when the iteration has only been launched. A request that turns out to have ended
    with it is reported by `ended`, at most as many plans later as there are iterations under way. Copies never delay an
    iteration: a joining request runs after its copy, and an evicted request's blocks stay owned until its copy has
    ended. Every request's `max_total_tokens` must fit in the cache (others are returned at once). `starvation_after_s`:
    a candidate without its own wait objective that has waited here so long gets priority, even without a mark.
    `join_window`: running requests within this share of a new batch's prefix lengths belong to that batch from then on.
    None: every new batch is a switch from all running requests. `pace`: with it a join must keep its TPOT objective,
    if any, unless nothing else runs, and members that only take what others leave pause for these. No request is
    evicted for growing past the objective.
    """

    def __init__(
        self,
        config: DecodeConfig,
        allocator: BlockAllocator,
        block_size: int,
        *,
        starvation_after_s: float = math.inf,
        join_window: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._config = config
        self._max_running = config.max_running or automatic_max_running(allocator.capacity * block_size)
        self._beside = None if pace is None else Beside(config.background_slowdown, pace)
        self._pace = pace if pace is not None and pace.objective_s < math.inf else None
        self._most = self._max_running  # that has run with the pace since it last kept a candidate from joining
        self._held = False  # it has kept a candidate from joining, and none has joined since
        self._batch = RunningBatch(allocator, block_size)  # by key: joining, running, or leaving until copied out
        self._allocator = allocator  # of the instance's cache: who owns which block
        self.starvation_after_s = starvation_after_s  # a change is for candidates that begin to wait here afterwards
        self._join_window = join_window
        self._waiting = CandidateBuffers()  # candidates by key, until they join, go back or are withdrawn
        self._deadlines = Deadlines[RequestKey]()  # of candidates that were not found overdue here: offered, or evicted
        self._giving_back: dict[RequestKey, None] = {}  # candidates that the next plan returns to the tree
        self._lease_blocks = 0  # left of the standing lease in the requests buffer: evictions take them
        self._batch_id = 0  # of the batch that runs, or is switched to
        self._past_batches: deque[int] = deque(maxlen=PAST_BATCHES)  # before it: they begin no switch
        self._sweep = False  # the requests buffer may hold what does not match the batch
        self._switching = False  # as of the last plan: members of another batch run, too
        self._draining = False  # all leaves, and no candidate joins; for good
        self._decided = True  # the last plan did something, or there was none yet
        self._iterations = self._switch_iterations = self._held_iterations = self._evictions = 0  # since the start

    @classmethod
    def configured(
        cls, config: Config, allocator: BlockAllocator, block_size: int, objective_s: float, pace: Pace | None = None
    ) -> IterationScheduler:
        """The scheduler of a decode instance. `objective_s`: wait objective of requests that set none."""
        window = config.scheduler.join_window
        return cls(config.decode, allocator, block_size, starvation_after_s=objective_s, join_window=window, pace=pace)

    # events from the worker

    def offer(self, candidate: Candidate, now_s: float) -> None:
        """The candidate is complete in its buffer. Idempotent; ignored for a request that has joined."""
        key = candidate.key
        if self._batch.get(key) is not None or key in self._giving_back:
            return
        needed = self._batch.blocks_for(max(candidate.max_total_tokens, candidate.kv_tokens + 1))
        if needed > self._allocator.request_blocks or self._draining:
            self.withdraw(key)
            self._giving_back[key] = None
            return
        self._waiting.add(candidate)
        if key not in self._deadlines:
            self._deadlines.set(key, self._due_s(candidate, now_s))
        self._sweep |= candidate.buffer is BufferKind.REQUESTS and candidate.batch_id != self._batch_id

    def withdraw(self, key: RequestKey) -> bool:
        """The candidate is gone at its source. Returns False if it is not a candidate (unknown, or joined)."""
        self._deadlines.discard(key)
        given_back = key in self._giving_back
        self._giving_back.pop(key, None)
        return self._waiting.remove(key) is not None or given_back

    def recall(self, keys: Iterable[RequestKey]) -> None:
        """Return those of these requests that have not joined, with the next plan."""
        for key in keys:
            if self._waiting.remove(key) is not None:
                self._deadlines.discard(key)
                self._giving_back[key] = None

    def mark_urgent(self, due_s: Mapping[RequestKey, float]) -> None:
        """These requests are overdue: they join first, earliest deadline first.

        An overdue candidate in the candidate batch buffer stops late joins and begins the batch switch.
        """
        for key, key_due_s in due_s.items():
            if self._batch.get(key) is None and key not in self._giving_back:
                self._waiting.mark_overdue(key, key_due_s)

    def cancel(self, key: RequestKey) -> CancelOutcome:
        member = self._batch.get(key)
        if member is None:
            return CancelOutcome.WAITING if self.withdraw(key) else CancelOutcome.NOT_HERE
        if member.phase is Phase.RUNNING:
            self._batch.remove(member)
            return CancelOutcome.RUNNING
        member.cancelled = True
        return CancelOutcome.COPYING

    def running_blocks(self, key: RequestKey) -> Sequence[int]:
        """The blocks of a request that runs, in the order of its tokens; none if it does not."""
        return self._batch.running[key].block_ids if key in self._batch.running else ()

    def drain(self) -> None:
        """From the next plan on: return every candidate, evict running requests to the pool, and admit no joins."""
        self._draining = True

    def set_requests_buffer_lease(self, blocks: int) -> None:
        """Free leased blocks of the candidate request buffer, without those of evictions already planned."""
        self._lease_blocks = blocks

    def copied_in(self, key: RequestKey, *, ready: bool = True) -> bool:
        """The copy into the cache has completed. Returns False if the request was cancelled meanwhile (and is gone).

        Without `ready` it cannot run yet, but others share its blocks from now on. Another call follows.
        """
        member = self._copying(key, Phase.ENTERING)
        member.fill()
        if ready and member.cancelled:
            self._batch.remove(member)
        elif ready:
            self._batch.move(member, Phase.RUNNING)
        return not (ready and member.cancelled)

    def copied_out(self, key: RequestKey) -> bool:
        """The eviction's copy has completed.

        In the candidate request buffer the request is a candidate without an offer. Returns False if it was cancelled
        meanwhile: the caller frees the copy.
        """
        member = self._copying(key, Phase.LEAVING)
        self._batch.remove(member)
        if member.cancelled:
            return False
        if not member.to_pool:
            grown = replace(member.candidate, kv_tokens=member.kv_tokens, batch_id=member.batch_id, due_s=math.inf)
            self._waiting.add(replace(grown, buffer=BufferKind.REQUESTS, evictions=grown.evictions + 1))
            self._deadlines.set(key, self._due_s(member.candidate, member.left_s))
            self._sweep |= member.batch_id != self._batch_id
        return True

    def copy_failed(self, key: RequestKey) -> bool:
        """A copy has failed. Returns True if the request runs on: it was leaving, and its KV is still here.

        False if it is gone and its blocks are free: it was entering, or was cancelled meanwhile.
        """
        member = self._batch.get(key)
        if member is None or member.phase is Phase.RUNNING:
            raise AccountingError(f"{key} is not being copied", request_id=key.request_id)
        if member.phase is Phase.ENTERING or member.cancelled:
            self._batch.remove(member)
            return False
        if len(member.block_ids) * self._batch.block_size > member.kv_tokens:  # else it cannot run before
            member.iterations = 0  # it must run before it is evicted again
        self._batch.move(member, Phase.RUNNING)
        return True

    def advance(self, tokens: Iterable[tuple[RequestKey, bool]]) -> None:
        """After an iteration: each request that ran has grown by a token; True: it has finished and is gone.

        Requests that were cancelled during the iteration are ignored.
        """
        running = self._batch.running
        ran = False
        for key, finished in tokens:
            member = running.get(key)
            ran = True
            if member is None:
                continue
            if finished:
                self._note_end(member.iterations + 1)
                self._batch.remove(member)
            else:
                member.kv_tokens += 1
                member.iterations += 1
        if ran:
            self._count(1)

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        """How long an iteration of `requests` requests with `tokens` tokens of KV took, for a pace that learns."""
        if self._beside is not None:
            self._beside.pace.observe(requests, tokens, seconds)

    def ended(self, key: RequestKey) -> None:
        """The request has ended with an iteration after which `advance` assumed that it continues. Its blocks are free.

        An eviction planned since then is undone: its copy must not have been started.
        """
        member = self._batch.get(key)
        if member is None or member.phase is Phase.ENTERING:
            raise AccountingError(f"{key} is not running and cannot end", request_id=key.request_id)
        if member.phase is Phase.LEAVING:
            self._evictions -= 1
            if not member.to_pool:
                self._lease_blocks += self._batch.blocks_for(member.kv_tokens)
        self._note_end(member.iterations)
        self._batch.remove(member)

    # decisions for the worker

    def plan(self, now_s: float) -> IterationPlan:
        """The next iteration, and the copies to start during it."""
        self._mark_overdue(now_s)
        evictions = self._leave(now_s) if self._draining else self._relieve(now_s)
        run, stalled = self._cover_next_tokens()
        self._held = self._held and len(self._waiting) > 0
        self._most = self._most if self._batch.size else self._max_running  # the last members' room is forgotten
        joins = [] if self._draining else self._join(now_s, evictions)
        if evictions:  # requests evicted to make room for an overdue candidate do not run
            run = [item for item in run if item.key in self._batch.running]
        self._give_back_unmatched()
        self._switching = self._batch.holds_others_than(self._batch_id)
        give_back = GiveBack(tuple(self._giving_back))
        self._giving_back.clear()
        self._decided = bool(joins or evictions or give_back.keys)
        decided = tuple(joins), tuple(evictions), give_back, tuple(run)
        return IterationPlan(*decided, stalled, self._switching, self._batch_id)

    def quiet_iterations(self, most: int) -> int:
        """After `plan`: the iterations, at most `most`, before a plan could do more than cover tokens.

        Valid while no event arrives, no request finishes, and it is before `deadline_s`. See `skip_ahead.py`.
        """
        waiting, background = len(self._waiting), self._batch.background
        if background and (background < self._batch.size or min(self._waiting.ranks, default=BACKGROUND) < BACKGROUND):
            return 0  # other members run in each iteration
        crowded = len(self._batch.running) > self._max_running  # after a failed copy out
        if crowded or self._draining or self._sweep or self._giving_back or (waiting and self._decided):
            return 0
        most = count_quiet(self._batch, self._config, most)
        if waiting and most:
            most = count_blocked(self._batch, self._config, self._waiting.first_due_s(), most)
        return most

    def deadline_s(self) -> float:
        """When the next candidate becomes overdue here; infinite if none can."""
        return self._deadlines.next_s()

    def pass_quietly(self, iterations: int) -> None:
        """Do the work of `iterations` rounds of `advance` and `plan`, at most the number of `quiet_iterations`."""
        pass_iterations(self._batch, iterations)
        self._count(iterations)

    def status(self) -> IterationStatus:
        lengths = [member.kv_tokens for member in self._batch.present()]
        formed = self._batch.formed_lengths(self._batch_id)
        return IterationStatus(
            running=len(lengths),
            shortest_tokens=min(lengths, default=0),
            longest_tokens=max(lengths, default=0),
            batch_shortest_tokens=min(formed, default=0),
            batch_longest_tokens=max(formed, default=0),
            batch_id=self._batch_id,
            switching=self._switching,
            batch_buffer_requests=self._waiting.count(BufferKind.BATCH),
            requests_buffer_requests=self._waiting.count(BufferKind.REQUESTS),
            iterations=self._iterations,
            switch_iterations=self._switch_iterations,
            held_iterations=self._held_iterations,
            evictions=self._evictions,
            max_running=self._most,
        )

    def holds_nothing(self) -> bool:
        return not (len(self._waiting) or self._giving_back or self._batch.size or self._batch.leaving)

    def check_integrity(self) -> None:
        """Raises AccountingError if candidates, members and blocks do not match."""
        if not set(self._deadlines) <= set(self._waiting):
            raise AccountingError("waiting times are kept for requests that are not candidates")
        both = [key for key in self._waiting if self._batch.get(key) is not None or key in self._giving_back]
        if both:
            raise AccountingError(f"{both[0]} is a candidate, but also a member or being returned")
        self._batch.check_integrity()

    # how it decides

    def _note_end(self, iterations: int) -> None:
        if self._pace is not None:
            self._pace.ended(iterations)

    def _count(self, iterations: int) -> None:
        self._iterations += iterations
        self._switch_iterations += iterations * self._switching
        self._held_iterations += iterations * self._held

    def _mark_overdue(self, now_s: float) -> None:
        for due_s, key in self._deadlines.pop_due(now_s):
            self._waiting.mark_overdue(key, due_s)

    def _due_s(self, candidate: Candidate, since_s: float) -> float:
        return since_s + objective_s(candidate.wait_objective_s, candidate.rank, self.starvation_after_s)

    def _relieve(self, now_s: float) -> list[Evict]:
        """Case 3: evict until the free blocks, with those on their way out, reach the watermark."""
        victims = to_relieve(self._batch, self._config, self._max_running, self._batch_id)
        return [self._evict(victim, now_s) for victim in victims]

    def _leave(self, now_s: float) -> list[Evict]:
        """Draining: return candidates, and evict running requests, as in `_relieve` after their first iteration."""
        self.recall(list(self._waiting))
        return [self._evict(member, now_s) for member in list(self._batch.running.values()) if member.iterations]

    def _evict(self, member: RunningRequest, now_s: float) -> Evict:
        blocks = self._batch.blocks_for(member.kv_tokens)
        switching = self._batch.holds_others_than(self._batch_id)
        member.to_pool = self._draining or switching or blocks > self._lease_blocks
        if not member.to_pool:
            self._lease_blocks -= blocks
        member.left_s = now_s
        self._batch.move(member, Phase.LEAVING)
        self._evictions += 1
        return Evict(member.key, tuple(member.block_ids[:blocks]), member.kv_tokens, member.to_pool)

    def _cover_next_tokens(self) -> tuple[list[RunningRequest], int]:
        """The requests that run, and the number that must skip the iteration for lack of a block.

        Of requests that only take what others leave, not all run beside others.
        """
        size, cover = self._batch.block_size, self._batch.cover_next_token
        running = self._batch.running.values()
        run = [member for member in running if len(member.block_ids) * size > member.kv_tokens or cover(member)]
        stalled = len(running) - len(run)
        if self._beside is not None and 0 < self._batch.background < self._batch.size:
            run = self._beside.choose(run)
        return run, stalled

    def _join(self, now_s: float, evictions: list[Evict]) -> list[Join]:
        """Cases 1 and 2: overdue candidates, then the candidate request buffer; if that is empty, the batch buffer."""
        joins, waiting = list[Join](), self._waiting
        if not len(waiting):
            return joins
        room = self._room()
        overdue_in_batch = waiting.has_overdue(BufferKind.BATCH)
        blocked = self._take(waiting.overdue(), room, joins)
        if blocked is not None:
            self._make_room(blocked, room, evictions, now_s)
            return joins
        for rank in waiting.in_turn():
            before, beside = len(joins), self._beside if rank >= BACKGROUND else None
            most = None if beside is None else beside.most_joins(self._batch)
            if not overdue_in_batch:
                self._take(islice(waiting.normal(BufferKind.REQUESTS, rank), most), room, joins)
            if overdue_in_batch or not waiting.count(BufferKind.REQUESTS, rank):
                self._take(islice(waiting.normal(BufferKind.BATCH, rank), most), room, joins)
            waiting.count_turn(rank, len(joins) - before)
            if self._give_way_to(rank, room, evictions, now_s):
                break
        return joins

    def _room(self) -> CacheRoom:
        return CacheRoom(self._batch, self._config, self._max_running, self._pace)

    def _give_way_to(self, rank: int, room: CacheRoom, evictions: list[Evict], now_s: float) -> bool:
        """Evict members that only take what others leave for a candidate of this rank that lacks room.

        Returns whether the room that becomes free is kept for it: no candidate of a higher rank joins.
        """
        candidate = self._waiting.first(rank) if rank < BACKGROUND and self._batch.holds_background else None
        victims = [] if candidate is None else room.yielding(candidate, self._batch_id)
        evictions.extend(self._evict(member, now_s) for member in victims)
        return candidate is not None

    def _take(self, candidates: Iterable[Candidate], room: CacheRoom, joins: list[Join]) -> Candidate | None:
        """Let candidates join while there is room. Returns the overdue one without room that blocked the others."""
        taken: list[Candidate] = []
        blocked = None
        misfits = 0
        for candidate in candidates:
            seats = self._batch.seats(candidate)
            if not seats:  # what it begins with is being copied in: wait for it and share it
                continue
            if (seat := room.take(candidate, seats)) is None:
                misfits += 1
                if candidate.overdue:
                    blocked = candidate
                if candidate.overdue or misfits >= MOST_MISFITS or room.slots <= 0:
                    break
                continue
            self._enter_batch(candidate)
            joins.append(self._batch.join(candidate, self._batch_id, seat))
            taken.append(candidate)
        for candidate in taken:
            self._waiting.remove(candidate.key)
            self._deadlines.discard(candidate.key)
        self._held = room.held or (self._held and not joins)
        self._most = min(self._max_running, max(self._batch.size, 0 if room.held else self._most))
        return blocked

    def _enter_batch(self, candidate: Candidate) -> None:
        """A candidate of a new batch makes that the running batch and the other members old: a batch switch.

        Running requests that match the new batch belong to it from here on, as late joins would; they do not count as
        old.
        """
        if candidate.batch_id == self._batch_id:
            return
        idle = not self._batch.size
        if idle or (candidate.buffer is BufferKind.BATCH and candidate.batch_id not in self._past_batches):
            if not idle and self._join_window is not None:
                lengths = self._candidate_lengths(candidate.batch_id)
                self._batch.adopt(candidate.batch_id, *join_range(min(lengths), max(lengths), self._join_window))
            self._past_batches.append(self._batch_id)
            self._batch_id = candidate.batch_id
            self._sweep = True

    def _candidate_lengths(self, batch_id: int) -> list[int]:
        return [c.kv_tokens for c in self._waiting.of(BufferKind.BATCH) if c.batch_id == batch_id]

    def _make_room(self, candidate: Candidate, room: CacheRoom, evictions: list[Evict], now_s: float) -> None:
        """Evict for an overdue candidate, if that makes enough room.

        Not evicted: requests that were overdue when they joined and were due before it, and requests that have only
        just joined. Requests that were not overdue are evicted first, then the overdue ones, latest deadline first.
        """
        self._enter_batch(candidate)
        victims = [
            member
            for member in reversed(self._batch.running.values())
            if member.candidate.due_s > candidate.due_s and member.iterations >= self._config.join_iterations
        ]
        if room.never_enough(candidate, victims):
            return
        victims.sort(key=lambda each: (each.candidate.due_s, *each.eviction_rank(self._batch_id)), reverse=True)
        evictions.extend(self._evict(member, now_s) for member in room.chosen(candidate, victims))

    def _give_back_unmatched(self) -> None:
        """The candidate request buffer passes to the new batch: candidates outside of it that do not match go back."""
        if not self._sweep or not self._batch.size:
            return
        self._sweep = False
        lengths = self._batch.lengths(self._batch_id) + self._candidate_lengths(self._batch_id)
        shortest, longest = join_range(min(lengths, default=0), max(lengths, default=0), self._join_window or 0.0)
        for candidate in list(self._waiting.normal(BufferKind.REQUESTS)):
            if candidate.batch_id == self._batch_id:
                continue
            if shortest <= candidate.kv_tokens <= longest:
                self._waiting.add(replace(candidate, batch_id=self._batch_id))
            else:
                self._waiting.remove(candidate.key)
                self._deadlines.discard(candidate.key)
                self._giving_back[candidate.key] = None

    def _copying(self, key: RequestKey, phase: Phase) -> RunningRequest:
        member = self._batch.get(key)
        if member is None or member.phase is not phase:
            raise AccountingError(f"{key} is not being copied in this direction", request_id=key.request_id)
        return member
