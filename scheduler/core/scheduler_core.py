"""The global scheduler's decisions: events in, actions out, no I/O and no clock.

Each request has one decider at each moment. Until it is prefilled the core decides: which prefill instance, which
batch, which decode instance. After `Prefetch` the decode instance decides, until it reports Finished, Lost or Returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from alignedserve.config import Config
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import events
from alignedserve.scheduler.core.actions import Action, CancelAt
from alignedserve.scheduler.core.admission import Admission
from alignedserve.scheduler.core.events import Event, RequestMeta
from alignedserve.scheduler.core.instances import DecodeView, PrefillView
from alignedserve.scheduler.core.overload import Headroom, Overload
from alignedserve.scheduler.core.pool_relief import PoolRelief
from alignedserve.scheduler.core.prefetcher import PrefetchPlanner
from alignedserve.scheduler.core.prefill_dispatch import PrefillDispatch
from alignedserve.scheduler.core.request_table import Record, RequestState, RequestTable
from alignedserve.scheduler.core.routing.load import PrefillLoad
from alignedserve.scheduler.core.state import CoreState
from alignedserve.scheduler.cost.prior import cost_model_factory
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.policies.base import BatchPolicy

if TYPE_CHECKING:
    from alignedserve.metrics import Page

_STATES = {
    "queued": "requests that wait for a prefill instance",
    "prefilling": "requests at a prefill instance",
    "waiting_in_pool": "requests whose KV waits in the pool for a batch",
    "prefetched": "requests that are being or have been prefetched for a decode instance",
    "decoding": "requests at a decode instance",
}


class SchedulerCore:
    """Pass it every event in order of arrival and carry out the actions in their order. One thread."""

    def __init__(self, config: Config, block_size: int) -> None:
        self._state = CoreState(config, block_size)  # requests, instances and shards, and the actions of an event
        self._admission = Admission(self._state)  # refuses what cannot be served; when a prompt may start
        self._overload = Overload(self._state, self._admission)  # predicts latencies, and refuses by them; learns
        self._dispatch = PrefillDispatch(self._state, self._admission)  # QUEUED -> PREFILLING, after each event
        self.routing = self._dispatch.routing  # chooses each prompt's prefill instance
        self._prefetcher = PrefetchPlanner(self._state)  # WAITING -> PREFETCHED, for changed decode instances
        self._relief = PoolRelief(self._state, self._admission)  # drops copies in a full shard; counts the last resort
        self._new_cost_model = cost_model_factory(config)  # called for each instance that joins
        self.events_handled = 0  # since the start
        # By the type of the event; never changes.
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            events.Submitted: self._submitted,
            events.CancelRequested: self._cancel_requested,
            events.Prefilled: self._prefilled,
            events.Finished: self._finished,
            events.Lost: self._lost,
            events.Joined: self._joined,
            events.Returned: self._returned,
            events.PrefillReported: self._prefill_reported,
            events.DecodeReported: self._decode_reported,
            events.PoolReported: self._pool_reported,
            events.InventoryTaken: self._inventory_taken,
            events.PoolInventoryTaken: self._pool_inventory_taken,
            events.CopiesFound: self._copies_found,
            events.InstanceJoined: self._instance_joined,
            events.InstanceLost: self._instance_lost,
            events.ShardsChanged: self._shards_changed,
            events.PairsChanged: self._pairs_changed,
            events.DrainingChanged: self._draining_changed,
            events.GatewayLost: self._gateway_lost,
            events.Tick: self._tick,
        }

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """The actions that follow from the event.

        Duplicates, and messages about requests that are not open, are harmless.
        """
        self.events_handled += 1
        self._handlers[type(event)](event, now_s)
        self._find_overdue(now_s)
        self._dispatch.start(now_s)
        self._state.sharing.update(now_s)
        changed, self._state.changed = self._state.changed, {}
        for decode_id in changed:
            decode = self._state.instances.decode.get(decode_id)
            if decode is not None:
                self._prefetcher.feed(decode, now_s)
        return self._state.take_actions()

    @property
    def policy(self) -> BatchPolicy:
        """The policy that forms batches; where lengths are shared out, one of several of its class."""
        return next(iter(self._state.sharing.policies()))

    def prepare_policies(self, prepare: Callable[[BatchPolicy], None]) -> None:
        """Call this with each policy, now and when lengths are shared out among more instances."""
        self._state.sharing.prepare(prepare)

    def use_cost(self, cost: StepCost) -> None:
        """The simulator's measured cost of iterations, in place of `scheduler.cost_model`."""
        self._state.sharing.use_cost(cost)

    def describe(self) -> dict[str, int]:
        """Open requests by state."""
        return dict(zip(_STATES, self._state.table.counts.values(), strict=False))  # both in the order of a life

    @property
    def table(self) -> RequestTable:
        """Every open request, to be looked at."""
        return self._state.table

    def decodes(self) -> Iterable[DecodeView]:
        """What is known of each decode instance, to be looked at."""
        return self._state.instances.decode.values()

    @property
    def dropped_for_room(self) -> int:
        """Requests whose KV was dropped and prefilled again: the last resort of a full pool."""
        return self._relief.dropped_requests

    @property
    def bypassed_prefetch(self) -> int:
        """Requests that decode instances copied from the pool themselves; 0 where prefetching is off."""
        return self._prefetcher.bypassed_requests

    def alarm(self, now_s: float) -> str:
        """Alarm text with figures for operators; "" if there is none.

        Raised if the last resort of a full pool was needed lately, or a user-defined policy lately broke its contract.
        """
        alarms = [self._relief.alarm(now_s), self._state.policy_faults.alarm(now_s)]
        return "; ".join(filter(None, alarms))

    @property
    def needs_ticks(self) -> bool:
        """Whether time alone can change something: a request waits, or decodes and may wait to be evicted."""
        return self._state.table.counts[RequestState.PREFILLING] < len(self._state.table)

    def knows(self, role: str, instance_id: str) -> bool:
        """Whether the instance has joined and was not lost."""
        instances = self._state.instances
        known: dict[str, Iterable[str]] = {
            "prefill": instances.prefill,
            "decode": instances.decode,
            "kv_pool": self._state.ledger.pool_ids,
        }
        return instance_id in known.get(role, ())

    def is_open(self, key: RequestKey) -> bool:
        """Whether the request is open here, in this epoch."""
        return self._state.table.get(key) is not None

    def copy_of(self, key: RequestKey) -> tuple[str, int]:
        """The shard that an open request's KV lies in, or lay in last, and the tokens of this KV.

        The shard is "" where it has no name, or is not known.
        """
        record = self._state.table.get(key)
        if record is None or record.shard is None:
            return "", 0
        return record.shard.pool_id, record.kv_tokens

    def of_gateway(self, gateway_id: str) -> set[RequestKey]:
        """The gateway's open requests."""
        return set(self._state.table.of_gateway(gateway_id))

    def gateways(self) -> set[str]:
        """Gateways that own open requests."""
        return self._state.table.gateways()

    @property
    def draining(self) -> frozenset[str]:
        """Draining instances."""
        return self._state.instances.draining

    def drained(self) -> list[str]:
        """Draining instances that hold no request."""
        return self._state.instances.drained()

    def max_request_tokens(self) -> int:
        """The longest request, prompt and answer, that can be served; 0 while a role is missing."""
        return self._admission.max_request_tokens()

    def room(self, now_s: float) -> Headroom:
        """How many more requests would be accepted now. Gateways refuse by it before they read one."""
        return self._overload.room(now_s)

    def show_metrics(self, page: Page, now_s: float) -> None:
        """Requests by state, what load has cost, what is predicted while no role is missing, and what was learned."""
        for state, count in self.describe().items():
            page.gauge(f"requests_{state}", _STATES[state], count)
        self._overload.show_metrics(page, now_s)
        meaning = "requests whose KV was dropped as a last resort, to be prefilled again"
        page.counter("requests_dropped_for_room_total", meaning, self.dropped_for_room)
        meaning = "requests that decode instances copied from the pool themselves, past the candidate buffers"
        page.counter("requests_bypassed_prefetch_total", meaning, self.bypassed_prefetch)
        meaning = "share of recent requests that began to decode past their wait objective"
        page.gauge("late_requests_share", meaning, self._state.clock.late)
        meaning = "share of its wait objective after which a request is overdue: 1, less while too many are late"
        page.gauge("starvation_threshold_share", meaning, self._state.clock.threshold_share)
        self._state.sharing.show_metrics(page, self._state.instances.decode.values())

    def check_integrity(self) -> None:
        """Recount everything. Raises AccountingError where two counts of the same thing differ."""
        self._state.check_integrity()

    # requests

    def _submitted(self, event: events.Submitted, now_s: float) -> None:
        group: dict[str, RequestMeta] = {}
        for meta in event.requests:
            known = self._state.table.latest(meta.key.request_id)
            if meta.key.request_id in group or (known is not None and known.epoch >= meta.key.epoch):
                continue  # a duplicate, or older than the open epoch
            if known is not None:
                self._state.abandon(self._state.record(known), now_s)
            gone = meta.base_tokens and self._state.ledger.shard(meta.base_pool_id) is None  # with its node
            group[meta.key.request_id] = _without_base(meta) if gone else meta
        if group:
            self._open(tuple(group.values()), now_s)

    def _open(self, group: tuple[RequestMeta, ...], now_s: float) -> None:
        first = group[0]
        if not first.key.epoch:  # a later epoch comes with the answers of its first
            self._state.recent.told(first.marks, first.cached, now_s - first.age_s)
        refusal = self._admission.too_large(first) or self._overload.judge(group, now_s)
        if refusal is not None:
            self._state.refuse(group, refusal)
            return
        self._state.add(group, now_s)
        record = self._state.record(first.key)
        if record.state is RequestState.WAITING:
            self._prefetcher.place(record, now_s)
        else:
            self._overload.accepted(record, len(group), now_s)

    def _cancel_requested(self, event: events.CancelRequested, now_s: float) -> None:
        self._cancel(event.keys, now_s)

    def _gateway_lost(self, event: events.GatewayLost, now_s: float) -> None:
        self._cancel(self._state.table.of_gateway(event.gateway_id), now_s)

    def _cancel(self, keys: Iterable[RequestKey], now_s: float) -> None:
        """End requests that the core decides about; ask the deciding process to end the others."""
        records = self._state.open(dict.fromkeys(keys))
        own = (RequestState.QUEUED, RequestState.WAITING)
        self._state.reject_cancelled([record for record in records if record.state in own], now_s)
        elsewhere = [record for record in records if record.state not in (*own, RequestState.ENDED)]
        for record in elsewhere:
            record.cancelled = True
        self._state.cancel_at(elsewhere)

    def _prefilled(self, event: events.Prefilled, now_s: float) -> None:
        record = self._state.table.get(event.key)
        if record is None or record.state is not RequestState.PREFILLING:
            return  # if it is not open any more, its next epoch adopts the copy in the pool, or the audit finds it
        prefill = self._state.instances.prefill.get(record.prefill_id)
        if prefill is not None and record.prefill_tokens:
            prefill.load.drop(record.prefill_tokens, record.background, record.reading_s)
            record.prefill_tokens = 0
        self._overload.prefilled(record, now_s)
        shard = self._state.ledger.shard(event.pool_id)
        if shard is None:
            self._lose_with_node(record, event.pool_id, now_s)
            return
        self._state.store(record, event.new_blocks, shard, now_s)
        self._state.enter_pool(record, event.kv_tokens, event.blocks, shard, now_s, now_s)
        self._placed(event.key, now_s)

    def _lose_with_node(self, record: Record, pool_id: str, now_s: float) -> None:
        self._state.report_lost([record], f"{pool_id} has gone with its node", now_s)

    def _returned(self, event: events.Returned, now_s: float) -> None:
        state = self._state
        record = state.table.get(event.key)
        if record is None or record.state not in (RequestState.PREFETCHED, RequestState.DECODING):
            return
        if event.from_buffer and record.state is RequestState.DECODING and event.kv_tokens <= record.kv_tokens:
            # The KV is as long as when it joined: the message that it was pulled was lost, and it may still decode. The
            # core cannot tell.
            state.report_lost([record], "a buffer returned a request that had been pulled from it", now_s)
            return
        state.change(record.decode_id)
        shard = state.ledger.shard(event.pool_id)
        if shard is None:
            self._lose_with_node(record, event.pool_id, now_s)
            return
        if record.state is RequestState.PREFETCHED:  # it never joined: it has waited since its last start
            since_s = state.clock.stop(event.key)
            if not record.recalled:
                state.instances.bounced(record.decode_id, record.prefill_id, record.buffer)
        else:
            since_s = now_s - event.waited_s
        had = state.ledger.committed_of(event.key) if state.ledger.shard_of(event.key) is shard else None
        own_blocks = event.blocks if had is None else max(0, had + event.blocks - record.blocks)
        state.store(record, own_blocks, shard, now_s)
        state.enter_pool(record, event.kv_tokens, event.blocks, shard, since_s, now_s)
        self._placed(event.key, now_s)

    def _placed(self, key: RequestKey, now_s: float) -> None:
        record = self._state.record(key)
        if record.cancelled:
            self._state.reject_cancelled([record], now_s)
        else:
            self._prefetcher.place(record, now_s)

    def _joined(self, event: events.Joined, now_s: float) -> None:
        unknown = []
        for key in event.keys:
            record = self._state.table.get(key)
            if record is None:
                unknown.append(key)
            elif record.state is RequestState.PREFETCHED and record.decode_id == event.decode_id:
                self._state.join(record, now_s)
        if unknown and event.decode_id in self._state.instances.decode:
            # Requests that were lost or ended here while they were on their way there.
            self._state.actions.append(CancelAt("decode", event.decode_id, tuple(unknown)))

    def _finished(self, event: events.Finished, now_s: float) -> None:
        for record in self._state.open(dict.fromkeys(event.keys)):
            if record.state is RequestState.DECODING and not record.cancelled:
                self._learn_from(record, now_s)
            self._state.end(record, now_s)

    def _learn_from(self, record: Record, now_s: float) -> None:
        """A request has decoded to its end: learn its number of iterations and its stay."""
        decode = self._state.instances.decode.get(record.decode_id)
        begun_s = record.entered_s.get(RequestState.PREFILLING)
        if decode is not None and begun_s is not None:
            self._state.decode_times.finish(decode.iterations - record.joined_iteration, now_s - begun_s)

    def _lost(self, event: events.Lost, now_s: float) -> None:
        records = self._state.open(dict.fromkeys(event.keys))
        self._state.report_lost(records, event.reason, now_s, keep_copy=not event.distrust)

    # instances

    def _instance_joined(self, event: events.InstanceJoined, now_s: float) -> None:
        self._admission.sizes_changed()
        instances = self._state.instances
        if event.role == "prefill" and event.instance_id not in instances.prefill:
            load = PrefillLoad(event.instance_id, cost=self._new_cost_model())
            instances.prefill[event.instance_id] = PrefillView(event.instance_id, load)
        elif event.role == "decode" and event.instance_id not in instances.decode:
            instances.decode[event.instance_id] = DecodeView(event.instance_id, cost=self._new_cost_model())
        self._state.place()

    def _instance_lost(self, event: events.InstanceLost, now_s: float) -> None:
        """Its requests are submitted again in a new epoch; the old one may still be running somewhere.

        With a prefill instance go the prompts that it computed and the candidates in its buffers. A decode instance may
        just have taken over one of those candidates: only a new epoch tells the two apart.
        """
        state = self._state
        self._admission.sizes_changed()
        keys: list[RequestKey] = []
        if event.role == "prefill":
            prefill = state.instances.prefill.pop(event.instance_id, None)
            if prefill is not None:
                keys = [*prefill.prefilling, *prefill.buffered]
        elif event.role == "decode":
            decode = state.instances.decode.pop(event.instance_id, None)
            if decode is not None:
                keys = [*decode.decoding, *(key for held in decode.candidates.values() for key in held)]
                state.sharing.instances_changed()
        elif event.role == "kv_pool":  # its memory remains, and a successor takes it over: no data is lost
            state.ledger.lose(event.instance_id)
        state.place()
        state.report_lost(state.open(keys), f"{event.role} {event.instance_id} was lost", now_s)

    def _prefill_reported(self, event: events.PrefillReported, now_s: float) -> None:
        instances = self._state.instances
        prefill = instances.prefill.get(event.prefill_id)
        if prefill is None:
            return
        prefill.report(event, self._state.block_size)
        self._admission.sizes_changed()
        if event.pool_wait_blocks:
            self._relief.relieve(now_s, self._state.home(event.prefill_id))
        for decode_id, prefill_ids in instances.pairs.items():
            if event.prefill_id in prefill_ids:
                self._state.change(decode_id)

    def _decode_reported(self, event: events.DecodeReported, now_s: float) -> None:
        decode = self._state.instances.decode.get(event.decode_id)
        if decode is not None:
            waited = decode.report is not None and decode.report.pool_wait_blocks
            sizes = decode.cache_blocks, decode.request_blocks
            if decode.report is None or sizes != (event.cache_blocks, event.request_blocks or event.cache_blocks):
                self._state.sharing.instances_changed()
            decode.take_report(event)
            self._prefetcher.learn_batch_id(event.batch_id)
            self._admission.sizes_changed()
            self._state.change(event.decode_id)
            if waited or event.pool_wait_blocks:
                self._relief.relieve(now_s, self._state.home(event.decode_id))

    def _pool_reported(self, event: events.PoolReported, now_s: float) -> None:
        self._state.ledger.report(event.pool_id, event.capacity_blocks, event.free_blocks)
        self._admission.sizes_changed()
        self._relief.relieve(now_s, self._state.ledger.shard(event.pool_id))

    def _inventory_taken(self, event: events.InventoryTaken, now_s: float) -> None:
        if event.decode_id not in self._state.instances.decode:
            return
        unknown = []
        for held in event.requests:
            key = held.meta.key
            known = self._state.table.latest(key.request_id)
            if known == key:
                continue
            if known is None and event.restore:
                self._state.restore(held, event.decode_id, now_s)
            else:
                unknown.append(key)
        if unknown:
            self._state.actions.append(CancelAt("decode", event.decode_id, tuple(unknown)))

    def _pool_inventory_taken(self, event: events.PoolInventoryTaken, now_s: float) -> None:
        state = self._state
        shard = state.ledger.shard(event.pool_id)
        if shard is None:
            return
        waiting = [record for record in shard.waiting.values() if record.key not in event.copies]
        gone = [record for record in waiting if record.entered_s[RequestState.WAITING] <= event.asked_s]
        state.report_lost(gone, "the KV pool no longer holds it", now_s)
        state.lose_kept(shard, event.copies, event.asked_s)
        state.drop_strays(shard, event.copies)
        restored = [record for record in state.open(event.copies) if state.ledger.committed_of(record.key) is None]
        for record in restored:  # this core adopted them without knowing their copies in the pool
            if record.state in (RequestState.PREFETCHED, RequestState.DECODING):
                record.pool_tokens, blocks = event.copies[record.key]
                record.shard = shard
                state.ledger.commit(record.key, blocks, shard)
            if record.state is RequestState.DECODING:
                state.ledger.mark_droppable(record.key)

    def _copies_found(self, event: events.CopiesFound, now_s: float) -> None:
        shard = self._state.ledger.shard(event.pool_id)
        if shard is not None:
            self._state.drop_strays(shard, event.copies)

    def _shards_changed(self, event: events.ShardsChanged, now_s: float) -> None:
        state = self._state
        gone = state.ledger.name_shards(event.pool_ids)
        state.instances.homes = dict(event.homes)
        state.place()
        for shard in gone:
            state.lose_shard(shard, now_s)
            self._relief.forget(shard)
        self._admission.sizes_changed()
        state.change_all()

    def _pairs_changed(self, event: events.PairsChanged, now_s: float) -> None:
        instances = self._state.instances
        instances.pairs = dict(event.pairs)
        instances.link_ranks = {(decode_id, prefill_id): rank for decode_id, prefill_id, rank in event.link_ranks}
        self._state.change_all()

    def _draining_changed(self, event: events.DrainingChanged, now_s: float) -> None:
        self._state.instances.draining = event.instance_ids
        self._state.sharing.instances_changed()
        self._state.change_all()

    def _tick(self, event: events.Tick, now_s: float) -> None:
        self._state.instances.forget_bounces()
        self._state.change_all()
        for shard in self._state.ledger.shards:
            self._relief.relieve(now_s, shard)

    def _find_overdue(self, now_s: float) -> None:
        overdue = self._state.clock.newly_overdue(now_s)
        if not overdue:
            return
        records = self._state.open(overdue)
        self._prefetcher.mark_overdue([record for record in records if record.state is RequestState.PREFETCHED], now_s)
        waiting = [record for record in records if record.state is RequestState.WAITING]
        for record in waiting:
            self._state.sharing.mark_overdue(record.key, self._state.clock.due_s(record.key))
        if waiting:
            self._state.change_all()


def _without_base(meta: RequestMeta) -> RequestMeta:
    return replace(meta, base_tokens=0, base_blocks=0, own_blocks=0, whole=False)
