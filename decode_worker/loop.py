"""The decode thread: it plans an iteration, starts copies, launches the iteration and takes its tokens.

It calls no other process between two iterations. If the engine computes while this thread goes on, the next iteration
is planned and launched before the tokens of the last one are known (ADR 33).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import TypeVar

from alignedserve.control.compute_thread import ComputeThread
from alignedserve.control.convert import enter_stage, key_from_proto, sampling_from_proto, spec_from_proto
from alignedserve.control.passes import PassMeter
from alignedserve.decode_worker.endings import Endings
from alignedserve.decode_worker.flights import Flight, Flights
from alignedserve.decode_worker.held import EvictionOrder, Held, Outcome, Pull
from alignedserve.decode_worker.iteration_meter import IterationMeter, show_status
from alignedserve.decode_worker.moves import CopyWithin, Moves
from alignedserve.decode_worker.rank_placer import Placer
from alignedserve.decode_worker.under_way import UnderWay
from alignedserve.engine.decoding import DecodeEngine
from alignedserve.engine.live import LiveRequest
from alignedserve.errors import GrammarError, TransferError
from alignedserve.grammar.base import Grammar
from alignedserve.grammar.compiled import Grammars
from alignedserve.metrics import Page
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.lanes import Lanes
from alignedserve.scheduler.instance.plan import (
    BufferKind,
    CancelOutcome,
    Evict,
    IterationPlan,
    IterationStatus,
    Join,
    RunItem,
)
from alignedserve.scheduler.instance.resident import BlockChain
from alignedserve.text import Tokenizer
from alignedserve.transfer.completion import Completion

logger = logging.getLogger(__name__)

TOMBSTONES = 4096
STARVATION_POLL_S = 0.25
EVICTIONS_FAIL_S = 5.0  # a request whose evictions fail for this time is reported lost

Result = TypeVar("Result")


class DecodeLoop(ComputeThread[[Outcome]]):
    """Runs one decode instance. `pull` starts a copy into the cache; `post` gets each outcome, on this thread.

    `overlap`: whether the next iteration is launched before the tokens of the last are known; None: the engine decides.
    """

    def __init__(
        self,
        decode_id: str,
        engine: DecodeEngine,
        scheduler: IterationScheduler,
        tokenizer: Tokenizer | None,
        pull: Pull,
        post: Callable[[Outcome], None],
        iterations: IterationMeter | None = None,
        *,
        overlap: bool | None = None,
        grammars: Grammars | None = None,
        endings: Endings | None = None,
        chain_of: Callable[[pb.StoredRequest], BlockChain | None] = lambda stored: None,
        placer: Placer | None = None,
        copy_within: CopyWithin | None = None,
    ) -> None:
        """`chain_of`: the blocks of a candidate that requests share in the cache. `copy_within`: for moves between the
        caches of ranks; then no iteration is launched before the tokens of the last are known.
        """
        super().__init__("decode")
        self._chain_of = chain_of
        self._shared_blocks = 0  # that joining requests found in the cache
        self._endings = endings
        self._engine = engine
        self._overlap = overlap if copy_within is None else False
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._pull = pull
        self._post = post
        self._held: dict[RequestKey, Held] = {}
        self._draining = False
        self._leaving: set[str] = set()  # stores whose candidates are given back
        self._cancelled: OrderedDict[RequestKey, None] = OrderedDict()  # cancelled before they were announced here
        self._status: IterationStatus = scheduler.status()
        self._lengths: Sequence[int] = ()  # of the last iteration's requests
        self.pass_meter = PassMeter()
        self._passes_since_s: float | None = None  # None: nothing runs
        self.iterations = iterations if iterations is not None else IterationMeter(None)
        self._flights = Flights(decode_id, engine, scheduler, self._held, self.iterations, endings, placer)
        self._moves = Moves(scheduler, self._held, copy_within, self.tell)
        self._under_way = UnderWay()
        self._lanes = Lanes(engine.depth, self.iterations.cost_of)

    # ---- called from any thread

    def warm_up(self) -> None:
        """Before `start`: the first pass is slower than any that follows."""
        with self.meter.step(1.0):
            self._engine.warm_up()

    @property
    def status(self) -> IterationStatus:
        """The status as of the last iteration boundary."""
        return self._status

    @property
    def lengths(self) -> Sequence[int]:
        """Prefix lengths of the last iteration; none if nothing runs."""
        return self._lengths if self._status.running else ()

    def show_metrics(self, page: Page) -> None:
        show_status(page, self.status)
        page.counter("decode_seconds_total", "seconds in iterations", self.pass_meter.total_s)
        meaning = "blocks of joining requests that the cache had already, as another request's"
        page.counter("decode_shared_blocks_total", meaning, self._shared_blocks)
        self.iterations.show_metrics(page)
        self._moves.show_metrics(page)
        if self._endings is not None:
            self._endings.show_metrics(page)
        if self._grammars is not None:
            self._grammars.meter.show_metrics(page)

    def offer(self, buffer: BufferKind, batch_id: int, requests: Iterable[pb.StoredRequest]) -> None:
        """Offer candidates whose KV is complete at its source."""
        found = [Held(stored, self._compiling(stored), self._chain_of(stored)) for stored in requests]
        self.tell(lambda outcome: self._offer(buffer, batch_id, found, outcome))

    def cancel(self, keys: Sequence[RequestKey]) -> None:
        self.tell(lambda outcome: self._cancel(keys, outcome))

    def report_lost(self, gateway_address: str) -> None:
        """Report every request of that gateway lost; the scheduler then has each cancelled here."""
        self.tell(lambda outcome: outcome.lost.extend(self._of_gateway(gateway_address)))

    def recall(self, keys: Sequence[RequestKey]) -> None:
        self.tell(lambda _: self._scheduler.recall(keys))

    def mark_urgent(self, due_in_s: Mapping[RequestKey, float]) -> None:
        """Mark requests as overdue. `due_in_s`: seconds until their wait objectives end; may be negative."""
        now_s = time.monotonic()
        due_s = {key: now_s + in_s for key, in_s in due_in_s.items()}
        self.tell(lambda _: self._scheduler.mark_urgent(due_s))

    def set_default_objective(self, objective_s: float) -> None:
        """The wait objective of requests that set none: of those that begin to wait here from now on."""
        self.tell(lambda _: setattr(self._scheduler, "starvation_after_s", objective_s))

    def take_inventory(self) -> None:
        """Post an outcome with the inventory of all requests that this instance holds."""
        self.tell(self._take_inventory)

    def drain(self) -> None:
        """Return all requests to the pool, running ones too, and take no new ones. Ends with `Outcome.drained`."""
        self.tell(lambda _: self._start_draining())

    def leave_source(self, store_ids: Sequence[str]) -> None:
        """Give back candidates in these stores, now and later, because their prefill instance drains."""
        self.tell(lambda _: self._leave_source(store_ids))

    def set_lease(self, blocks: int) -> None:
        self.tell(lambda _: self._scheduler.set_requests_buffer_lease(blocks))

    def ask(self, question: Callable[[IterationScheduler], Result]) -> Future[Result]:
        """Evaluate `question` on this thread's scheduler, at the next iteration boundary."""
        return self._ask(lambda: question(self._scheduler))

    def source_lost(self, store_ids: Sequence[str]) -> None:
        """Report candidates in these stores lost."""
        self.tell(lambda outcome: self._drop_source(set(store_ids), outcome))

    def evicted(self, order: EvictionOrder, stored: pb.StoredRequest | None) -> None:
        """The copy of an eviction has ended. `stored` names the new place of the KV; None: the copy failed."""
        self.tell(lambda outcome: self._on_evicted(order, stored, outcome))

    def cached(self, key: RequestKey, missed: int = 0) -> None:
        """The KV of an answer that has ended is in the prefix cache, but for `missed` blocks: its blocks are free."""
        if self._endings is not None:
            endings = self._endings
            self.tell(lambda _: endings.copied(key, missed))

    # ---- the thread

    def turn(self) -> bool:
        """Handle messages, one iteration boundary and its iteration. Returns whether anything ran."""
        outcome = Outcome()
        if self._passes_since_s is None:
            self._passes_since_s = time.perf_counter()
        self._take_messages(outcome)
        if self._stopped:
            return False
        plan = self._scheduler.plan(time.monotonic())
        self._start_copies(plan, outcome)
        runs = bool(plan.run) or len(self._under_way) > 0
        if runs:
            if outcome.holds_anything:  # evictions and give-backs start beside the iteration, not after it
                self._post(outcome)
                outcome = Outcome()
            with self.meter.step(len(plan.run)):
                self._iterate(plan, outcome)
        else:
            self.iterations.pause()
            self._lanes.pause()
            self._passes_since_s = None
        self._publish(outcome)
        return runs

    def _iterate(self, plan: IterationPlan, outcome: Outcome) -> None:
        """Launch the planned iteration, then take the tokens of the previous one if it is under way.

        The launched iteration stays under way if the next one can be launched without its tokens. In a pipeline as many
        fly as there are stages, each with requests of its own.
        """
        if self._engine.depth > 1:
            self._iterate_lanes(plan.run, outcome)
            return
        under_way, before = self._under_way, self._under_way.newest
        launched = self._flights.launch(plan.run, before) if plan.run else None
        if before is not None:
            self._take(before, launched, outcome)
        if launched is not None:
            under_way.flights.append(launched)
            overlap = self._engine.overlaps if self._overlap is None else self._overlap
            if not (overlap and self._flights.may_follow(launched)):
                self._take(launched, None, outcome)

    def _iterate_lanes(self, run: Sequence[RunItem], outcome: Outcome) -> None:
        flights = self._under_way.flights
        free = [item for item in run if not self._awaits_token(item.key)]
        if lane := self._lanes.next(free, [flight.lengths for flight in flights]):
            flights.append(self._flights.launch(lane, None, len(run)))
        if flights and (not lane or len(flights) == self._engine.depth):
            self._take(flights[0], None, outcome)

    def _take(self, flight: Flight, following: Flight | None, outcome: Outcome) -> None:
        self._flights.take(flight, following, outcome)
        self._under_way.remove(flight)
        for evict, live in self._under_way.due_evictions():
            if (held := self._held.get(evict.key)) and held.live is live:  # else it ended with this iteration
                self._evict(evict, outcome)
        for join in self._under_way.due_joins():
            self._join(join, time.time_ns())
        now_s, lengths = time.perf_counter(), flight.lengths
        self._lengths = list(chain(lengths, *(other.lengths for other in self._under_way.flights)))
        if self._passes_since_s is not None:
            whole = self._lanes.took(lengths, now_s - self._passes_since_s, len(self._under_way))
            if whole is not None:
                self._note_round(*whole)
        self._passes_since_s = now_s

    def _note_round(self, lanes: Sequence[Sequence[int]], seconds: float) -> None:
        took = sum(map(len, lanes)), sum(map(sum, lanes)), seconds
        self.pass_meter.add(*took, padded_tokens=sum(len(lengths) * max(lengths) for lengths in lanes))
        self._scheduler.observe(*took)
        self.iterations.note_lanes(lanes)

    def _sleep_limit_s(self) -> float | None:
        """How long to sleep at most, because a waiting candidate may become overdue meanwhile."""
        waiting = self._status.batch_buffer_requests + self._status.requests_buffer_requests
        return STARVATION_POLL_S if waiting else None

    def _woken(self, message: Callable[[Outcome], object]) -> None:
        outcome = Outcome()
        message(outcome)
        self._publish(outcome)

    def _on_fatal(self, error: BaseException) -> None:
        self._post(Outcome(fatal=error))

    def _publish(self, outcome: Outcome) -> None:
        status = self._scheduler.status()
        outcome.status_changed = status != self._status
        outcome.drained = self._draining and not self._held
        self._status = status
        if outcome.status_changed or outcome.holds_anything or outcome.drained:
            self._post(outcome)

    def _of_gateway(self, address: str) -> list[RequestKey]:
        return [key for key, held in self._held.items() if held.stored.spec.gateway_address == address]

    def _take_inventory(self, outcome: Outcome) -> None:
        # Cancelled requests are left out: only their copies are still under way.
        outcome.inventory = [held.describe() for held in self._held.values() if not held.cancelled]

    # ---- candidates

    def _compiling(self, stored: pb.StoredRequest) -> Future[Grammar] | None:
        """The compilation of the request's grammar; None without one."""
        if self._grammars is None or not stored.spec.sampling.HasField("grammar"):
            return None
        sampling = sampling_from_proto(stored.spec.sampling)
        assert sampling.grammar is not None
        return self._grammars.begin(sampling.grammar, sampling.eos_token_ids)

    def _offer(self, buffer: BufferKind, batch_id: int, requests: Sequence[Held], outcome: Outcome) -> None:
        now_s = time.monotonic()
        for held in requests:
            stored = held.stored
            key = key_from_proto(stored.spec.key)
            if key in self._cancelled:
                del self._cancelled[key]
                outcome.drop(held)
                continue
            if key in self._held:
                continue  # announced twice
            self._held[key] = held
            self._scheduler.offer(held.candidate(buffer, batch_id), now_s)
            if stored.store_id in self._leaving:
                self._scheduler.recall([key])

    def _start_draining(self) -> None:
        self._draining = True
        self._scheduler.drain()

    def _leave_source(self, store_ids: Sequence[str]) -> None:
        self._leaving.update(store_ids)
        self._scheduler.recall([key for key, held in self._held.items() if held.stored.store_id in self._leaving])

    def _cancel(self, keys: Sequence[RequestKey], outcome: Outcome) -> None:
        for key in keys:
            self._hold_answer(key)
            where = self._scheduler.cancel(key)
            if where is CancelOutcome.NOT_HERE and key in self._held:  # it ends with the iteration under way
                del self._held[key]
                outcome.finished.append(key)
            elif where is CancelOutcome.NOT_HERE:
                self._cancelled[key] = None
                while len(self._cancelled) > TOMBSTONES:
                    self._cancelled.popitem(last=False)
            elif where is CancelOutcome.WAITING:
                outcome.drop(self._held.pop(key))
            elif where is CancelOutcome.RUNNING:
                held = self._held.pop(key)
                outcome.finished.append(key)
                if self._endings is not None and held.live is not None:
                    outcome.endings += self._endings.ended(held.live, held.stored)
            else:
                self._held[key].cancelled = True

    def _hold_answer(self, key: RequestKey) -> None:
        """Of a running request that is about to be cancelled: what it has generated is cached, too."""
        held = self._held.get(key)
        if self._endings is not None and held is not None and held.live is not None:
            tokens = held.live.spec.prefix_length - 1  # the last one has no KV yet
            self._endings.hold(key, held.stored, tokens, self._scheduler.running_blocks(key))

    def _drop_source(self, store_ids: set[str], outcome: Outcome) -> None:
        for key, held in list(self._held.items()):
            if held.stored.store_id in store_ids and not held.resident and self._scheduler.withdraw(key):
                del self._held[key]
                outcome.lost.append(key)

    # ---- copies

    def _start_copies(self, plan: IterationPlan, outcome: Outcome) -> None:
        for key in plan.give_back.keys:
            held = self._held.pop(key)
            outcome.give_back.append(held.current())
        for evict in plan.evictions:
            if self._awaits_token(evict.key):
                self._under_way.evict_later(evict, self._held[evict.key].live)
            else:
                self._evict(evict, outcome)
        for move in plan.moves:
            self._moves.begin(move)
        now_ns, ordered = time.time_ns(), self._engine.depth == 1  # then the device runs copies after its iterations
        for join in plan.joins:
            if ordered or not self._under_way.delays(join):
                self._join(join, now_ns)
            else:
                self._under_way.join_later(join)

    def _awaits_token(self, key: RequestKey) -> bool:
        return self._under_way.has(self._held[key].live)

    def _join(self, join: Join, now_ns: int) -> None:
        """Start to copy a request in. It joins when the copy has ended and its grammar is compiled."""
        held = self._held[join.key]
        self._shared_blocks += join.resident_blocks
        if held.live is None:
            enter_stage(held.stored.spec.timings, Stage.HANDOVER, now_ns)
        else:
            held.live.spec.stopwatch.enter(Stage.HANDOVER, now_ns)

        def ended(completion: Completion) -> None:
            def tell(_: object = None) -> None:
                self.tell(lambda outcome: self._on_copied_in(join.key, completion.error, outcome))

            if held.compiling is None:
                tell()
                return
            if completion.error is None:  # others need not wait for the grammar of this one
                self.tell(lambda _: self._scheduler.copied_in(join.key, ready=False))
            held.compiling.add_done_callback(tell)

        try:
            settled = not self._under_way.delays(join)
            self._pull(held.stored, join.block_ids, join.resident_blocks, settled=settled).add_callback(ended)
        except TransferError as error:
            failed = Completion("hand-over")
            failed.finish(error)
            ended(failed)

    def _make_live(self, held: Held) -> TransferError | None:
        """Make the state of a request that has none yet. Returns the error for which it cannot be decoded here."""
        if held.live is None and not held.cancelled:
            try:
                held.live = LiveRequest(spec_from_proto(held.stored.spec), self._tokenizer, self._grammars)
            except GrammarError as error:  # prefill compiled it: this library is another one
                return TransferError(error.message)
        return None

    def _on_copied_in(self, key: RequestKey, error: TransferError | None, outcome: Outcome) -> None:
        held = self._held[key]
        error = error or self._make_live(held)
        if error is not None:
            logger.warning("hand-over failed: %s", error, extra={"request_id": key.request_id})
            self._scheduler.copy_failed(key)
            del self._held[key]
            outcome.release.append(held.stored)
            from_pool = held.stored.store_id == held.stored.pool_id
            (outcome.unreadable if from_pool else outcome.lost).append(key)
        elif self._scheduler.copied_in(key):
            held.resident = True
            outcome.joined.append(key)
            outcome.release.append(held.stored)
        else:
            outcome.drop(self._held.pop(key))

    def _evict(self, evict: Evict, outcome: Outcome) -> None:
        held = self._held[evict.key]
        assert held.live is not None
        now_ns = time.time_ns()
        held.live.spec.stopwatch.enter(Stage.POOL if evict.to_pool else Stage.PREFETCH, now_ns)
        stored = held.current()
        stored.kv_tokens, stored.evicted_ns = evict.kv_tokens, now_ns
        stored.evictions += 1
        outcome.evictions.append(EvictionOrder(evict.key, stored, list(evict.block_ids), evict.to_pool))

    def _on_evicted(self, order: EvictionOrder, stored: pb.StoredRequest | None, outcome: Outcome) -> None:
        key, held = order.key, self._held[order.key]
        if stored is None:
            self._not_evicted(held, key, outcome)
            return
        held.evictions_fail_since_s = None
        held.resident = False
        held.stored = stored
        if not self._scheduler.copied_out(key):
            outcome.drop(self._held.pop(key))
        elif stored.store_id == stored.pool_id:
            if not order.to_pool:  # no buffer had room for it: it returns to the scheduler
                self._scheduler.withdraw(key)
            del self._held[key]
            outcome.returned.append(stored)
        elif stored.store_id in self._leaving:
            self._scheduler.recall([key])

    def _not_evicted(self, held: Held, key: RequestKey, outcome: Outcome) -> None:
        """An eviction failed. The request runs on.

        After `EVICTIONS_FAIL_S` of failures it is reported lost, because other requests wait for its blocks.
        """
        assert held.live is not None
        held.live.spec.stopwatch.enter(Stage.DECODE, time.time_ns())
        self._scheduler.copy_failed(key)
        now_s = time.monotonic()
        if held.evictions_fail_since_s is None or now_s - held.eviction_failed_s > EVICTIONS_FAIL_S:
            held.evictions_fail_since_s = now_s
        held.eviction_failed_s = now_s
        if held.cancelled:
            del self._held[key]
            outcome.finished.append(key)
        elif now_s - held.evictions_fail_since_s > EVICTIONS_FAIL_S:
            self._scheduler.cancel(key)
            del self._held[key]
            outcome.lost.append(key)
