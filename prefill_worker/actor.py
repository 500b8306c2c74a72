"""The process of a prefill instance. It serves gRPC, and runs the compute thread and the copies."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import grpc

from alignedserve.control.checks import check_buffer, check_group, check_stored
from alignedserve.control.convert import (
    failure_to_proto,
    key_from_proto,
    keys_from_proto,
    keys_to_proto,
    spec_from_proto,
)
from alignedserve.control.ended_processes import EndedProcesses
from alignedserve.control.integrity import check_books
from alignedserve.control.link import Outbox, first_message, serve_stream
from alignedserve.control.metrics import StoreCount, show_stores
from alignedserve.control.role import SERVING_STATES
from alignedserve.control.runtime import RoleSettings
from alignedserve.control.worker import WorkerServer
from alignedserve.errors import AlignedServeError, TransferError, UnavailableError
from alignedserve.kv_pool.paired_service import PairedCopiesService
from alignedserve.kv_pool.stored import pooled
from alignedserve.metrics import Page
from alignedserve.prefill_worker.instance import PrefillInstance
from alignedserve.prefill_worker.jobs import Computed, PrefilledJob
from alignedserve.prefill_worker.loop import PrefillLoop
from alignedserve.prefill_worker.specs import SpecReader, Specs, sent_specs
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2_grpc as pc_grpc
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import prefill_worker_pb2_grpc as pw_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.ranks.now import RankNow, show_ranks
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.metrics import locking, show_channels
from alignedserve.transfer.pair_choice import PAIRED
from alignedserve.transfer.parted import parts_by_id

logger = logging.getLogger(__name__)


class PrefillServer(WorkerServer, pw_grpc.PrefillWorkerServicer):
    """Role `prefill`. The scheduler and each paired decode instance have a stream of their own."""

    role: ClassVar[str] = "prefill"

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings)
        self._instance = PrefillInstance(settings, self.config, self.process, self._post, self._report_description)
        cluster, timeout_s = self.config.cluster, self.config.kv_pool.copy_timeout_s
        named = cluster.channel in PAIRED and not cluster.allow_slow_channel
        channels = (cluster.channel,) if named else PAIRED
        self._pairs = PairedCopiesService(settings, self.process, self._stores, channels, timeout_s, writable=True)
        self._scheduler: Outbox[pw.PrefillReport] | None = None
        self._unreported: deque[pw.PrefillReport] = deque(maxlen=4096)  # reports while no scheduler is connected
        self._decoders: dict[str, tuple[Outbox[pw.BufferEvent], str]] = {}
        self._ended_processes = EndedProcesses()
        self._orphans: dict[str, tuple[str, int]] = {}  # owner of an ended stream -> decode process
        self._streams = itertools.count()
        # After this time a decode instance has ended the copies of its earlier stream, or has been replaced.
        self._copies_ended_s = self.config.kv_pool.copy_timeout_s + self.config.supervisor.fence_after_s
        self._living: set[tuple[str, int]] = set()  # (id, incarnation) of the processes that the supervisor knows
        self._draining = False
        self._specs = SpecReader(settings.token)
        self._expected: dict[RequestKey, pw.PrefillGroup] = {}  # commanded, their prompts not read yet

    # ---- the role's hooks

    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        return [
            (pw_grpc.add_PrefillWorkerServicer_to_server, self),
            (pc_grpc.add_PairedCopiesServicer_to_server, self._pairs),
        ]

    async def load(self) -> None:
        await self._instance.load(self.report)

    async def unload(self) -> None:
        await self._pairs.close()
        await self._specs.close()
        await self._instance.close()

    async def on_view(self, view: sv.ClusterView) -> None:
        await self._instance.on_view(view)
        await self._specs.on_view(view)
        self._drop_dead(view)
        self._draining = self.settings.id in view.draining
        self._follow_draining()

    def _follow_draining(self) -> None:
        """Report `drained` once a draining instance holds nothing. The scheduler sends it no new work."""
        if self._draining and self.state in SERVING_STATES:
            holds_nothing = self._instance.holds_nothing() and not self._expected
            self.set_state("drained" if holds_nothing else "draining")

    def trouble(self) -> AlignedServeError | None:
        return self._instance.trouble()

    def describe(self) -> sv.Heartbeat:
        instance = self._instance
        model_info = instance.model.to_json() if instance.model else ""
        beat = sv.Heartbeat(model_info=model_info, reaches=instance.reaches, gauges=instance.memory.gauges)
        if instance.compute is None:
            beat.holds = self.with_ranks(instance.ranks, instance.starting.text)
            return beat
        meter = instance.compute.meter
        self.progress, self.busy, self.step_s = meter.count, instance.compute.busy, meter.longest_s
        beat.stores.extend(buffer.store.handle().to_proto() for buffer in instance.buffers.values())
        counts = self._counts()
        held = ", ".join(f"{count.owned}/{count.capacity} {count.store.rpartition('/')[2]}" for count in counts)
        ranks = instance.ranks
        pending = self.with_ranks(ranks, f"{instance.compute.pending_tokens} tokens to prefill")
        beat.holds = f"{pending}; blocks: {held}{locking(instance.channels)}"
        beat.metrics = self._metrics(instance.compute, counts, ranks)
        return beat

    def _metrics(self, compute: PrefillLoop, counts: Sequence[StoreCount], ranks: Sequence[RankNow]) -> str:
        instance, page = self._instance, Page(instance=self.settings.id)
        show_stores(page, counts)
        compute.show_metrics(page)
        if instance.offloader is not None:
            instance.offloader.show_metrics(page)
        if instance.layerwise is not None:
            instance.layerwise.show_metrics(page)
        if instance.prefixes is not None:
            instance.prefixes.show_metrics(page)
        if instance.grammars is not None:
            instance.grammars.meter.show_metrics(page)
        instance.copier.show_metrics(page)
        show_ranks(page, ranks)
        show_channels(page, instance.channels)
        return page.text()

    async def check_integrity(self) -> list[sv.BookCheck]:
        cache, compute, mine = self._instance.cache, self._instance.compute, self.settings.id
        if compute is None:
            return []
        found = [
            check_books(buffer.store.store_id, mine, buffer.check_integrity, partial(_count, buffer.allocator))
            for buffer in self._instance.buffers.values()
        ]
        asked = compute.ask(
            lambda chunks: check_books(cache.store_id, mine, chunks.check_integrity, partial(_count, cache))
        )
        return [await asyncio.wrap_future(asked), *found]

    def _counts(self) -> list[StoreCount]:
        allocators = [self._instance.cache, *(buffer.allocator for buffer in self._instance.buffers.values())]
        return [_count(allocator) for allocator in allocators]

    # ---- from the scheduler

    async def Control(
        self, request_iterator: AsyncIterator[pw.PrefillCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pw.PrefillReport]:
        if self._scheduler is not None:
            self._scheduler.close()
            self._reset()
        outbox: Outbox[pw.PrefillReport] = Outbox()
        self._scheduler = outbox
        outbox.put(pw.PrefillReport(description=self._description()))
        while self._unreported:  # a decode instance may have reported to the successor that it holds these
            outbox.put(self._unreported.popleft())
        try:
            async for report in serve_stream(request_iterator, outbox, self._on_command):
                yield report
        finally:
            if self._scheduler is outbox:
                self._scheduler = None
                self._reset()

    def _reset(self) -> None:
        """The scheduler has ended: cancel its prompts, which their gateways submit again.

        Requests in the candidate buffers stay: the decode instances decide about them.
        """
        self._no_longer_expect(list(self._expected))
        if self._instance.compute is not None:
            self._instance.compute.cancel_all()

    def _no_longer_expect(self, keys: Iterable[RequestKey]) -> None:
        """These requests were cancelled. Prompts that are no longer wanted do not make others wait for their KV."""
        groups = {id(group): group for key in keys if (group := self._expected.pop(key, None)) is not None}
        for wanted in self._expected.values():
            groups.pop(id(wanted), None)
        for group in groups.values():
            self._instance.prefix_ended(keys_from_proto(pb.RequestKeys(keys=group.keys)))

    def _on_command(self, command: pw.PrefillCommand) -> None:
        kind = command.WhichOneof("body")
        if kind == "prefill":
            keys = keys_from_proto(pb.RequestKeys(keys=command.prefill.keys))
            self._expected.update(dict.fromkeys(keys, command.prefill))
            self.spawn(self._begin(command.prefill, keys))
        elif kind == "prefetch":
            if self._instance.buffers:
                check_buffer(command.prefetch)
                self.spawn(self._prefetch(command.prefetch))
        elif kind == "cancel":
            self._cancel(keys_from_proto(command.cancel))
        elif kind == "give_up_pins":
            self._instance.give_up_pins(command.give_up_pins)

    def _cancel(self, keys: Sequence[RequestKey]) -> None:
        offloader, compute = self._instance.offloader, self._instance.compute
        assert offloader is not None
        assert compute is not None
        if expected := [key for key in dict.fromkeys(keys) if key in self._expected]:
            self._no_longer_expect(expected)
            self._report(pw.PrefillReport(finished=keys_to_proto(expected)))
        compute.cancel([key for key in keys if not offloader.cancel(key)])

    async def _begin(self, group: pw.PrefillGroup, keys: Sequence[RequestKey]) -> None:
        """Read the group from its gateway, and compute those of its requests that are still wanted."""
        compute = self._instance.compute
        assert compute is not None
        specs: Specs = {}
        base = self._instance.base_of(group.base) if group.HasField("base") else None
        failure: AlignedServeError | None = None
        try:
            specs = sent_specs(group) or await self._specs.read(group.gateway_address, keys)
            if specs:
                check_group(list(specs.values()), self._instance.vocab_size)
                await self._instance.compile_grammars(specs.values())
                if not group.HasField("base"):
                    base = await self._instance.find_prefix(list(specs.values()), group.copy_from)
        except AlignedServeError as error:
            failure = error
        except Exception as error:  # whatever it is, the scheduler must learn of it, and no prompt may wait for it
            logger.exception("a prompt could not be begun", extra={"request_id": keys[0].request_id})
            failure = AlignedServeError(f"a prompt could not be begun: {error!r}")
        expected = [key for key in keys if self._expected.get(key) is group]  # others were cancelled
        for key in expected:
            del self._expected[key]
        if failure is not None and expected:
            logger.warning("a prompt could not be read: %s", failure, extra={"request_id": keys[0].request_id})
            self._report_failure(expected, failure, retry=True)
        elif gone := [key for key in expected if key not in specs]:  # ended or submitted again
            self._report(pw.PrefillReport(finished=keys_to_proto(gone)))
        if coming := [specs[key] for key in expected if key in specs and failure is None]:
            if not coming[0].prompt_token_ids:  # the request that carries the prompt was cancelled
                coming[0].prompt_token_ids.extend(next(iter(specs.values())).prompt_token_ids)
            compute.submit([spec_from_proto(spec) for spec in coming], base, next(iter(specs)))
        elif specs:
            self._instance.prefix_ended([next(iter(specs))])
        self._follow_draining()

    async def _prefetch(self, command: pw.Prefetch) -> None:
        prefetcher, scheduler = self._instance.prefetcher, self._scheduler
        assert prefetcher is not None

        def decoder() -> tuple[Outbox[pw.BufferEvent], str] | None:
            """None if the scheduler has ended: its successor makes the gateways submit these requests again."""
            return self._decoders.get(command.decode_id) if self._scheduler is scheduler else None

        missed = await prefetcher.prefetch(command, decoder)
        self._report_returned(missed.returned)
        if missed.missing:
            self._report_failure(missed.missing, TransferError("the pool no longer has the request's KV"), retry=True)
        if missed.unreadable:
            error = TransferError("the KV could not be copied from the pool")
            self._report_failure(missed.unreadable, error, retry=True, distrust=True)
        self._report_description()

    def _report_returned(self, requests: Iterable[pb.StoredRequest]) -> None:
        """Report requests whose KV is again only in the pool."""
        if returned := [pooled(stored) for stored in requests]:
            self._report(pw.PrefillReport(returned=pw.ReturnedRequests(requests=returned)))

    # ---- from decode instances

    def _stores(self) -> dict[str, BlockStore]:
        return parts_by_id(buffer.store for buffer in self._instance.buffers.values())

    async def Buffers(
        self, request_iterator: AsyncIterator[pw.BufferCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pw.BufferEvent]:
        hello: pb.ProcessKey = await first_message(request_iterator, "hello", context)
        if not self._instance.buffers:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self.settings.id} has no buffers")
        process = f"{hello.id}/{hello.incarnation}/"
        owner = f"{process}{next(self._streams)}"
        outbox: Outbox[pw.BufferEvent] = Outbox()
        earlier = self._decoders.get(hello.id)
        if earlier is not None and earlier[1].startswith(process):  # as `follow_on`, but a predecessor may still live
            earlier[0].close()
        self._decoders[hello.id] = (outbox, owner)
        handles = {buffer.kind: buffer.store.handle().to_proto() for buffer in self._instance.buffers.values()}
        stores = pw.BufferStores(
            process=self.process,
            batch=handles[BufferKind.BATCH],
            requests=handles[BufferKind.REQUESTS],
            no_nccl=self._instance.no_nccl,
        )
        outbox.put(pw.BufferEvent(stores=stores))

        def on_command(command: pw.BufferCommand) -> None:
            self._on_buffer_command(command, owner, outbox)

        try:
            async for event in serve_stream(request_iterator, outbox, on_command):
                yield event
        finally:
            if self._decoders.get(hello.id) == (outbox, owner):
                del self._decoders[hello.id]
            # The decode instance may still copy from and to these blocks: keep them until it is known to have stopped.
            self._orphans[owner] = (hello.id, hello.incarnation)
            self.loop.call_later(self._copies_ended_s, self._drop_late, owner)

    def _drop_dead(self, view: sv.ClusterView) -> None:
        """Free the buffer blocks of decode instances that are known to have ended."""
        self._ended_processes.on_view(view)
        self._living = {(peer.process.id, peer.process.incarnation) for peer in view.peers}
        for owner, process in list(self._orphans.items()):
            if self._ended_processes.has_ended(*process):
                self._drop_orphan(owner, known_dead=True)

    def _drop_late(self, owner: str) -> None:
        """Some time after the stream ended, treat an owner as dead if its process is not in the supervisor's view."""
        self._drop_orphan(owner, known_dead=self._orphans.get(owner) not in self._living)

    def _drop_orphan(self, owner: str, *, known_dead: bool = False) -> None:
        """Free what an ended stream's owner had here.

        Candidates whose KV is also in the pool go back to the quad-tree. Evicted requests without a full copy are lost.
        """
        process = self._orphans.get(owner)
        if process is None or not (known_dead or process[0] in self._decoders):
            return
        del self._orphans[owner]
        dropped = [entry.stored for buffer in self._instance.buffers.values() for entry in buffer.drop_owner(owner)]
        returned = [stored for stored in dropped if stored.kv_tokens == stored.pool_tokens]
        self._report_returned(returned)
        lost = [key_from_proto(stored.spec.key) for stored in dropped if stored.kv_tokens != stored.pool_tokens]
        if lost:
            self._report_failure(lost, TransferError("the decode instance was lost"), retry=True)
        self._report_description()

    @property
    def _block_size(self) -> int:
        return self._instance.buffers[BufferKind.REQUESTS].store.geometry.block_size

    def _on_buffer_command(self, command: pw.BufferCommand, owner: str, outbox: Outbox[pw.BufferEvent]) -> None:
        requests_buffer = self._instance.buffers[BufferKind.REQUESTS]
        kind = command.WhichOneof("body")
        if kind == "consumed":
            for key in keys_from_proto(command.consumed):
                for buffer in self._instance.buffers.values():
                    buffer.remove(key)
            self._report_description()
        elif kind == "evicted":
            check_stored(command.evicted.request, self._block_size, self._instance.vocab_size)
            requests_buffer.adopt(command.evicted.request, owner)
            self._report_description()
        elif kind == "give_back":
            self.spawn(self._give_back(keys_from_proto(command.give_back)))
        elif kind == "return_blocks":
            requests_buffer.return_lease(owner, command.return_blocks.block_ids)
            self._report_description()
        elif kind == "want_blocks":
            granted = requests_buffer.top_up_lease(owner, command.want_blocks)
            outbox.put(pw.BufferEvent(leased=pw.BufferLease(block_ids=granted)))
            self._report_description()

    async def _give_back(self, keys: Sequence[RequestKey]) -> None:
        prefetcher = self._instance.prefetcher
        assert prefetcher is not None
        returned, lost = await prefetcher.give_back(keys)
        self._report_returned(returned)
        if lost:
            self._report_failure(lost, TransferError("the KV could not be written back to the pool"), retry=True)
        self._report_description()

    # ---- from the compute thread

    def _post(self, outcome: Computed) -> None:
        self.loop.call_soon_threadsafe(self._on_computed, outcome)

    def _on_computed(self, outcome: Computed) -> None:
        if outcome.fatal is not None:
            self.fail(outcome.fatal)
            return
        self.emitter.emit(outcome.events)
        if outcome.finished:
            self._report(pw.PrefillReport(finished=keys_to_proto(outcome.finished)))
        for key, error in outcome.failed:
            self._report_failure([key], error, retry=False)
        if outcome.lost:
            self._report_failure(outcome.lost, UnavailableError("the gateway could not be reached"), retry=True)
        self._instance.prefix_ended(outcome.unpinned)
        for pin, base in outcome.let_go:
            self._instance.let_go(pin, base)
        for job in outcome.prefilled:
            self._instance.reused(job.base)
            self.spawn(self._offload(job) if job.members else self._cache(job))
        self._report_description()

    async def _offload(self, job: PrefilledJob) -> None:
        instance = self._instance
        assert instance.offloader is not None
        assert instance.compute is not None
        committed: set[RequestKey] = set()
        try:
            prefilled, gone = await instance.offloader.offload(job)
            committed = {key_from_proto(request.key) for request in prefilled}
        except AlignedServeError as error:
            logger.warning("offload failed: %s", error, extra={"request_id": job.lead.request_id})
            self._report_failure([spec.key for spec in job.members], error, retry=True)
        else:
            for request in prefilled:
                self._report(pw.PrefillReport(prefilled=request))
            if gone:
                self._report(pw.PrefillReport(finished=keys_to_proto(gone)))
        finally:
            pin = job.pin or job.lead
            instance.prefix_ended([pin], committed=pin in committed)
            instance.compute.release(job.lead)
            self._follow_draining()

    async def _cache(self, job: PrefilledJob) -> None:
        """Cache the KV of a prompt whose requests have ended."""
        instance = self._instance
        assert instance.offloader is not None
        assert instance.compute is not None
        try:
            await instance.offloader.cache(job)
        except AlignedServeError as error:
            logger.warning("a prompt was not cached: %s", error, extra={"request_id": job.lead.request_id})
        finally:
            instance.prefix_ended([job.pin or job.lead])
            instance.compute.release(job.lead)
            self._follow_draining()

    def on_gateway_lost(self, address: str) -> None:
        if self._instance.compute is not None:
            self._instance.compute.report_lost(address)

    # ---- reports

    def _report(self, report: pw.PrefillReport) -> None:
        if self._scheduler is not None:
            self._scheduler.put(report)
        elif report.WhichOneof("body") in ("returned", "failed"):
            self._unreported.append(report)

    def _report_failure(
        self, keys: Iterable[RequestKey], error: AlignedServeError, *, retry: bool, distrust: bool = False
    ) -> None:
        """`distrust`: the pool's KV of these requests must not be used again."""
        failure = failure_to_proto(error)
        failed = pw.RequestFailures(keys=keys_to_proto(keys).keys, failure=failure, retry=retry, distrust=distrust)
        self._report(pw.PrefillReport(failed=failed))

    def _report_description(self) -> None:
        description = self._description()
        compute = self._instance.compute
        if compute is not None and (measured := compute.pass_meter.take()) is not None:
            description.measured.CopyFrom(measured)
        self._report(pw.PrefillReport(description=description))
        self._follow_draining()

    def _description(self) -> pw.PrefillDescription:
        instance = self._instance
        description = pw.PrefillDescription(
            process=self.process,
            pending_tokens=instance.compute.pending_tokens if instance.compute else 0,
            cache_blocks=instance.cache.capacity,
            cache_free_blocks=instance.cache.free_blocks,
        )
        description.copy_s_per_token = instance.loans.copy_s_per_token
        if instance.returns is not None:
            description.pool_wait_blocks = instance.returns.waiting_blocks
        if instance.buffers:  # without prefetch there are no candidate buffers
            batch, requests = (instance.buffers[kind].allocator for kind in (BufferKind.BATCH, BufferKind.REQUESTS))
            description.batch_buffer_blocks = batch.capacity
            description.batch_buffer_free_blocks = batch.available_blocks
            description.requests_buffer_blocks = requests.capacity
            description.requests_buffer_free_blocks = requests.available_blocks
        return description

    async def Describe(self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]) -> pw.PrefillDescription:
        return self._description()


def _count(allocator: BlockAllocator) -> StoreCount:
    return StoreCount.of(allocator.store_id, allocator.capacity, allocator.free_blocks, allocator.cached_blocks)
