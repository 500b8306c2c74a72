"""Reads the pool's shards on other nodes. Their processes take part in each copy, over Gloo or NIXL (ADR 39, 83)."""

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
from alignedserve.transfer.links import connect
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.transport import ASKING_RANK, Wiring
from alignedserve.transfer.topology import GLOO

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Shard:
    """A shard that was read, and the stream to its current process."""

    store: RemoteBlockStore
    client: PairClient
    channels: dict[str, Channel] = field(default_factory=dict)  # by destination
    serving: pb.ProcessKey | None = None
    rpc: TokenChannel | None = None
    link: PairedLink | None = None


class RemoteShards:
    """Keeps one stream to each shard that was read, for as long as the cluster's view names the shard.

    A shard's memory outlives its process. When the process ends, copies wait for a stream to the successor, but no
    longer than `copy_timeout_s` seconds. If the successor has other memory, copies that were asked for before fail.

    Any thread may call `channel`; the rest is used from the event loop.
    """

    def __init__(
        self, settings: RoleSettings, process: pb.ProcessKey, copy_timeout_s: float, channel: str = GLOO
    ) -> None:
        """`channel`: as the shards serve (`shard_channel`)."""
        self._settings, self._process, self._timeout_s, self._channel = settings, process, copy_timeout_s, channel
        self._geometry: KvGeometry | None = None
        self._capacity_blocks = 0
        self._view = sv.ClusterView()
        self._nodes: dict[str, str] = {}  # of the shards on other nodes
        self._memory: dict[str, str] = {}  # of each shard, as last seen
        self._shards: dict[str, _Shard] = {}
        self._anew: list[_Shard] = []  # their memory was replaced; they are still to be closed
        self._lock = threading.Lock()
        self._following = asyncio.Lock()
        self._follow_soon = from_any_thread(lambda: self._spawn(self._follow()))
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def set_shape(self, geometry: KvGeometry, capacity_blocks: int) -> None:
        """Set the geometry and capacity of every shard. Call it before the first `channel`."""
        self._geometry, self._capacity_blocks = geometry, capacity_blocks

    async def on_view(self, view: sv.ClusterView) -> None:
        """Follow the shards' processes. Reads of a shard that `view` no longer names fail."""
        self._view = view
        if view.pools:  # else the view does not describe the shards
            elsewhere = [shard for shard in view.pools if shard.node_id != self._settings.node_id]
            with self._lock:
                self._nodes = {shard.pool_id: shard.node_id for shard in elsewhere}
        self._compare_memory()
        await self._follow()

    def channel(self, pool_id: str, destination: BlockStore) -> Channel:
        """The channel from shard `pool_id` to a store of this process, the same in each call. Never blocks.

        Raises TransferError if the cluster has no such shard on another node.
        """
        with self._lock:
            if pool_id not in self._nodes or self._geometry is None or self._closed:
                raise TransferError(
                    f"store {pool_id} cannot be reached: it is neither a shard of the KV pool nor a buffer that is "
                    "attached here (its node or its prefill instance may be lost)",
                    store_id=pool_id,
                )
            shard = self._shards.get(pool_id)
            if shard is None:
                shard = self._shards[pool_id] = self._open(pool_id, self._geometry)
                self._follow_soon()
            channel = shard.channels.get(destination.store_id)
            if channel is None:
                channel = shard.channels[destination.store_id] = connect(shard.store, destination)
            return channel

    @property
    def channels(self) -> list[Channel]:
        """All open channels, of shards that the view names."""
        with self._lock:
            return [channel for shard in self._shards.values() for channel in shard.channels.values()]

    async def close(self) -> None:
        """Close all streams and channels. Idempotent."""
        with self._lock:
            self._closed = True
            self._nodes = {}
        await self._follow()
        await asyncio.gather(*self._tasks)

    def _compare_memory(self) -> None:
        """Detect shards with new memory. Their streams must not be used to read the new memory."""
        pools = [peer for peer in self._view.peers if peer.process.role == "kv_pool"]
        memory = {peer.process.id: peer.stores[0].memory for peer in pools if peer.state == "ready" and peer.stores}
        with self._lock:
            anew = [pool_id for pool_id, now in memory.items() if self._memory.get(pool_id, now) != now]
            self._anew += [self._shards.pop(pool_id) for pool_id in anew if pool_id in self._shards]
            self._memory |= memory
        if anew:
            logger.warning("shards with new memory: %s; copies from the old memory fail", ", ".join(anew))

    def _open(self, pool_id: str, geometry: KvGeometry) -> _Shard:
        settings, node_id = self._settings, self._nodes[pool_id]
        wiring = Wiring.between_workers(self._channel, ASKING_RANK, settings.host, settings.devices[0], self._timeout_s)
        # Longer than for a pair: a shard outlives its process, but a candidate buffer does not.
        client = PairClient(self._process, wiring, geometry, pool_id, away_s=self._timeout_s, read_only=True)
        whole = StoreSlice.whole(geometry)
        handle = StoreHandle(pool_id, HOST, geometry, whole, self._capacity_blocks, node_id)
        logger.info("%s of node %s is read over %s", pool_id, node_id, self._channel)
        return _Shard(RemoteBlockStore(handle, client), client)

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
                self._spawn(self._end(shard))  # not awaited: a silent peer may block the client's threads for a while
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
    """Channels from the shards to one store of this process. Any thread may use it."""

    def __init__(self, own: Channel, others: RemoteShards) -> None:
        """`own`: the channel from the shard of this node."""
        self._own, self._others = own, others

    @property
    def own_id(self) -> str:
        return self._own.source.store_id

    def channel(self, pool_id: str) -> Channel:
        """The channel from shard `pool_id`. Raises TransferError if there is no such shard (any more)."""
        return self._own if pool_id == self.own_id else self._others.channel(pool_id, self._own.destination)
