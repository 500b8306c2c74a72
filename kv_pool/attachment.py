"""A worker's hold on the pool: its store mapped here, and the link to whichever process serves it now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.transfer.block_store import HostBlockStore, attach_store
from alignedserve.transfer.handles import StoreHandle
from alignedserve.transfer.segments import SegmentClient

from alignedserve.geometry import KvGeometry

logger = logging.getLogger(__name__)


class PoolAttachment:
    """Follows the cluster's view. The memory outlives the pool's process, so a successor needs a new link only.

    `segments` must be the client that every mapping of this process was made with: a restarted node agent is handed
    them back through it.
    """

    def __init__(self, writers: Sequence[PoolWriter], segments: SegmentClient, geometry: KvGeometry) -> None:
        self.writers = writers
        self.store: HostBlockStore | None = None
        self._segments = segments
        self._geometry = geometry
        self._serving: pb.ProcessKey | None = None
        self._attached = asyncio.Event()
        self._agent = 0

    async def on_view(self, view: sv.ClusterView) -> None:
        """Attach the pool of this view, or its successor. Raises GeometryMismatchError for another model's pool."""
        await self._follow_agent(view)
        peer = next((peer for peer in view.peers if peer.process.role == "kv_pool" and peer.state == "ready"), None)
        if peer is None or peer.process == self._serving or not peer.stores:
            return
        self._serving = peer.process
        handle = StoreHandle.from_proto(peer.stores[0])
        if self.store is None:
            self.store = await asyncio.to_thread(attach_store, handle, self._segments, geometry=self._geometry)
        logger.info("attached %s: %d blocks", handle.store_id, handle.capacity_blocks)
        for writer in self.writers:
            await writer.connect(peer.address)
        self._attached.set()

    async def _follow_agent(self, view: sv.ClusterView) -> None:
        """Hand a restarted node agent the descriptors of the memory that its predecessor made."""
        agent = next((peer.process.incarnation for peer in view.peers if peer.process.role == "node_agent"), 0)
        if agent and self._agent and agent != self._agent:
            refused = await asyncio.to_thread(self._segments.adopt_all)
            if refused:
                logger.warning("the node agent has other memory under these names: %s", ", ".join(refused))
        self._agent = agent or self._agent

    async def attached(self) -> HostBlockStore:
        """The pool's store, once there is one."""
        await self._attached.wait()
        assert self.store is not None
        return self.store

    async def close(self) -> None:
        for writer in self.writers:
            await writer.close()
        if self.store is not None:
            self.store.close()
