"""The process of a shard. It owns the allocator of the shard's segment.

The node agent owns the memory of the segment, so the memory outlives this process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

import grpc

from alignedserve.control.convert import failure_to_proto, key_from_proto, keys_from_proto
from alignedserve.control.ended_processes import EndedProcesses
from alignedserve.control.integrity import check_books
from alignedserve.control.link import Outbox, first_message, follow_on, serve_stream
from alignedserve.control.metrics import StoreCount, show_stores
from alignedserve.control.prefixes import stored_tokens
from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.errors import AlignedServeError, StaleError
from alignedserve.kv_pool.agent_handover import AgentHandover
from alignedserve.kv_pool.counts import Grant
from alignedserve.kv_pool.disk.shard import Shard
from alignedserve.kv_pool.disk.tier import DiskTier
from alignedserve.kv_pool.kept.prefix_service import PrefixCacheService
from alignedserve.kv_pool.paired_service import PairedCopiesService
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_cache import open_index
from alignedserve.kv_pool.records import WriterKey, check_writer
from alignedserve.kv_pool.stored import adopted, holding_to_proto, stored_in
from alignedserve.kv_pool.table import AllocationTable, table_bytes
from alignedserve.kv_pool.writer import MODEST_S
from alignedserve.metrics import Page
from alignedserve.model import ModelInfo
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.proto import kv_pool_pb2_grpc as kp_grpc
from alignedserve.proto import paired_copies_pb2_grpc as pc_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import PIN
from alignedserve.scheduler.cost.load import configured_cost
from alignedserve.sizing import StorePlan
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.segments import SegmentClient
from alignedserve.transfer.topology import shard_channel

Message = TypeVar("Message")


class KvPoolServer(RoleServer, kp_grpc.KvPoolServicer):
    """Role `kv_pool`. Moves messages between streams and `KvPool`, which makes the decisions."""

    role: ClassVar[str] = "kv_pool"

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings)
        # Done at the first view that has both.
        self._plan: asyncio.Future[tuple[ModelInfo, StorePlan]] = asyncio.get_running_loop().create_future()
        self._pool: KvPool | None = None  # the shard's decisions; None until `on_start` has the plan
        self._store: HostBlockStore | None = None  # the shard's memory; None until `on_start`
        self._writers: dict[WriterKey, Outbox[kp.PoolWriterReply]] = {}  # open streams; a fenced writer leaves
        self._recalling: asyncio.TimerHandle | None = None  # while a writer waits for blocks
        self._schedulers: set[Outbox[kp.PoolReport]] = set()  # open streams; more than one only at a succession
        self._ended_processes = EndedProcesses()  # processes that have ended, according to the views so far
        self._segments = SegmentClient(settings.agent_socket, settings.token)  # maps memory of the node agent
        self._handover = AgentHandover(self._segments, settings.node_id)  # passes mappings to a new node agent
        timeout_s = self.config.kv_pool.copy_timeout_s
        # Copies that workers of other nodes ask for.
        channels = (shard_channel(self.config.cluster.channel),)
        self._copies = PairedCopiesService(settings, self.process, self._stores, channels, timeout_s, writable=False)
        self._disk: DiskTier | None = None  # None until `on_start`, or without `kv_pool.disk_gib`
        self._cluster_served = False  # whether the cluster was ready before this process was
        self._cluster_ends = False  # the shard's memory ends with this process
        # Messages about the prefix cache. It has the pins, and knows nothing of them until `on_start`.
        self._prefixes = PrefixCacheService(
            settings.id, self.config.kv_pool.pinned_fraction, self._settled, self._changed, self._alone
        )
        self._announced = (-1, -1)  # room and pinned blocks, as the scheduler was told last; -1: never
        self._recounting = asyncio.Lock()  # while it is held, nothing in the pool may change

    # ---- the role's hooks

    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        return [
            (kp_grpc.add_KvPoolServicer_to_server, self),
            (kp_grpc.add_PrefixCacheServicer_to_server, self._prefixes),
            (pc_grpc.add_PairedCopiesServicer_to_server, self._copies),
        ]

    async def on_start(self) -> None:
        self.set_state("loading")
        model, plan = await self._plan
        geometry = model.geometry(plan.block_size)
        front = table_bytes(plan.pool, plan.block_size)
        self._store = await asyncio.to_thread(
            HostBlockStore.create,
            self._segments,
            self.settings.id,
            geometry,
            plan.pool,
            node_id=self.settings.node_id,
            front_bytes=front,
        )
        table = AllocationTable(self._store.front(), geometry, plan.pool)
        reserve = int(plan.pool * self.config.kv_pool.growth_reserve)
        index = open_index(self.config, table, plan.block_size)
        self._pool = KvPool(self._store.store_id, table, plan.block_size, reserve_blocks=reserve, index=index)
        self._prefixes.open(self._pool, geometry.fingerprint, geometry.block_bytes)
        if index is not None and self.config.kv_pool.disk_gib:
            cost, verify = configured_cost(self.config.scheduler), self.config.kv_pool.verify
            shard = Shard(self._pool, index, self._store, self._deliver, self._recounted, self._alone, verify, cost)
            self._disk = self._prefixes.disk = DiskTier(self.config, self.settings.id, model, shard)
            await self._disk.start(required=not self._cluster_served)
        self.set_state("ready")

    async def on_view(self, view: sv.ClusterView) -> None:
        self._cluster_ends = view.ending
        if view.store_plan and view.model_info and not self._plan.done():
            self._cluster_served = view.was_ready
            self._plan.set_result((ModelInfo.from_json(view.model_info), StorePlan.from_json(view.store_plan)))
        if view.model_info:
            self._prefixes.serve_weights(ModelInfo.from_json(view.model_info).weights)
        self._ended_processes.on_view(view)
        await self._handover.on_view(view)
        fenced = {(peer.process.id, peer.process.incarnation) for peer in view.peers if peer.fenced}
        self._refuse_readers(fenced)
        if len(view.pools) > 1:
            self._copies.expect()
        if self._pool is None:
            return
        await self._recounted()
        for writer in self._pool.writers():
            if (writer.id, writer.incarnation) in fenced:
                self._quarantine(self._pool, writer)
        self._bury()

    def _stores(self) -> dict[str, BlockStore]:
        return {} if self._pool is None or self._store is None else {self._store.store_id: self._store}

    def _refuse_readers(self, fenced: set[tuple[str, int]]) -> None:
        """Refuse copies to workers of other nodes that have ended or are being fenced."""

        def over(process: pb.ProcessKey) -> bool:
            name = process.id, process.incarnation
            return name in fenced or self._ended_processes.has_ended(*name)

        self._copies.refuse(over)

    def _bury(self) -> None:
        """Free the leases of writers that are known to have ended.

        A writer with an open stream is treated as alive: after a mistake it would have to be replaced.
        """
        assert self._pool is not None
        if self._recounting.locked():
            return  # `_alone` calls this method when it is left
        for writer in self._pool.writers():
            if writer not in self._writers and self._ended_processes.has_ended(writer.id, writer.incarnation):
                self._deliver(self._pool.writer_dead(writer))
                self._announce()

    def _quarantine(self, pool: KvPool, writer: WriterKey) -> None:
        """`writer` is being fenced and may still write: quarantine its leases, and drop its messages."""
        pool.writer_lost(writer)
        if (outbox := self._writers.pop(writer, None)) is not None:
            outbox.close()
        self._announce()

    async def on_close(self) -> None:
        await self._copies.close()
        await self._recounted()
        if self._disk is not None:
            await self._disk.close(flush=self._cluster_ends)
        if self._store is not None:
            self._store.close()

    def describe(self) -> sv.Heartbeat:
        if self._pool is None or self._store is None:
            return sv.Heartbeat()
        counts = self._pool.counts()
        page = Page(instance=self.settings.id)
        show_stores(page, [self._count()])
        requests = counts.requests - self._prefixes.pins
        page.gauge("pool_requests", "requests whose KV the pool holds", requests)
        meaning = "blocks leased to writers and not yet committed"
        page.gauge("pool_leased_blocks", meaning, counts.leased)
        meaning = "blocks that pinned prefixes hold (alignedserve cache pin)"
        page.gauge("pool_pinned_blocks", meaning, self._prefixes.pinned_blocks)
        on_disk = ""
        if self._disk is not None:
            self._disk.show(page)
            on_disk = f"; on disk: {self._disk.count().cached}/{self._disk.count().capacity}"
        blocks = f"{counts.owned}/{counts.capacity}, {counts.leased} leased"
        return sv.Heartbeat(
            stores=[self._store.handle().to_proto()],
            holds=f"{requests} requests; blocks: {blocks}{on_disk}",
            metrics=page.text(),
        )

    async def check_integrity(self) -> list[sv.BookCheck]:
        if self._pool is None:
            return []
        # The caller may be cancelled. The thread goes on, and the pool must not change until the thread is done.
        return await asyncio.shield(asyncio.ensure_future(self._recount(self._pool)))

    async def _recount(self, pool: KvPool) -> list[sv.BookCheck]:
        """Check the accounting in a thread, because a million blocks take seconds."""
        async with self._alone():
            check = functools.partial(check_books, pool.store_id, self.settings.id, pool.check_integrity, self._count)
            found = [await asyncio.to_thread(check)]
            if self._disk is not None and (on_disk := await asyncio.to_thread(self._disk.check)) is not None:
                found.append(on_disk)
        return found

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """A section in which only the caller may change the pool: messages that change it wait. Heartbeats go on."""
        try:
            async with self._recounting:
                yield
        finally:
            self._bury()

    async def _recounted(self) -> None:
        """Return when no section of `_alone` is under way. None begins before the caller's next `await`."""
        async with self._recounting:
            pass

    async def _between_recounts(self, messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        async for message in messages:
            await self._recounted()
            yield message

    def _count(self) -> StoreCount:
        assert self._pool is not None
        counts = self._pool.counts()
        return StoreCount(self._pool.store_id, counts.capacity, counts.free, counts.owned, counts.cached)

    # ---- writers

    async def Write(
        self, request_iterator: AsyncIterator[kp.PoolWriterMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[kp.PoolWriterReply]:
        writer = _writer(await first_message(request_iterator, "hello", context))
        pool = await self._ready(context)
        outbox: Outbox[kp.PoolWriterReply] = Outbox()
        await self._recounted()
        try:
            check_writer(writer)
            grants = pool.hello(writer)
        except StaleError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except AlignedServeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        follow_on(self._writers, writer, outbox)
        self._deliver(grants)

        def on_message(message: kp.PoolWriterMessage) -> None:
            self._on_message(writer, message, outbox)

        try:
            async for reply in serve_stream(self._between_recounts(request_iterator), outbox, on_message):
                yield reply
        finally:
            if self._writers.get(writer) is outbox:
                del self._writers[writer]
            self._bury()  # the writer may have left the view before its stream broke

    def _on_message(self, writer: WriterKey, message: kp.PoolWriterMessage, outbox: Outbox[kp.PoolWriterReply]) -> None:
        assert self._pool is not None
        self.progress += 1
        if self._writers.get(writer) is not outbox:
            return  # from a replaced stream, or from a process that is being fenced
        kind = message.WhichOneof("body")
        if kind == "commit":
            self._commit(writer, message, outbox)
        elif kind == "want_blocks":
            self._deliver(self._pool.want(writer, message.want_blocks))
            self._recall()
        elif kind == "give_back":
            self._deliver(self._pool.give_back(writer, list(message.give_back.ids)))
        elif kind == "release":
            self._deliver(self._pool.release(keys_from_proto(message.release)))
        elif kind == "pin":
            self._pin(self._pool, writer, message, outbox)
        elif kind == "unpin":
            self._deliver(self._pool.unpin(key_from_proto(message.unpin.key), message.unpin.kv_tokens))
        elif kind == "cache":
            outbox.put(self._cache(self._pool, writer, message))
        self._announce()

    def _changed(self, grants: Iterable[Grant]) -> None:
        """The pool was changed by a gateway's order."""
        self._deliver(grants)
        self._announce()

    def _pin(
        self, pool: KvPool, writer: WriterKey, message: kp.PoolWriterMessage, outbox: Outbox[kp.PoolWriterReply]
    ) -> None:
        """Reply with what is cached of a prompt, once what is on disk of it is there too."""

        def refuse(error: AlignedServeError) -> None:
            outbox.put(kp.PoolWriterReply(message_id=message.message_id, refused=failure_to_proto(error)))

        def pin() -> None:
            if self._writers.get(writer) is not outbox:
                return  # it asks again over its next stream, or is being fenced
            try:
                held, grants = self._prefixes.pin(pool, message.pin)
            except AlignedServeError as error:
                refuse(error)
                return
            self._deliver(grants)
            pinned = holding_to_proto(held, self.settings.id)
            pinned.disk_tokens = self._disk.used_tokens(held.block_ids) if self._disk is not None else 0
            outbox.put(kp.PoolWriterReply(message_id=message.message_id, pinned=pinned))
            self._announce()

        try:
            self._prefixes.when_promoted(message.pin, then=pin)
        except AlignedServeError as error:
            refuse(error)

    def _cache(self, pool: KvPool, writer: WriterKey, message: kp.PoolWriterMessage) -> kp.PoolWriterReply:
        try:
            kept, grants = self._prefixes.cache(pool, writer, message.cache)
        except AlignedServeError as error:
            return kp.PoolWriterReply(message_id=message.message_id, refused=failure_to_proto(error))
        self._deliver(grants)
        return kp.PoolWriterReply(message_id=message.message_id, committed=kp.Committed(block_ids=kept))

    async def Match(self, request: kp.CachedPrefix, context: grpc.aio.ServicerContext[Any, Any]) -> kp.PrefixFound:
        return await self._prefixes.match(request, context)

    def _commit(self, writer: WriterKey, message: kp.PoolWriterMessage, outbox: Outbox[kp.PoolWriterReply]) -> None:
        assert self._pool is not None
        commit = message.commit
        share_with = key_from_proto(commit.share_with) if commit.HasField("share_with") else None
        key, block_ids = key_from_proto(commit.key), list(commit.block_ids)
        try:
            cached = self.config.kv_pool.prefix_cache
            tokens, salt, weights = stored_tokens(commit.payload) if cached else ([], b"", "")
            grants = self._pool.commit(
                writer,
                key,
                commit.kv_tokens,
                block_ids,
                share_with,
                commit.kept_blocks,
                list(commit.checksums),
                commit.payload,
                tokens,
                self._prefixes.root(salt, weights),
            )
        except AlignedServeError as error:
            outbox.put(kp.PoolWriterReply(message_id=message.message_id, refused=failure_to_proto(error)))
            return
        held, committed = self._pool.holding(key.request_id), kp.Committed()
        if held is not None and list(held.block_ids) != block_ids:
            committed = kp.Committed(block_ids=held.block_ids, checksums=held.checksums)
        outbox.put(kp.PoolWriterReply(message_id=message.message_id, committed=committed))
        self._deliver(grants)

    def _recall(self) -> None:
        """While a writer waits for blocks, ask all the others to give back the free blocks of their leases."""
        assert self._pool is not None
        if self._recalling is not None:
            self._recalling.cancel()
        if (first := self._pool.waited_for()) is not None:
            for writer, outbox in self._writers.items():
                if writer != first:
                    outbox.put(kp.PoolWriterReply(recall=pb.Empty()))
            # Again: blocks in use now may be of no use later, and what is given back may be lost with a stream.
            self._recalling = asyncio.get_running_loop().call_later(MODEST_S, self._recall)

    def _deliver(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            if (outbox := self._writers.get(grant.writer)) is not None:  # else granted again when it reconnects
                outbox.put(kp.PoolWriterReply(granted=kp.BlockIds(ids=grant.block_ids)))

    # ---- the scheduler

    async def Control(
        self, request_iterator: AsyncIterator[kp.PoolCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[kp.PoolReport]:
        await self._ready(context)
        outbox: Outbox[kp.PoolReport] = Outbox()
        self._schedulers.add(outbox)
        outbox.put(kp.PoolReport(description=self._description()))
        try:
            commands = self._between_recounts(request_iterator)
            async for report in serve_stream(commands, outbox, lambda command: self._on_command(command, outbox)):
                yield report
        finally:
            self._schedulers.discard(outbox)

    def _on_command(self, command: kp.PoolCommand, outbox: Outbox[kp.PoolReport]) -> None:
        assert self._pool is not None
        self.progress += 1
        kind = command.WhichOneof("body")
        if kind == "release":
            self._deliver(self._pool.release(keys_from_proto(command.release)))
        elif kind == "drop":
            copies = [(key_from_proto(held.key), held.kv_tokens) for held in command.drop.holdings]
            self._deliver(self._pool.drop(copies))
        elif kind == "adopt":
            found, grants = adopted(self._pool, command.adopt.heads, self.settings.id)
            self._deliver(grants)
            outbox.put(kp.PoolReport(adopted=kp.Inventory(holdings=found)))
        elif kind == "take_inventory":
            held = (one for one in self._pool.inventory() if not one.key.request_id.startswith(PIN))
            holdings = [holding_to_proto(one, self.settings.id, ids=False) for one in held]
            outbox.put(kp.PoolReport(inventory=kp.Inventory(holdings=holdings)))
        self._announce()

    # ---- readers of stored requests

    async def Read(
        self, request: pb.RequestKeys, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[kp.StoredRequests]:
        pool = await self._ready(context)
        for found in stored_in(pool, keys_from_proto(request), self.settings.id):
            yield kp.StoredRequests(requests=found)

    def _announce(self) -> None:
        """Tell the scheduler how many blocks requests can have and how many are pinned, if a number has changed."""
        assert self._pool is not None
        if self._disk is not None:
            self._disk.wake()
        numbers = self._pool.room(), self._prefixes.pinned_blocks
        if numbers != self._announced:
            self._announced = numbers
            description = self._description()
            for outbox in self._schedulers:
                outbox.put(kp.PoolReport(description=description))

    def _description(self) -> kp.PoolDescription:
        assert self._pool is not None
        assert self._store is not None
        counts = self._pool.counts()
        room = self._pool.room()  # a cached block is given up when a request needs it
        cached = min(counts.cached, room)
        return kp.PoolDescription(
            pool_id=self._store.store_id,
            incarnation=self.process.incarnation,
            store=self._store.handle().to_proto(),
            capacity_blocks=counts.capacity,
            free_blocks=room - cached,
            owned_blocks=counts.owned,
            cached_blocks=cached,
            leased_blocks=counts.leased,
            pinned_blocks=self._prefixes.pinned_blocks,
        )

    async def _ready(self, context: grpc.aio.ServicerContext[Any, Any]) -> KvPool:
        """The pool. Aborts the call with UNAVAILABLE until it exists. (Peers learn of this role once it is ready.)"""
        if self._pool is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self.settings.id} is not ready")
        assert self._pool is not None
        return self._pool

    async def _settled(self, context: grpc.aio.ServicerContext[Any, Any]) -> KvPool:
        """Like `_ready`, once no section of `_alone` is under way."""
        pool = await self._ready(context)
        await self._recounted()
        return pool

    async def Describe(self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]) -> kp.PoolDescription:
        await self._ready(context)
        return self._description()


def _writer(process: pb.ProcessKey) -> WriterKey:
    return WriterKey(process.role, process.id, process.incarnation)
