"""The process of a decode instance. It serves gRPC, and runs the decode thread and evictions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, ClassVar

import grpc

from alignedserve.control.checks import check_buffer
from alignedserve.control.convert import enter_stage, failure_to_proto, key_from_proto, keys_from_proto, keys_to_proto
from alignedserve.control.integrity import check_books
from alignedserve.control.link import Outbox, serve_stream
from alignedserve.control.metrics import StoreCount, show_stores
from alignedserve.control.runtime import RoleSettings
from alignedserve.control.worker import WorkerServer
from alignedserve.decode_worker.buffer_link import BufferLink
from alignedserve.decode_worker.endings import Ending
from alignedserve.decode_worker.held import EvictionOrder, Outcome
from alignedserve.decode_worker.instance import DecodeInstance
from alignedserve.decode_worker.live import live_decode
from alignedserve.decode_worker.loop import DecodeLoop
from alignedserve.errors import AlignedServeError, TransferError
from alignedserve.kv_pool.stored import pooled
from alignedserve.metrics import Page
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import decode_worker_pb2_grpc as dw_grpc
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.ranks.now import show_ranks
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.transfer.metrics import locking, show_channels

logger = logging.getLogger(__name__)


class DecodeServer(WorkerServer, dw_grpc.DecodeWorkerServicer):
    """Role `decode`. Paired prefill instances announce candidates (without prefetch, the scheduler does)."""

    role: ClassVar[str] = "decode"

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings)
        self._instance = DecodeInstance(settings, self.config, self.process, self._post, self._report_description)
        self._scheduler: Outbox[dw.DecodeReport] | None = None

    # ---- the role's hooks

    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        return [(dw_grpc.add_DecodeWorkerServicer_to_server, self)]

    async def load(self) -> None:
        await self._instance.load(self.report)

    async def unload(self) -> None:
        await self._instance.close()

    async def on_view(self, view: sv.ClusterView) -> None:
        await self._instance.on_view(view)
        self._follow_draining(drained=self.state == "drained")

    def _follow_draining(self, *, drained: bool) -> None:
        if self._instance.draining:
            self.set_state("drained" if drained else "draining")

    def trouble(self) -> AlignedServeError | None:
        return self._instance.trouble()

    def describe(self) -> sv.Heartbeat:
        instance = self._instance
        model_info = instance.model.to_json() if instance.model else ""
        beat = sv.Heartbeat(model_info=model_info, reaches=instance.reaches, gauges=instance.memory.gauges)
        if instance.compute is None or instance.engine is None:
            beat.holds = self.with_ranks(instance.ranks, instance.starting.text)
            return beat
        status, cache = instance.compute.status, instance.cache
        meter = instance.compute.meter
        self.progress, self.busy, self.step_s = meter.count, instance.compute.busy, meter.longest_s
        waiting = status.batch_buffer_requests + status.requests_buffer_requests
        blocks = f"{cache.owned_blocks}/{cache.capacity} cache"
        ranks = instance.ranks
        running = self.with_ranks(ranks, f"{status.running} running, {waiting} candidates")
        beat.holds = f"{running}; blocks: {blocks}{locking(instance.channels)}"
        page = Page(instance=self.settings.id)
        show_stores(page, [self._count()])
        instance.compute.show_metrics(page)
        instance.copier.show_metrics(page)
        instance.engine.show_metrics(page)
        show_ranks(page, ranks)
        show_channels(page, instance.channels)
        beat.metrics = page.text()
        beat.live = live_decode(status, instance.compute.lengths)
        return beat

    async def check_integrity(self) -> list[sv.BookCheck]:
        cache, compute, mine = self._instance.cache, self._instance.compute, self.settings.id
        if compute is None:
            return []
        asked = compute.ask(lambda scheduler: check_books(cache.store_id, mine, scheduler.check_integrity, self._count))
        return [await asyncio.wrap_future(asked)]

    def _count(self) -> StoreCount:
        cache = self._instance.cache
        return StoreCount.of(cache.store_id, cache.capacity, cache.free_blocks, cache.cached_blocks)

    # ---- from the scheduler

    async def Control(
        self, request_iterator: AsyncIterator[dw.DecodeCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[dw.DecodeReport]:
        if self._scheduler is not None:
            self._scheduler.close()
        outbox: Outbox[dw.DecodeReport] = Outbox()
        self._scheduler = outbox
        assert self._instance.compute is not None  # peers learn this role's address once it is ready
        self._instance.compute.take_inventory()
        try:
            async for report in serve_stream(request_iterator, outbox, self._on_command):
                yield report
        finally:
            if self._scheduler is outbox:
                self._scheduler = None  # candidates and the running batch stay: this instance decides about them

    def _on_command(self, command: dw.DecodeCommand) -> None:
        compute = self._instance.compute
        assert compute is not None
        kind = command.WhichOneof("body")
        if kind == "candidates":
            check_buffer(command.candidates)
            self.spawn(self._offer(command.candidates, compute))
        elif kind == "cancel":
            compute.cancel(keys_from_proto(command.cancel))
        elif kind == "recall":
            compute.recall(keys_from_proto(command.recall))
        elif kind == "urgent":
            keys = [key_from_proto(key) for key in command.urgent.keys]
            compute.mark_urgent(dict(zip(keys, command.urgent.due_in_s, strict=True)))
        elif kind == "default_objective_s":
            compute.set_default_objective(command.default_objective_s)

    async def _offer(self, candidates: pw.Prefetch, compute: DecodeLoop) -> None:
        """Read these requests from the pool, and offer them to the decode loop."""
        scheduler = self._scheduler
        shards: dict[str, list[RequestKey]] = defaultdict(list)
        for request in candidates.requests:
            shards[request.pool_id].append(key_from_proto(request.key))

        async def bring(pool_id: str, keys: list[RequestKey]) -> None:
            found = await self._instance.read(pool_id, keys)
            for stored in found.values():
                enter_stage(stored.spec.timings, Stage.PREFETCH, time.time_ns())
            if self._scheduler is not scheduler:
                return  # the scheduler's successor does not know these requests: their gateways submit them again
            compute.offer(BufferKind(candidates.buffer), candidates.batch_id, found.values())
            if missing := [key for key in keys if key not in found]:
                self._report_lost(missing, "the pool no longer has the request's KV")

        await asyncio.gather(*(bring(*shard) for shard in shards.items()))

    # ---- from the decode thread

    def _post(self, outcome: Outcome) -> None:
        self.loop.call_soon_threadsafe(self._on_outcome, outcome)

    def _on_outcome(self, outcome: Outcome) -> None:
        if outcome.fatal is not None:
            self.fail(outcome.fatal)
            return
        self.emitter.emit(outcome.events)
        if outcome.inventory is not None:
            self._report(dw.DecodeReport(inventory=dw.DecodeInventory(requests=outcome.inventory)))
            self._report_description()
        self._report_moves(outcome)
        for link, requests in self._by_source(outcome.release):
            if link is not None:
                link.consumed(_keys(requests))
        for link, requests in self._by_source(outcome.give_back):
            if link is not None:
                link.give_back(_keys(requests))
            elif requests[0].store_id == requests[0].pool_id:
                self._report_returned(requests)
            else:  # in a buffer that was lost with its prefill instance
                self._report_lost(_keys(requests), "the prefill instance whose buffer held the KV was lost")
        for order in outcome.evictions:
            self.spawn(self._evict(order))
        for ending in outcome.endings:
            self.spawn(self._cache(ending))
        if outcome.status_changed:
            self._report_description()
        self._follow_draining(drained=outcome.drained)

    def _report_moves(self, outcome: Outcome) -> None:
        if outcome.joined:
            self._report(dw.DecodeReport(joined=keys_to_proto(outcome.joined)))
        if outcome.finished:
            self._report(dw.DecodeReport(finished=keys_to_proto(outcome.finished)))
        if outcome.returned:
            self._report_returned(outcome.returned)
        if outcome.lost:
            self._report_lost(outcome.lost, "the KV could not be copied to or from the decode instance")
        if outcome.unreadable:
            self._report_lost(outcome.unreadable, "the KV could not be read from the pool", distrust=True)

    def _report_description(self) -> None:
        description = self._description()
        compute = self._instance.compute
        if compute is not None and (measured := compute.pass_meter.take()) is not None:
            description.measured.CopyFrom(measured)
        self._report(dw.DecodeReport(description=description))

    def _by_source(
        self, requests: Iterable[pb.StoredRequest]
    ) -> Iterable[tuple[BufferLink | None, list[pb.StoredRequest]]]:
        """Group requests by the link to the buffer with their KV. None: it is in the pool, or the buffer is lost."""
        handover = self._instance.handover
        assert handover is not None
        groups: dict[str, list[pb.StoredRequest]] = defaultdict(list)
        for stored in requests:
            groups[stored.store_id].append(stored)
        return [(handover.link_of(store_id), group) for store_id, group in groups.items()]

    async def _evict(self, order: EvictionOrder) -> None:
        handover, compute = self._instance.handover, self._instance.compute
        assert handover is not None
        assert compute is not None
        try:
            stored = await handover.evict(order)
        except AlignedServeError as error:
            logger.warning("eviction failed: %s", error, extra={"request_id": order.key.request_id})
            compute.evicted(order, None)
        else:
            compute.evicted(order, stored)
        self._instance.refresh_lease()

    async def _cache(self, ending: Ending) -> None:
        handover, compute = self._instance.handover, self._instance.compute
        assert handover is not None
        assert compute is not None
        missed = 0
        try:
            missed = await handover.cache(ending)
        except AlignedServeError as error:
            logger.warning("an answer was not cached: %s", error, extra={"request_id": ending.key.request_id})
        finally:
            compute.cached(ending.key, missed)

    def on_gateway_lost(self, address: str) -> None:
        if self._instance.compute is not None:
            self._instance.compute.report_lost(address)

    # ---- reports

    def _report(self, report: dw.DecodeReport) -> None:
        if self._scheduler is not None:
            self._scheduler.put(report)

    def _report_returned(self, requests: Iterable[pb.StoredRequest]) -> None:
        """Report requests whose KV is again only in the pool."""
        self._report(dw.DecodeReport(returned=pw.ReturnedRequests(requests=map(pooled, requests))))

    def _report_lost(self, keys: Iterable[RequestKey], reason: str, *, distrust: bool = False) -> None:
        failure = failure_to_proto(TransferError(reason))
        failed = pw.RequestFailures(keys=keys_to_proto(keys).keys, failure=failure, retry=True, distrust=distrust)
        self._report(dw.DecodeReport(failed=failed))

    def _description(self) -> dw.DecodeDescription:
        instance = self._instance
        description = dw.DecodeDescription(
            process=self.process,
            cache_blocks=instance.cache.capacity,
            cache_free_blocks=instance.cache.free_blocks,
            request_blocks=instance.cache.request_blocks,
        )
        if instance.writer is not None:
            description.pool_wait_blocks = instance.writer.waiting_blocks
        if instance.compute is not None:
            status = instance.compute.status
            for name in (
                "running",
                "shortest_tokens",
                "longest_tokens",
                "batch_shortest_tokens",
                "batch_longest_tokens",
                "batch_id",
                "batch_buffer_requests",
                "requests_buffer_requests",
                "iterations",
                "switch_iterations",
                "evictions",
                "max_running",
            ):
                setattr(description, name, getattr(status, name))
        return description

    async def Describe(self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]) -> dw.DecodeDescription:
        return self._description()


def _keys(requests: Iterable[pb.StoredRequest]) -> list[RequestKey]:
    return [key_from_proto(stored.spec.key) for stored in requests]
