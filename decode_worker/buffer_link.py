"""A decode instance's link to the candidate buffers of one paired prefill instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from alignedserve.control.convert import keys_to_proto
from alignedserve.control.link import DuplexLink
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.decode_worker.buffer_access import BufferAccess
from alignedserve.decode_worker.loop import DecodeLoop
from alignedserve.errors import GeometryMismatchError, ResourceError, TransferError, UnavailableError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import prefill_worker_pb2_grpc as pw_grpc
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.handles import StoreHandle

logger = logging.getLogger(__name__)

ATTACH_RETRY_S = 0.5


class BufferLink:
    """Attaches both buffers, receives announcements, and keeps a standing lease for evictions.

    The lease is in the candidate request buffer. A link serves one incarnation of the prefill instance, and ends with
    it. Used from the event loop; the decode thread reads `pulls`.
    """

    def __init__(
        self,
        prefill_id: str,
        process: pb.ProcessKey,
        cache: BlockStore,
        loop: DecodeLoop,
        lease_blocks: int,
        reach: Callable[[StoreHandle, str, TokenChannel], BufferAccess],
        on_lease: Callable[[], None],
    ) -> None:
        """`reach` chooses the access to the buffers, from the handle of one and the reason not to use NCCL.

        It raises ResourceError if there is no access.
        """
        self.prefill_id = prefill_id
        self.trouble: ResourceError | None = None
        self.pulls: dict[str, Channel] = {}
        self.evict_channel: Channel | None = None
        self.requests_store_id = ""
        self._process = process
        self._cache = cache
        self._loop = loop
        self._lease_blocks = lease_blocks
        self._retired = False
        self._reach = reach
        self._access: BufferAccess | None = None
        self._on_lease = on_lease
        self.generation = 0  # grows when the stream breaks: leases of older generations are void
        self._leased: list[int] = []
        self._taken = 0
        self._stores: list[BlockStore] = []
        self._channel: TokenChannel | None = None
        self._link: DuplexLink[pw.BufferCommand, pw.BufferEvent] | None = None

    def open(self, address: str, token: str) -> None:
        channel = open_channel(address, token)
        self._channel = channel
        stub = pw_grpc.PrefillWorkerStub(channel)
        self._link = DuplexLink(stub.Buffers, self._on_event, self._first, on_down=self._on_down)
        self._link.start()

    @property
    def channels(self) -> list[Channel]:
        return [*self.pulls.values(), *([self.evict_channel] if self.evict_channel else [])]

    @property
    def up(self) -> bool:
        return self._link is not None and self._link.up

    @property
    def leased_blocks(self) -> int:
        return len(self._leased)

    def take_leased(self, count: int) -> list[int] | None:
        """Take `count` blocks of the candidate request buffer for an eviction; None if the lease has fewer."""
        if len(self._leased) < count or self.evict_channel is None or not self._settled:
            return None
        taken, self._leased = self._leased[:count], self._leased[count:]
        self._taken += count
        return taken

    def put_back(self, block_ids: Iterable[int]) -> None:
        """Put back taken blocks after their copy has failed."""
        if not self._settled:
            # The prefill instance may still write to them and cannot be asked: end the stream, and with it their lease.
            if self._link is not None:
                self._link.break_off(f"{self.prefill_id} does not answer")
            return
        back = list(block_ids)
        self._leased.extend(back)
        self._taken -= len(back)
        self._give_up_surplus()

    @property
    def _settled(self) -> bool:
        return self._access is None or self._access.settled

    def set_lease_blocks(self, count: int) -> None:
        """Keep `count` blocks leased: return surplus blocks, and request missing ones."""
        if self._retired or count == self._lease_blocks:
            return
        self._lease_blocks = count
        self._give_up_surplus()
        self._want()

    def retire(self) -> None:
        """The prefill instance drains: leave its buffers, and lease no more blocks there."""
        if self._retired:
            return
        self._retired = True
        self._lease_blocks = 0
        self._loop.leave_source(list(self.pulls))
        self._give_up_surplus()

    def _give_up_surplus(self) -> None:
        surplus, self._leased = self._leased[self._lease_blocks :], self._leased[: self._lease_blocks]
        if surplus:
            self._send(pw.BufferCommand(return_blocks=pw.BufferLease(block_ids=surplus)))
            self._on_lease()

    def evicted(self, stored: pb.StoredRequest) -> None:
        """Report that an evicted request is in blocks that were taken."""
        self._taken -= len(stored.block_ids)
        self._send(pw.BufferCommand(evicted=pw.EvictedRequest(request=stored)))
        self._want()

    def consumed(self, keys: Iterable[RequestKey]) -> None:
        self._send(pw.BufferCommand(consumed=keys_to_proto(keys)))
        if len(self._leased) < self._lease_blocks:
            self._want()

    def give_back(self, keys: Iterable[RequestKey]) -> None:
        self._send(pw.BufferCommand(give_back=keys_to_proto(keys)))

    def _send(self, command: pw.BufferCommand) -> None:
        if self._link is not None:
            self._link.send(command)

    def _first(self) -> Iterable[pw.BufferCommand]:
        yield pw.BufferCommand(hello=self._process)
        yield pw.BufferCommand(want_blocks=self._lease_blocks)

    def _want(self) -> None:
        if self._retired:
            return
        # In the prefill instance's accounting, blocks taken for evictions under way are still leased.
        self._send(pw.BufferCommand(want_blocks=self._lease_blocks + self._taken))

    async def _on_event(self, event: pw.BufferEvent) -> None:
        kind = event.WhichOneof("body")
        if kind == "stores":
            await self._attach_soon(event.stores)
        elif kind == "announced":
            announced = event.announced
            self._loop.offer(BufferKind(announced.buffer), announced.batch_id, announced.requests)
        elif kind == "leased":
            self._leased.extend(event.leased.block_ids)
            self._give_up_surplus()
            self._on_lease()

    async def _attach_soon(self, stores: pw.BufferStores) -> None:
        """Retry to attach until it succeeds.

        The node agent may be restarting, or may not have its predecessor's descriptors yet.
        """
        while True:
            try:
                await self._attach(stores)
                return
            except GeometryMismatchError:
                raise
            except (
                ResourceError
            ) as error:  # a retry does not help: the worker must be replaced, or the cluster must end
                logger.error("the buffers of %s cannot be reached: %s", self.prefill_id, error)
                self.trouble = error
                return
            except (TransferError, UnavailableError) as error:
                logger.warning("the buffers of %s cannot be attached yet: %s", self.prefill_id, error)
                await asyncio.sleep(ATTACH_RETRY_S)

    async def _attach(self, stores: pw.BufferStores) -> None:
        if self._stores:
            return
        handles = [StoreHandle.from_proto(message) for message in (stores.batch, stores.requests)]
        if self._access is None:
            assert self._channel is not None
            self._access = self._reach(handles[0], stores.no_nccl, self._channel)
        opened = [await asyncio.to_thread(self._access.open, handle) for handle in handles]
        self.pulls = {store.store_id: self._access.connect(store, self._cache) for store in opened}
        self.requests_store_id = stores.requests.store_id
        self.evict_channel = self._access.connect(self._cache, opened[1])
        self._stores = opened
        if self._retired:
            self._loop.leave_source(list(self.pulls))
        self._on_lease()

    def _on_down(self) -> None:
        self.generation += 1
        self._leased.clear()
        self._taken = 0
        self._on_lease()
        self._loop.source_lost(list(self.pulls))

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
        if self._access is not None:
            await self._access.close()
        if self._channel is not None:
            await self._channel.close()
        for channel in self.channels:
            await asyncio.to_thread(channel.close)
        for store in self._stores:
            store.close()
