"""The scheduler's process: passes gRPC messages to the core as events, and carries out the core's actions."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import grpc

from alignedserve.control.checks import check_heads
from alignedserve.control.convert import (
    failure_from_proto,
    key_from_proto,
    keys_from_proto,
    keys_to_proto,
)
from alignedserve.control.integrity import check_books
from alignedserve.control.link import Outbox, first_message, follow_on, serve_stream
from alignedserve.control.role import SERVING_STATES
from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.proto import scheduler_pb2_grpc as sc_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import actions as act
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.process.adoption import Adoption, Found
from alignedserve.scheduler.process.intake import IntakeNews
from alignedserve.scheduler.process.messaging import (
    Outgoing,
    WorkerLinks,
    decode_reported,
    held_requests,
    new_core,
    pairs_changed,
    prefill_reported,
    request_meta,
    shards_changed,
)
from alignedserve.scheduler.process.owners import Owners
from alignedserve.scheduler.process.pool_audit import LeftBehind, PoolAudit
from alignedserve.scheduler.process.succession import Succession
from alignedserve.scheduler.process.telling import heartbeat_of, stays_json
from alignedserve.scheduler.systems import default_objective_s

logger = logging.getLogger(__name__)

GATEWAY_GRACE_S = 0.3  # if a gateway whose stream broke is alive, it reconnects within this time
ABSENT_GATEWAY_S = 3.0
ADOPTION_ANSWER_S = 2.0


class SchedulerServer(RoleServer, sc_grpc.SchedulerServicer):
    """Role `scheduler`. It makes no decisions itself: all events go to the core, and all actions come from it."""

    role: ClassVar[str] = "scheduler"

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings)
        self._core: SchedulerCore | None = None  # decides; None until a view has the store plan
        self._links = WorkerLinks(settings.token, self._on_report, self._on_lost)  # streams to workers and shards
        self._owners = Owners()  # each request's gateway, until the request ends
        self._pairs = ev.PairsChanged(())  # of the last view, as passed to the core
        self._shards = ev.ShardsChanged(())  # the shards in the last view; empty: there is a single shard
        self._asked_s: dict[str, float] = {}  # when each shard was asked for an inventory that has not arrived
        self._drained: list[str] = []  # the drained instances in the last heartbeat
        self._capacity = 0  # longest request in tokens, as gateways were told; 0: not yet
        self._drops_told = 0  # how many of the core's drops because of missing room were logged
        self._audit = PoolAudit(self._knows)  # finds KV in the pool that no request needs
        self._left_behind = LeftBehind()  # lost requests by gateway; their KV is released if the gateway is lost
        self._adoption = Adoption()  # requests submitted again that wait for what the pool has of them
        # Carries out the core's actions; has the streams to gateways.
        self._outgoing = Outgoing(self._owners, self._adoption, self._links, self._left_behind, self._copy_of)
        self._succession: Succession[sc.GatewayMessage] = Succession()  # gateways' messages, until inventories are in
        self._living_gateways: set[str] = set()  # the gateways in the last view
        # Tells all gateways how many more requests would be accepted, when that changes.
        self._intake = IntakeNews(lambda message: self._outgoing.tell_all(intake=message))
        self._ticker: asyncio.Task[None] | None = None  # runs `_tick` from `on_start` to `on_close`
        self._ticks = 0  # since the start, of `scheduler.tick_s` each; reported as progress

    # ---- the role's hooks

    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        return [(sc_grpc.add_SchedulerServicer_to_server, self)]

    async def on_start(self) -> None:
        self.set_state("loading")
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def on_view(self, view: sv.ClusterView) -> None:
        if self._core is None and view.store_plan:
            self._core = new_core(self.config, view)
            self.set_state("ready")
        self._living_gateways = {peer.process.id for peer in view.peers if peer.process.role == "gateway"}
        if self._core is None:
            return
        if view.pools and (shards := shards_changed(view)) != self._shards:
            self._follow_shards(shards)
        if (pairs := pairs_changed(view)) != self._pairs:
            self._pairs = pairs
            self._feed(pairs)
        if (draining := frozenset(view.draining)) != self._core.draining:
            self._feed(ev.DrainingChanged(draining))
        await self._links.on_view(view)
        ready = ((peer.process.role, peer.process.id) for peer in view.peers if peer.state in SERVING_STATES)
        self._succession.expect(ready, time.monotonic())
        self._end_succession()

    def _follow_shards(self, shards: ev.ShardsChanged) -> None:
        gone = set(self._shards.pool_ids).difference(shards.pool_ids)
        self._shards = shards
        self._feed(shards)
        if gone:
            logger.warning("shards lost with their nodes: %s", ", ".join(sorted(gone)))
            self._adoption.lose(gone)
            self._go_on_all()

    async def on_close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._intake.close()
        await self._links.close()

    def describe(self) -> sv.Heartbeat:
        if self._core is None:
            return sv.Heartbeat()
        self.progress = self._ticks
        self.busy = True  # it always ticks, so `progress` must always grow
        self.step_s = self.config.scheduler.tick_s
        beat = heartbeat_of(self._core, self.settings.id)
        self._drained = list(beat.drained)
        return beat

    async def check_integrity(self) -> list[sv.BookCheck]:
        return [check_books("requests", self.settings.id, self._core.check_integrity)] if self._core else []

    # ---- gateways

    async def Link(
        self, request_iterator: AsyncIterator[sc.GatewayMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[sc.SchedulerMessage]:
        hello: sc.GatewayHello = await first_message(request_iterator, "hello", context)
        first = sc.GatewayMessage(hello=hello)
        gateway_id = hello.process.id
        self._outgoing.addresses[gateway_id] = hello.address
        outbox: Outbox[sc.SchedulerMessage] = Outbox()
        follow_on(self._outgoing.gateways, gateway_id, outbox)
        outbox.put(sc.SchedulerMessage(capacity=sc.Capacity(max_request_tokens=self._capacity)))
        outbox.put(sc.SchedulerMessage(intake=self._intake.message()))
        self._on_gateway_message(gateway_id, first)
        try:
            async for message in serve_stream(request_iterator, outbox, partial(self._on_gateway_message, gateway_id)):
                yield message
        finally:
            if self._outgoing.gateways.get(gateway_id) is outbox:
                del self._outgoing.gateways[gateway_id]
                self._audit.suspect(time.monotonic())
                asyncio.get_running_loop().call_later(GATEWAY_GRACE_S, self._give_up, gateway_id)

    def _give_up(self, gateway_id: str) -> None:
        if gateway_id not in self._outgoing.gateways:
            self._cancel(self._adoption.of_gateway(gateway_id))
            self._feed(ev.GatewayLost(gateway_id))
            self._release_unclaimed(self._left_behind.take(gateway_id))

    def _on_gateway_message(self, gateway_id: str, message: sc.GatewayMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "submit":
            check_heads(message.submit.requests)
        if not self._succession.over:
            if kind == "submit":  # a copy without prompts: removing a field from a message frees no memory
                message = sc.GatewayMessage(submit=sc.Submission(requests=message.submit.requests))
            self._succession.keep(gateway_id, message)
        elif kind == "submit":
            self._submit(message.submit.requests, message.submit.specs)
        elif kind == "cancel":
            self._cancel(keys_from_proto(message.cancel))
        elif kind == "hello":
            self._greet(gateway_id, keys_from_proto(pb.RequestKeys(keys=message.hello.running)))
        elif kind == "open":
            self._tell_unknown(gateway_id, keys_from_proto(message.open))
        elif kind == "claim":
            self._release_unclaimed(self._audit.claimed(gateway_id, keys_from_proto(message.claim)))

    def _greet(self, gateway_id: str, running: Sequence[RequestKey]) -> None:
        """Handles a gateway's first message. `running`: its requests that may still be running.

        The gateway's other known requests are cancelled: it submits them again in a new epoch, or has ended them. It is
        told which of `running` are unknown.
        """
        assert self._core is not None
        known = self._core.of_gateway(gateway_id).union(self._adoption.of_gateway(gateway_id))
        self._cancel(sorted(known.difference(running)))
        self._tell_unknown(gateway_id, running)

    def _tell_unknown(self, gateway_id: str, believed_open: Sequence[RequestKey]) -> None:
        if unknown := [key for key in believed_open if not self._knows(key)]:
            self._outgoing.tell(gateway_id, unknown=keys_to_proto(unknown))

    def _knows(self, key: RequestKey) -> bool:
        return key in self._adoption or (self._core is not None and self._core.is_open(key))

    def _copy_of(self, key: RequestKey) -> tuple[str, int]:
        assert self._core is not None
        return self._core.copy_of(key)

    def _end_succession(self) -> None:
        """Handles the kept messages of gateways, once all processes that are up have reported their inventories."""
        kept = self._succession.end(time.monotonic())
        if kept is None:
            return
        for gateway_id, message in kept:
            self._on_gateway_message(gateway_id, message)
        asyncio.get_running_loop().call_later(ABSENT_GATEWAY_S, self._give_up_absent)

    def _give_up_absent(self) -> None:
        """Gives up the requests that were taken over and whose gateways have not come back."""
        assert self._core is not None
        for gateway_id in self._core.gateways() - self._living_gateways:
            self._give_up(gateway_id)

    def _cancel(self, keys: Sequence[RequestKey]) -> None:
        for key in [key for key in keys if self._adoption.forget(key)]:
            self._owners.of.pop(key, None)
        unknown = [key for key in keys if not self._knows(key)]
        if unknown:  # a predecessor's requests: it is unknown which processes have them
            wanted = keys_to_proto(unknown)
            self._links.send_all("prefill", pw.PrefillCommand(cancel=wanted))
            self._links.send_all("decode", dw.DecodeCommand(cancel=wanted))
            self._outgoing.carry_out(act.ReleasePool(tuple(unknown)))
        self._feed(ev.CancelRequested(tuple(keys)))

    def _submit(self, heads: Sequence[pb.RequestHead], specs: bytes) -> None:
        assert self._core is not None  # gateways' messages are kept until then
        metas = [request_meta(key_from_proto(head.key), head) for head in heads]
        self._intake.submitted()
        for meta in metas:
            if not self._core.is_open(meta.key):
                self._owners.of[meta.key] = meta.gateway_id
            if (older := self._adoption.replaced_by(meta.key)) is not None:
                self._adoption.forget(older)
                self._owners.of.pop(older, None)
        first = metas[0].key
        if self._adoption.wants(heads) and not self._core.is_open(first):
            pool_ids = self._shards.pool_ids or self._links.up("kv_pool")
            wanted = self._adoption.ask(first, heads[0], pool_ids, time.monotonic())
            self._links.send_pool(kp.PoolCommand(adopt=wanted))
            return
        self._outgoing.at_hand = (first, specs)
        self._feed(ev.Submitted(tuple(metas)))
        self._outgoing.at_hand = None
        for key in (meta.key for meta in metas if not self._core.is_open(meta.key)):  # an epoch older than the open one
            self._owners.of.pop(key, None)

    def _on_adopted(self, pool_id: str, holding: kp.Holding) -> None:
        """A shard has reported the KV that it holds of a request that was submitted again."""
        key = key_from_proto(holding.key)
        if key not in self._adoption:  # a late answer: the request was scheduled without it
            if holding.kv_tokens:
                self._feed(ev.CopiesFound(pool_id, {key: (holding.kv_tokens, len(holding.block_ids))}))
            return
        worse = self._adoption.answered(pool_id, holding)
        if worse.kv_tokens:
            self._outgoing.carry_out(act.ReleasePool((key,), True, (worse.kv_tokens,), worse.pool_id))
        found = self._adoption.end(key, self._links.up("kv_pool"), time.monotonic())
        if found is not None:
            self._go_on(found)

    def _go_on_all(self) -> None:
        for found in self._adoption.end_all(self._links.up("kv_pool"), time.monotonic()):
            self._go_on(found)

    def _go_on(self, found: Found) -> None:
        """Submits a request to the core, with the KV that the pool holds of it from an earlier epoch."""
        key, base = found.key, found.base
        meta = replace(request_meta(key, found.head), base_tokens=base.kv_tokens, whole=base.whole)
        meta = replace(meta, base_blocks=len(base.block_ids), own_blocks=base.blocks, base_pool_id=base.pool_id)
        self._feed(ev.Submitted((meta,)))
        assert self._core is not None
        if not self._core.is_open(key):  # a newer epoch has been submitted, or the request was refused
            self._owners.of.pop(key, None)
            self._adoption.forget(key)

    # ---- reports

    def _on_report(self, role: str, instance_id: str, report: Any) -> None:
        kind = report.WhichOneof("body")
        if kind == "inventory" and role == "decode":
            self._on_decode_inventory(instance_id, report.inventory)
        elif kind == "inventory":
            self._on_pool_inventory(instance_id, report.inventory)
        elif kind == "adopted":
            for holding in report.adopted.holdings:
                self._on_adopted(instance_id, holding)
        elif kind == "description":
            self._on_description(role, instance_id, report.description)
        elif kind == "prefilled":
            self._on_prefilled(report.prefilled)
        elif kind == "finished":
            self._on_finished(keys_from_proto(report.finished))
        elif kind == "joined":
            self._feed(ev.Joined(instance_id, tuple(keys_from_proto(report.joined))))
        elif kind == "returned":
            for request in report.returned.requests:
                self._on_returned(request, from_buffer=role == "prefill")
        elif kind == "failed":
            self._on_failed(report.failed)

    def _on_description(self, role: str, instance_id: str, message: Any) -> None:
        self._meet(role, instance_id)
        if role == "prefill":
            self._feed(prefill_reported(instance_id, message))
        elif role == "decode":
            self._feed(decode_reported(instance_id, message))
        else:
            free = message.free_blocks + message.cached_blocks  # a cached one is given up when needed
            self._feed(ev.PoolReported(instance_id, message.capacity_blocks - message.pinned_blocks, free))
        self._publish_capacity()

    def _meet(self, role: str, instance_id: str) -> None:
        if self._core is None or self._core.knows(role, instance_id):
            return
        if role == "decode":
            objective_s = default_objective_s(self.config.scheduler)
            self._links.send(role, instance_id, dw.DecodeCommand(default_objective_s=objective_s))
        self._feed(ev.InstanceJoined(role, instance_id))
        if role == "kv_pool":
            self._take_inventory(instance_id)
            self._ask_again([instance_id], 0.0)
            self._audit.suspect(time.monotonic())  # it missed releases, and audits that ended meanwhile

    def _take_inventory(self, pool_id: str) -> None:
        self._asked_s.setdefault(pool_id, time.monotonic())
        self._links.send_pool(kp.PoolCommand(take_inventory=pb.Empty()), pool_id)

    def _ask_again(self, pool_ids: Sequence[str], after_s: float) -> None:
        """Repeats questions to shards about submissions that have waited for `after_s`: a process may have died."""
        for pool_id, wanted in self._adoption.ask_again(pool_ids, time.monotonic(), after_s).items():
            self._links.send_pool(kp.PoolCommand(adopt=wanted), pool_id)

    def _on_decode_inventory(self, decode_id: str, inventory: dw.DecodeInventory) -> None:
        self._meet("decode", decode_id)
        held = tuple(held_requests(inventory))
        restore = not self._succession.over
        if restore:
            self._owners.of |= {request.meta.key: request.meta.gateway_id for request in held}
        self._feed(ev.InventoryTaken(decode_id, held, restore))
        for key in [request.meta.key for request in held if not self._knows(request.meta.key)]:
            self._owners.of.pop(key, None)
        self._succession.heard("decode", decode_id)
        self._end_succession()

    def _on_pool_inventory(self, pool_id: str, inventory: kp.Inventory) -> None:
        copies = {key_from_proto(held.key): (held.kv_tokens, held.blocks) for held in inventory.holdings}
        self._feed(ev.PoolInventoryTaken(copies, pool_id, self._asked_s.pop(pool_id, -math.inf)))
        self._succession.heard("kv_pool", pool_id)
        self._end_succession()
        self._find_unclaimed(pool_id, copies)

    def _publish_capacity(self) -> None:
        assert self._core is not None
        capacity = self._core.max_request_tokens()
        if capacity and capacity != self._capacity:
            self._capacity = capacity
            self._outgoing.tell_all(capacity=sc.Capacity(max_request_tokens=capacity))

    def _on_prefilled(self, request: pb.PooledRequest) -> None:
        key = key_from_proto(request.key)
        if self._expects(key):
            own_blocks = self._owners.own_blocks(request, self._adoption.bases.pop(key, None))
            self._feed(ev.Prefilled(key, request.kv_tokens, request.blocks, own_blocks, request.pool_id))

    def _on_returned(self, request: pb.PooledRequest, *, from_buffer: bool) -> None:
        key = key_from_proto(request.key)
        if self._expects(key):
            now_ns = time.time_ns()
            waited_s = max(0, now_ns - (request.evicted_ns or now_ns)) / 1e9
            returned = ev.Returned(key, request.kv_tokens, request.blocks, waited_s, request.pool_id, from_buffer)
            self._feed(returned)

    def _expects(self, key: RequestKey) -> bool:
        """Whether the request is open. If not, its next epoch adopts its KV in the pool, or an audit finds it."""
        if self._core is not None and self._core.is_open(key):
            return True
        self._audit.suspect(time.monotonic())
        return False

    def _on_finished(self, keys: Sequence[RequestKey]) -> None:
        unknown = [key for key in keys if not self._knows(key) and key not in self._owners.lost]
        if unknown:  # a predecessor's requests: the core does not know them, so it would not free their copies
            self._outgoing.carry_out(act.ReleasePool(tuple(unknown)))
        if any(key in self._owners.lost for key in keys):  # no next epoch will adopt the KV that was kept for it
            self._audit.suspect(time.monotonic())
        self._feed(ev.Finished(tuple(keys)))

    def _on_failed(self, failed: pw.RequestFailures) -> None:
        keys = tuple(key_from_proto(key) for key in failed.keys)
        if failed.retry:
            self._feed(ev.Lost(keys, failure_from_proto(failed.failure).message, failed.distrust))
        else:
            self._feed(ev.Finished(keys))

    # ---- KV in the pool that no request needs

    def _look_at_pool(self) -> None:
        """Starts an audit of the pool if one is due: see `PoolAudit`."""
        now_s = time.monotonic()
        pool_ids = self._links.up("kv_pool")
        if not pool_ids or not self._living_gateways <= self._outgoing.gateways.keys():
            self._audit.postpone(now_s)
        elif self._audit.start(now_s, pool_ids):
            for pool_id in pool_ids:
                self._take_inventory(pool_id)

    def _find_unclaimed(self, pool_id: str, held: Iterable[RequestKey]) -> None:
        if unknown := self._audit.inventory(pool_id, held, self._outgoing.gateways):
            self._outgoing.tell_all(whose=keys_to_proto(unknown))
            self._release_unclaimed(self._audit.verdict())

    def _release_unclaimed(self, keys: Sequence[RequestKey]) -> None:
        if keys:
            logger.info("releasing %d requests in the pool that no gateway has open", len(keys))
            self._outgoing.carry_out(act.ReleasePool(tuple(keys)))

    def _on_lost(self, role: str, instance_id: str) -> None:
        self._audit.suspect(time.monotonic())
        self._asked_s.pop(instance_id, None)
        self._feed(ev.InstanceLost(role, instance_id))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.scheduler.tick_s)
            self._ticks += 1
            try:
                self._look_around()
            except Exception as error:  # a scheduler must not continue without its tick
                logger.exception("the scheduler cannot continue")
                self.fail(error)

    def _look_around(self) -> None:
        if self._core is not None:
            if self._core.needs_ticks:
                self._feed(ev.Tick())
            self._end_succession()
            self._look_at_pool()
            self._ask_again(self._links.up("kv_pool"), ADOPTION_ANSWER_S)
            self._go_on_all()

    # ---- actions

    def _feed(self, event: ev.Event) -> None:
        if self._core is None or self.state == "failed":
            return
        now_s = time.monotonic()
        try:
            actions = self._core.handle(event, now_s)
            for action in actions:
                self._outgoing.carry_out(action)
        except Exception as error:  # the state may be half changed: a successor rebuilds it from inventories
            logger.exception("the scheduler cannot continue after %s", type(event).__name__)
            self.fail(error)
            return
        if self._core.dropped_for_room > self._drops_told:
            self._drops_told = self._core.dropped_for_room
            logger.warning("%s", self._core.alarm(now_s))
        self._intake.look(self._core)
        if self._core.drained() != self._drained:
            self.report()

    async def Describe(self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]) -> sc.SchedulerDescription:
        return sc.SchedulerDescription(**(self._core.describe() if self._core is not None else {}))

    async def Stays(self, request: sc.StaysQuery, context: grpc.aio.ServicerContext[Any, Any]) -> sc.StaysFound:
        return sc.StaysFound(json=stays_json(self._core, request.request_ids) if self._core is not None else "{}")
