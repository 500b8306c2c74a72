"""A decode instance: the real iteration scheduler, copies over links, and passes timed by the cost model.

Between two events (a candidate arrives, a copy ends, a request ends) passes differ only in the lengths. The iteration
scheduler tells in how many of them nothing can be decided (`quiet_iterations`), and these are leapt over. An event
during a leap ends it with the current pass, so a leap is never too long.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import mul
from typing import TYPE_CHECKING

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.core.actions import Prefetch
from alignedserve.scheduler.core.events import Finished, Joined
from alignedserve.scheduler.cost.pass_model import Passes
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import BufferKind, CancelOutcome, Candidate, Evict, IterationPlan, Join
from alignedserve.scheduler.priorities import rank_of
from alignedserve.scheduler.systems import default_objective_s
from alignedserve.simulator.buffers import decode_report
from alignedserve.simulator.clock import Event
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.leap import Leap
from alignedserve.simulator.links import transfer
from alignedserve.simulator.pool import Write
from alignedserve.simulator.report.steps import StepRecorder
from alignedserve.simulator.slowed import SlowedCost

if TYPE_CHECKING:
    from alignedserve.simulator.cell import Cell

MOST_LEAP = 64  # passes; bounds the work lost when a leap ends early
DEADLINE_MARGIN_S = 1e-6  # passes are taken one by one from this long before a candidate becomes overdue


class SimulatedDecode:
    """`rank`: its rank in the clock. `leap`: False takes every pass alone, with the same results.

    `gap_s`: time charged before each pass.
    """

    def __init__(self, cell: Cell, name: str, cost: StepCost, rank: int, leap: bool, gap_s: float) -> None:
        self.name = name
        self.steps = StepRecorder()
        self.cache = BlockAllocator(cell.sizes.decode_cache, f"{name}/cache")
        config = cell.config
        self.scheduler = IterationScheduler.configured(
            config,
            self.cache,
            cell.block_size,
            default_objective_s(config.scheduler),
            _pace(config.scheduler.tpot_objective_s, cost, cell.hardware, gap_s),
        )
        self.pool = cell.pool_at(name)
        self.prefixes = cell.cache_at_decode(self.cache.capacity)  # of KV that ended requests left here; None: not kept
        self.from_pool, self.to_pool = cell.pool_link(), cell.pool_link()
        self.to_peers, self.from_peers = cell.peer_link(), cell.peer_link()
        self._cell = cell
        self._clock = cell.clock
        self.gap_s = gap_s
        self._rank = rank
        self._leaps = leap
        self._source: dict[RequestKey, str] = {}  # of each held request: the prefill instance with its candidate, or ""
        self._length: dict[RequestKey, int] = {}  # of candidates, KV tokens
        self._tombstones: set[RequestKey] = set()  # cancelled before they were announced
        self._ends_s: array[float] = array("d")  # of every pass
        self._begun: dict[RequestKey, int] = {}  # of each running request: its first pass
        self._due: dict[RequestKey, int] = {}  # of each running request: the number of passes when it ends
        self._keys: list[RequestKey] = []  # requests that run in the current pass
        self._leap = Leap(gap_s, leap)
        hardware = cell.hardware
        self._cost = SlowedCost.of(cost, hardware.decode_slowdown)
        self._cost_beside = self._cost  # cost while the prefill instance on its machine computes
        if hardware.decode_slowdown_beside != hardware.decode_slowdown:
            self._cost_beside = SlowedCost.of(cost, hardware.decode_slowdown_beside)
        self._beside = False
        self._wake: Event | None = None  # the next boundary
        self._moves = 0  # requests that joined, left or began
        self._reported: tuple[int, ...] = ()
        self._measured = 0  # passes that were reported to the core

    # candidates

    def offer(self, key: RequestKey, kv_tokens: int, kind: BufferKind, batch_id: int, source: str) -> None:
        if key in self._tombstones:
            self._tombstones.discard(key)
            self._release_source(key, source)
            return
        self._interrupt()
        request = self._cell.request(key)
        if request.kv_tokens != kv_tokens and request.key == key:
            raise AccountingError(f"{key} has {request.kv_tokens} tokens of KV, and {kv_tokens} were announced")
        self._source[key], self._length[key] = source, kv_tokens
        most = self._cell.max_total_tokens(request)
        objective_s = request.arrival.wait_objective_s
        evictions = request.result.preemptions
        candidate = Candidate(
            key,
            kv_tokens,
            most,
            None,
            kind,
            batch_id,
            wait_objective_s=objective_s,
            evictions=evictions,
            rank=rank_of(request.arrival.priority),
        )
        self.scheduler.offer(candidate, self._clock.now_s)
        self._cell.counters["late_candidates"] += kind is BufferKind.REQUESTS

    def offer_from_pool(self, action: Prefetch) -> None:
        """Offer candidates directly from the pool's copy, without candidate buffers."""
        for key in action.keys:
            kv_tokens = self._cell.shard_of(key).copies.get(key)
            if kv_tokens is not None:
                self._cell.request(key).enter(Stage.PREFETCH, self._clock.now_s)
                self.offer(key, kv_tokens, action.buffer, action.batch_id, "")

    def recall(self, keys: Iterable[RequestKey]) -> None:
        self._interrupt()
        self.scheduler.recall(keys)

    def mark_urgent(self, due_s: Mapping[RequestKey, float]) -> None:
        self._interrupt()
        self.scheduler.mark_urgent(due_s)

    def cancel(self, keys: Iterable[RequestKey]) -> None:
        self._interrupt()
        for key in keys:
            outcome = self.scheduler.cancel(key)
            if outcome is CancelOutcome.NOT_HERE:
                self._tombstones.add(key)
            elif outcome is not CancelOutcome.COPYING:
                self._drop(key)

    def freeze(self, key: RequestKey) -> None:
        """A newer epoch of the request begins: tokens of this epoch no longer count from here on."""
        self._settle()
        self._end_run(key)

    def _drop(self, key: RequestKey) -> None:
        self._end_run(key)
        self._release_source(key, self._source.get(key, ""))
        self._forget(key)
        self._cell.send_core(Finished((key,)))

    def _forget(self, key: RequestKey) -> None:
        self._let_go(key)
        self._source.pop(key, None)
        self._length.pop(key, None)

    def _let_go(self, key: RequestKey) -> None:
        """What it has here stays cached while there is room."""
        if self.prefixes is not None:
            self.prefixes.release(key)

    def _release_source(self, key: RequestKey, source: str) -> None:
        if source:
            self._cell.send(self._cell.prefills[source].consumed, key)

    def refresh_lease(self) -> None:
        """Update the blocks it may evict to without asking. Quiet iterations do not read it."""
        paired = self._cell.paired(self.name)
        for prefill in paired:
            prefill.top_up_lease(self.name)
        self.scheduler.set_requests_buffer_lease(max((p.buffers.leased_blocks(self.name) for p in paired), default=0))

    # interference on its machine

    @property
    def computing(self) -> bool:
        return bool(self._keys)

    def set_beside(self, beside: bool) -> None:
        """Set whether its machine's prefill instance computes from now on."""
        changed, self._beside = beside != self._beside, beside
        if changed and self._keys and self._cost_beside is not self._cost:
            self._interrupt()

    # boundaries

    def _interrupt(self) -> None:
        """An event arrived: bring the state up to the last boundary, and plan at the next one."""
        if not self._keys:
            self._wake = self._wake or self._clock.at(self._clock.now_s, self._boundary, rank=self._rank)
            return
        self._settle()
        end_s = self._leap.cut()
        if self._wake is not None and self._wake[0] != end_s:
            self._clock.cancel(self._wake)
            self._wake = self._clock.at(end_s, self._boundary, rank=self._rank)

    def _settle(self) -> None:
        """Count the passes that have ended, except the last of a leap, which ends with a plan."""
        leap = self._leap
        last = len(leap.ends_s) - 1
        done = bisect_left(leap.ends_s, self._clock.now_s, leap.done, max(last, leap.done))
        while done < last and self._clock.passed(leap.ends_s[done], self._rank):
            done += 1
        if done > leap.done:
            self.scheduler.pass_quietly(done - leap.done)
            self._record(done)

    def _record(self, done: int) -> None:
        self._ends_s.extend(self._leap.ends_s[self._leap.done : done])
        self._leap.record(self.steps, done)

    def _boundary(self) -> None:
        """The current pass has ended, or an event came while there was none."""
        self._wake = None
        if self._keys:
            leap = self._leap
            quiet = len(leap.ends_s) - 1 - leap.done
            if quiet:
                self.scheduler.pass_quietly(quiet)
            self._record(len(leap.ends_s))
            self._advance()
        plan = self.scheduler.plan(self._clock.now_s)
        if plan.stalled:
            self._cell.counters["stalled"] += plan.stalled
        self._start_copies(plan)
        self._begin(plan)
        self.report()

    def _advance(self) -> None:
        count, due = len(self._ends_s), self._due
        tokens = [(key, due.get(key) == count) for key in self._keys]
        self.scheduler.advance(tokens)
        for key, finished in tokens:
            if finished:
                self._finish(key)

    def _finish(self, key: RequestKey) -> None:
        self._end_run(key)
        request = self._cell.request(key)
        if self.prefixes is not None:
            self.prefixes.commit(key, request.arrival, request.kv_tokens)
            self.prefixes.release(key, ended=True)
        self._forget(key)
        if self._cell.cache_answers:
            shard = self._cell.shard_of(key)
            shard.keep(request.arrival, request.kv_tokens, self.to_pool, *self.pool.to(shard))
        self._cell.end(request)
        self._cell.send_core(Finished((key,)))

    def _begin(self, plan: IterationPlan) -> None:
        """Start the passes up to the next boundary at which something can be decided."""
        keys = [item.key for item in plan.run]
        same = keys == self._keys
        if not same:
            self._follow(keys)
        if not keys:
            return
        most = 1
        if self._leaps:
            passes_left = min(self._due.values(), default=0) - len(self._ends_s)
            if passes_left > 1:
                most += self.scheduler.quiet_iterations(min(MOST_LEAP, passes_left) - 1)
        until_s = self.scheduler.deadline_s() - DEADLINE_MARGIN_S
        lengths = [item.kv_tokens for item in plan.run]
        cost = self._cost_beside if self._beside else self._cost
        end_s = self._leap.begin(self._clock.now_s, cost, lengths, most, until_s, switching=plan.switching, same=same)
        self._wake = self._clock.at(end_s, self._boundary, rank=self._rank)

    def _follow(self, keys: Sequence[RequestKey]) -> None:
        """Other requests run from here on than before."""
        self._moves += 1
        running = set(keys)
        for key in [key for key in self._begun if key not in running]:
            self._end_run(key)
        now_s, count = self._clock.now_s, len(self._ends_s)
        for key in keys:
            request = self._cell.request(key)
            if key not in self._begun and request.key == key:
                self._begun[key], self._due[key] = count, count + request.missing_tokens
                request.enter(Stage.DECODE, now_s)
                request.stop_waiting(now_s)
        self._keys = list(keys)

    def _end_run(self, key: RequestKey) -> None:
        """The request stops running: credit it with the tokens of the passes in which it ran."""
        begun = self._begun.pop(key, None)
        if begun is not None:
            del self._due[key]
            self._cell.request(key).generate(self._ends_s[begun:])

    # reports

    def report(self) -> None:
        """Report to the core if something changed here."""
        self._settle()
        waits = self.pool.waiting_blocks(self)
        status = self.scheduler.status()
        state = (
            self._moves,
            status.running,
            status.batch_id,
            status.switching,
            status.batch_buffer_requests,
            status.requests_buffer_requests,
            waits,
        )
        if state != self._reported:
            self._reported = state
            self._tell(waits, None)

    def report_growth(self) -> None:
        """Report to the core the current lengths and the time of the passes since the last report, if any."""
        self._settle()
        if self._measured < len(self.steps):
            self._tell(self.pool.waiting_blocks(self), self._take_measured())
        elif self._length and not self._keys:
            self._interrupt()  # idle, but candidates may have become overdue

    def _take_measured(self) -> Passes:
        steps, first = self.steps, self._measured
        self._measured = last = len(steps)
        seconds = sum(steps.seconds[first:last]) + self.gap_s * (last - first)
        decodes = steps.decodes[first:last]
        padded = sum(map(mul, decodes, steps.longest[first:last]))
        return Passes(last - first, sum(decodes), sum(steps.total[first:last]), seconds, padded)

    def _tell(self, waits: int, measured: Passes | None) -> None:
        self._cell.send_core(decode_report(self.name, self.cache, self.scheduler.status(), waits, measured))

    # copies

    def _start_copies(self, plan: IterationPlan) -> None:
        for key in plan.give_back.keys:
            self._give_back(key)
        for evict in plan.evictions:
            self._evict(evict)
        for join in plan.joins:
            self._join(join)

    def _join(self, join: Join) -> None:
        cell = self._cell
        cell.request(join.key).enter(Stage.HANDOVER, self._clock.now_s)
        source = self._source[join.key]
        if source:
            prefill = cell.prefills[source]
            links = (prefill.to_peers, self.from_peers, *prefill.pool.to(self.pool))
        else:
            links = (self.from_pool, *cell.shard_of(join.key).to(self.pool))
        size = (len(join.block_ids) - join.resident_blocks - self._cached_blocks(join.key)) * cell.block_bytes
        self._clock.at(transfer(self._clock.now_s, size, *links), self._copied_in, join.key)

    def _cached_blocks(self, key: RequestKey) -> int:
        """Blocks of the request's prompt that this instance has still got, and holds for it from now on."""
        if self.prefixes is None:
            return 0
        self.prefixes.trim(self.cache.free_blocks)
        arrival = self._cell.request(key).arrival
        tokens = self.prefixes.hold(key, arrival).tokens
        self.prefixes.commit(key, arrival, self._length[key])
        self._cell.counters["decode_hit_tokens"] += tokens
        return tokens // self._cell.block_size

    def _copied_in(self, key: RequestKey) -> None:
        self._interrupt()
        if self.scheduler.copied_in(key):
            self._release_source(key, self._source.pop(key))
            self._length.pop(key)
            self._cell.send_core(Joined(self.name, (key,)))
        else:
            self._drop(key)

    def _evict(self, evict: Evict) -> None:
        cell, now_s, key = self._cell, self._clock.now_s, evict.key
        self._end_run(key)
        self._let_go(key)
        request = cell.request(key)
        if request.key == key:
            if request.kv_tokens != evict.kv_tokens:
                raise AccountingError(f"{key} has {request.kv_tokens} tokens of KV, and leaves with {evict.kv_tokens}")
            request.result.preemptions += 1
            request.enter(Stage.POOL if evict.to_pool else Stage.PREFETCH, now_s)
            request.wait(now_s)
        blocks = len(evict.block_ids)
        if not evict.to_pool:
            for prefill in sorted(cell.paired(self.name), key=lambda p: -p.buffers.leased_blocks(self.name)):
                if prefill.buffers.leased_blocks(self.name) >= blocks:
                    prefill.buffers.adopt(key, blocks, self.name)
                    links = self.to_peers, prefill.from_peers, *self.pool.to(prefill.pool)
                    done_s = transfer(now_s, blocks * cell.block_bytes, *links)
                    self._clock.at(done_s, self._evicted, evict, prefill.name)
                    return
        cell.counters["evictions_to_pool"] += 1
        then = partial(self._returned, evict)
        self.pool.write(Write(self, key, evict.kv_tokens, self.to_pool, then))

    def _evicted(self, evict: Evict, source: str) -> None:
        self._interrupt()
        key = evict.key
        self._source[key], self._length[key] = source, evict.kv_tokens
        if not self.scheduler.copied_out(key):
            self._drop(key)
        self.refresh_lease()

    def _returned(self, evict: Evict, new_blocks: int | None) -> None:
        self._interrupt()
        key = evict.key
        if not self.scheduler.copied_out(key):
            self._drop(key)
            return
        if not evict.to_pool:  # the candidate request buffer had no room after all: the core decides again
            self.scheduler.withdraw(key)
        self._forget(key)
        if new_blocks is not None:
            self._cell.send_returned(key, evict.kv_tokens, self.pool.name)

    def _give_back(self, key: RequestKey) -> None:
        cell = self._cell
        cell.counters["given_back"] += 1
        kv_tokens, source = self._length[key], self._source[key]
        self._forget(key)
        request = cell.request(key)
        if request.key == key:
            request.enter(Stage.POOL, self._clock.now_s)
        if source:
            cell.send(cell.prefills[source].give_back, key, kv_tokens)
        else:
            cell.send_returned(key, kv_tokens, request.pool)

    def holds_nothing(self) -> bool:
        return self.scheduler.holds_nothing() and not self._begun and not self._source


def _pace(objective_s: float, cost: StepCost, hardware: Hardware, gap_s: float) -> Pace:
    """Predicts with the simulated times themselves, as of an instance beside one that computes."""
    slowed = SlowedCost.of(cost, max(hardware.decode_slowdown, hardware.decode_slowdown_beside))
    return Pace(objective_s or math.inf, lambda lengths: slowed.step_s((), lengths) + gap_s)
