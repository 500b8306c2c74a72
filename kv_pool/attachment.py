"""A worker's attachment to the pool: the mapped shard of its node, and links to the shard's current process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from alignedserve.control.checks import decodable
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError, StaleError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.agent_handover import AgentHandover
from alignedserve.kv_pool.remote_shards import PoolReader, RemoteShards
from alignedserve.kv_pool.stored_reader import StoredReader
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey
from alignedserve.sizing import StorePlan
from alignedserve.transfer.block_store import HostBlockStore, attach_store
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.handles import StoreHandle
from alignedserve.transfer.segments import SegmentClient
from alignedserve.transfer.topology import GLOO

logger = logging.getLogger(__name__)


class PoolAttachment:
    """Follows the cluster's view. The memory outlives the shard's process, so a successor needs only new links.

    `segments` must be the client with which this process makes all its mappings: through it a restarted node agent
    gets their descriptors. `others` reads the shards of other nodes. `stored` reads stored requests of any shard.
    """

    def __init__(
        self, settings: RoleSettings, process: pb.ProcessKey, copy_timeout_s: float, channel: str = GLOO
    ) -> None:
        """`channel`: by which shards of other nodes are read."""
        self.segments = SegmentClient(settings.agent_socket, settings.token)
        self.others = RemoteShards(settings, process, copy_timeout_s, channel)
        self.stored = StoredReader(settings.token)
        self.view = sv.ClusterView()
        self.plan: asyncio.Future[StorePlan] = asyncio.get_running_loop().create_future()
        self._node_id = settings.node_id
        self._pool_id: str | None = ""  # this node's shard; "": the only shard, None: this node has no shard (yet)
        self._store: HostBlockStore | None = None
        self._geometry: KvGeometry | None = None
        self._writers: Sequence[PoolWriter] = ()
        self._serving: pb.ProcessKey | None = None
        self._attached = asyncio.Event()
        self._handover = AgentHandover(self.segments, settings.node_id)

    async def on_view(self, view: sv.ClusterView) -> None:
        """Follow the shards of this view.

        Raises GeometryMismatchError if the shard belongs to another model, and TransferError if it is in other memory
        than the mapped memory.
        """
        self.view = view
        if view.pools:
            self._pool_id = next((shard.pool_id for shard in view.pools if shard.node_id == self._node_id), None)
        if view.store_plan and not self.plan.done():
            self.plan.set_result(StorePlan.from_json(view.store_plan))
        await self._handover.on_view(view)
        await self._follow_pool()
        await self.others.on_view(view)
        await self.stored.on_view(view)

    async def attach(self, geometry: KvGeometry, writers: Sequence[PoolWriter]) -> HostBlockStore:
        """Wait for the shard of this node, map it and link `writers` to its process. Returns the mapped store.

        Raises like `on_view`.
        """
        self._geometry, self._writers = geometry, writers
        self.others.set_shape(geometry, (await self.plan).pool)
        await self._follow_pool()
        await self._attached.wait()
        assert self._store is not None
        return self._store

    async def read(
        self, pool_id: str, keys: Collection[RequestKey], vocab_size: int
    ) -> dict[RequestKey, pb.StoredRequest]:
        """The stored requests of `keys` that can be decoded. Empty if the shard cannot be read."""
        try:
            found = await self.stored.read(pool_id, keys)
        except Exception as error:  # whatever it is, the caller must report these requests
            trace = None if isinstance(error, TransferError) else error
            logger.warning("%d candidates cannot be read: %s", len(keys), error, exc_info=trace)
            return {}
        size = self.plan.result().block_size
        return {key: stored for key, stored in found.items() if decodable(stored, size, vocab_size)}

    def reader(self, own: Channel) -> PoolReader:
        """A reader from every shard to the destination of `own`, the channel from this node's shard."""
        return PoolReader(own, self.others)

    async def _follow_pool(self) -> None:
        ready = (peer for peer in self.view.peers if peer.process.role == "kv_pool" and peer.state == "ready")
        peer = next((peer for peer in ready if self._pool_id in ("", peer.process.id)), None)
        if self._geometry is None or peer is None or peer.process == self._serving or not peer.stores:
            return
        handle = StoreHandle.from_proto(peer.stores[0])
        if self._store is not None and self._store.handle().memory != handle.memory:
            raise TransferError(f"{handle.store_id} is in other memory than is mapped here: the shard was created anew")
        self._serving = peer.process
        if self._store is None:
            self._store = await asyncio.to_thread(attach_store, handle, self.segments, geometry=self._geometry)
        logger.info("attached %s: %d blocks", handle.store_id, handle.capacity_blocks)
        for writer in self._writers:
            await writer.connect(peer.address)
        self._attached.set()

    def trouble(self) -> AlignedServeError | None:
        """A StaleError if the shard refuses this process, which was declared dead and has no leases; else None."""
        refused = next((writer.refusal for writer in self._writers if writer.refusal), "")
        return StaleError(f"the KV pool refuses this process: {refused}") if refused else None

    async def close(self) -> None:
        await self.others.close()
        await self.stored.close()
        for writer in self._writers:
            await writer.close()
        if self._store is not None:
            self._store.close()
