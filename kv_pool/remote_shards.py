"""Reading the pool's shards on other nodes: their processes take part in each copy, over Gloo (ADR 34, 39)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field

from alignedserve.control.link import from_any_thread
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.kv_pool.paired_link import PairedLink
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.handles import HOST, StoreHandle
from alignedserve.transfer.links import wrapped
from alignedserve.transfer.paired.channel import PairedChannel
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.transport import ASKING_RANK, Wiring
from alignedserve.transfer.topology import GLOO

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Shard:
    """One that was read, and the stream to the process that serves it now."""

    store: RemoteBlockStore
    client: PairClient
    channels: dict[str, Channel] = field(default_factory=dict)  # by destination
    serving: pb.ProcessKey | None = None
    rpc: TokenChannel | None = None
    link: PairedLink | None = None


class RemoteShards:
    """One stream to each shard that a copy was asked for of, for as long as the cluster's view names it.

    A shard's memory outlives its process: a stream to the successor takes over, and copies wait for it, but no longer
    than `copy_timeout_s` from when the process was away. A successor with other memory holds nothing of what was asked
    for before: that fails.

    `channel` may be called by any thread; the rest is used from the event loop.
    """

    def __init__(self, settings: RoleSettings, process: pb.ProcessKey, copy_timeout_s: float) -> None:
        self._settings, self._process, self._timeout_s = settings, process, copy_timeout_s
        self._geometry: KvGeometry | None = None
        self._capacity_blocks = 0
        self._view = sv.ClusterView()
        self._nodes: dict[str, str] = {}  # of the shards elsewhere
        self._memory: dict[str, str] = {}  # of each shard, as last seen
        self._shards: dict[str, _Shard] = {}
        self._anew: list[_Shard] = []  # whose memory is gone: still to be ended
        self._lock = threading.Lock()
        self._following = asyncio.Lock()
        self._follow_soon = from_any_thread(lambda: self._spawn(self._follow()))
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def set_shape(self, geometry: KvGeometry, capacity_blocks: int) -> None:
        """Of every shard alike; before the first `channel`."""
        self._geometry, self._capacity_blocks = geometry, capacity_blocks

    async def on_view(self, view: sv.ClusterView) -> None:
        """Follow the shards' processes; what is read of a shard that is named no more fails."""
        self._view = view
        if view.pools:  # else it says nothing of shards
            elsewhere = [shard for shard in view.pools if shard.node_id != self._settings.node_id]
            with self._lock:
                self._nodes = {shard.pool_id: shard.node_id for shard in elsewhere}
        self._compare_memory()
        await self._follow()

    def channel(self, pool_id: str, destination: BlockStore) -> Channel:
        """From that shard to a store of this process; the same each time. Never blocks.

        Raises TransferError where the cluster has no such shard on another node.
        """
        with self._lock:
            if pool_id not in self._nodes or self._geometry is None or self._closed:
                raise TransferError(
                    f"store {pool_id} cannot be reached: no shard of the KV pool is called so, and no buffer that is "
                    "attached here (its node or its prefill instance may have gone)",
                    store_id=pool_id,
                )
            shard = self._shards.get(pool_id)
            if shard is None:
                shard = self._shards[pool_id] = self._open(pool_id, self._geometry)
                self._follow_soon()
            channel = shard.channels.get(destination.store_id)
            if channel is None:
                channel = wrapped(PairedChannel(shard.store, destination, shard.client))
                shard.channels[destination.store_id] = channel
            return channel

    @property
    def channels(self) -> list[Channel]:
        """All that were asked for, of shards that there are."""
        with self._lock:
            return [channel for shard in self._shards.values() for channel in shard.channels.values()]

    async def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            self._nodes = {}
        await self._follow()
        await asyncio.gather(*self._tasks)

    def _compare_memory(self) -> None:
        """What was opened to a shard that has been made anew is not to read its successor."""
        pools = [peer for peer in self._view.peers if peer.process.role == "kv_pool"]
        memory = {peer.process.id: peer.stores[0].memory for peer in pools if peer.state == "ready" and peer.stores}
        with self._lock:
            anew = [pool_id for pool_id, now in memory.items() if self._memory.get(pool_id, now) != now]
            self._anew += [self._shards.pop(pool_id) for pool_id in anew if pool_id in self._shards]
            self._memory |= memory
        if anew:
            logger.warning("made anew: %s; copies that were asked of the old memory fail", ", ".join(anew))

    def _open(self, pool_id: str, geometry: KvGeometry) -> _Shard:
        settings, node_id = self._settings, self._nodes[pool_id]
        wiring = Wiring.between_workers(GLOO, ASKING_RANK, settings.host, settings.device, self._timeout_s)
        # Longer than a pair's: a shard outlives its process, whose successor has the same, while a buffer does not.
        client = PairClient(self._process, wiring, geometry, pool_id, away_s=self._timeout_s, read_only=True)
        whole = StoreSlice.whole(geometry)
        handle = StoreHandle(pool_id, HOST, geometry, whole, self._capacity_blocks, node_id)
        logger.info("%s of node %s is read over %s", pool_id, node_id, GLOO)
        return _Shard(RemoteBlockStore(handle, client.checksums), client)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self) -> None:
        async with self._following:
            with self._lock:
                gone = [self._shards.pop(pool_id) for pool_id in list(self._shards) if pool_id not in self._nodes]
                gone, self._anew = gone + self._anew, []
                shards = dict(self._shards)
            for shard in gone:
                shard.client.shut()
                self._spawn(self._end(shard))  # a silent peer may hold its threads for a while: the view goes on
            serving = {peer.process.id: peer for peer in self._view.peers if peer.state == "ready"}
            for pool_id, shard in shards.items():
                peer = serving.get(pool_id)
                if peer is not None and peer.process != shard.serving:
                    await self._unlink(shard)
                    shard.serving = peer.process
                    shard.rpc = open_channel(peer.address, self._settings.token)
                    shard.link = PairedLink(shard.client, shard.rpc)

    async def _unlink(self, shard: _Shard) -> None:
        if shard.link is not None:
            await shard.link.close()
            shard.link = None
        if shard.rpc is not None:
            await shard.rpc.close()
            shard.rpc = None

    async def _end(self, shard: _Shard) -> None:
        await asyncio.to_thread(shard.client.close)
        await self._unlink(shard)
        for channel in shard.channels.values():
            await asyncio.to_thread(channel.close)


class PoolReader:
    """Channels from the pool's shards to one store of this process. Any thread may use it."""

    def __init__(self, own: Channel, others: RemoteShards) -> None:
        """`own`: from the shard of this node."""
        self._own, self._others = own, others

    @property
    def own_id(self) -> str:
        return self._own.source.store_id

    def channel(self, pool_id: str) -> Channel:
        """Raises TransferError where there is no such shard (any more)."""
        return self._own if pool_id == self.own_id else self._others.channel(pool_id, self._own.destination)
