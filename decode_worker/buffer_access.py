"""Access to the candidate buffers of a paired prefill instance: attached memory, or copies that it takes part in."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from alignedserve.config import Config
from alignedserve.control.rpc import TokenChannel
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import ResourceError
from alignedserve.kv_pool.paired_link import PairedLink
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer.block_store import BlockStore, attach_store
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.device import attach_device_store
from alignedserve.transfer.handles import CUDA, StoreHandle
from alignedserve.transfer.links import ask_driver, connect, place_of
from alignedserve.transfer.pair_choice import PAIRED, choose_pair_channel, require_packages
from alignedserve.transfer.paired.client import PairClient
from alignedserve.transfer.paired.nccl import no_nccl_here
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.transport import ASKING_RANK, Wiring
from alignedserve.transfer.parted import opened
from alignedserve.transfer.segments import SegmentClient
from alignedserve.transfer.topology import GLOO, Place

logger = logging.getLogger(__name__)


_NO_PARTS = "parts on the GPUs of several ranks are reached over CUDA IPC on their own node, else over Gloo, so far"


class BufferAccess(ABC):
    """Opens the buffers' stores, and connects them with the cache."""

    @abstractmethod
    def open(self, handle: StoreHandle) -> BlockStore:
        """Open a store; this blocks.

        Raises GeometryMismatchError, which names both geometries, and TransferError if it cannot be opened (yet).
        """

    @abstractmethod
    def connect(self, source: BlockStore, destination: BlockStore) -> Channel: ...

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether no ended copy of this process can still write to blocks of the buffers."""

    @abstractmethod
    async def close(self) -> None:
        """End the copies under way. The caller closes its channels and stores itself. Idempotent."""


class AttachedBuffers(BufferAccess):
    """Shared memory, or device memory by CUDA IPC. This process copies without the prefill instance."""

    def __init__(
        self, cache: BlockStore, segments: SegmentClient, connect: Callable[[BlockStore, BlockStore], Channel]
    ) -> None:
        self._cache, self._segments, self._connect = cache, segments, connect

    def open(self, handle: StoreHandle) -> BlockStore:
        return opened(handle, self._attach)

    def _attach(self, handle: StoreHandle) -> BlockStore:
        if handle.kind == CUDA:
            return attach_device_store(handle, geometry=self._cache.geometry)
        return attach_store(handle, self._segments, geometry=self._cache.geometry)

    def connect(self, source: BlockStore, destination: BlockStore) -> Channel:
        return self._connect(source, destination)

    @property
    def settled(self) -> bool:
        return True

    async def close(self) -> None:
        """Nothing to do: only the stores are open."""


class PairedBuffers(BufferAccess):
    """NCCL, Gloo or NIXL. The prefill instance takes part in each copy, which is requested over a separate stream."""

    def __init__(self, client: PairClient, cache: BlockStore, channel: TokenChannel) -> None:
        """Begin to connect. Must be called in the event loop."""
        self._client, self._cache = client, cache
        self._link = PairedLink(client, channel)

    def open(self, handle: StoreHandle) -> BlockStore:
        self._cache.geometry.require_same(handle.geometry)
        return opened(handle, lambda part: RemoteBlockStore(part, self._client))

    def connect(self, source: BlockStore, destination: BlockStore) -> Channel:
        return connect(source, destination)

    @property
    def settled(self) -> bool:
        return self._client.settled

    async def close(self) -> None:
        await self._link.close()
        await asyncio.to_thread(self._client.close)


class BufferReach:
    """Chooses how to access the buffers of each prefill instance: by `cluster.channel`, or by their place."""

    def __init__(
        self,
        settings: RoleSettings,
        config: Config,
        process: pb.ProcessKey,
        segments: SegmentClient,
        connect: Callable[[BlockStore, BlockStore], Channel],
    ) -> None:
        self._settings, self._config, self._process = settings, config, process
        self._segments, self._connect = segments, connect
        self._no_nccl = ""

    def check(self) -> None:
        """Called before anything is loaded. Raises ResourceError if the configured channel lacks a requirement."""
        cluster = self._config.cluster
        self._no_nccl = no_nccl_here(cluster.channel, self._settings.devices[0])
        require_packages(cluster.channel, self._no_nccl, allow_slow=cluster.allow_slow_channel)

    def access(
        self, prefill_id: str, cache: BlockStore, buffer: StoreHandle, no_nccl: str, channel: TokenChannel
    ) -> BufferAccess:
        """The access to `buffer`. Raises ResourceError if no channel can be used.

        `no_nccl`: why the prefill instance cannot use NCCL; empty if it can.
        """
        settings, cluster, timeout_s = self._settings, self._config.cluster, self._config.kv_pool.copy_timeout_s
        mine = cache.handle()
        parted = bool(buffer.parts) or (bool(mine.parts) and mine.kind == CUDA)
        choices = [
            choose_pair_channel(
                cluster.channel,
                (settings.id, ours),
                (prefill_id, theirs),
                ask_driver,
                no_nccl=_NO_PARTS if parted else self._no_nccl or no_nccl,
                allow_slow=cluster.allow_slow_channel,
            )
            for ours, theirs in _places(mine, buffer)
        ]
        choice = next((one for one in choices if one.name in PAIRED), choices[0])
        if choice.name in PAIRED and parted and choice.name != GLOO:
            raise ResourceError(f"the buffers of {prefill_id} cannot be reached over {choice.name}: {_NO_PARTS}")
        level = logging.WARNING if choice.slow else logging.INFO
        logger.log(level, "buffers of %s: channel %s, %s", prefill_id, choice.name, choice.reason)
        if choice.name not in PAIRED:
            return AttachedBuffers(cache, self._segments, self._connect)
        wiring = Wiring.between_workers(choice.name, ASKING_RANK, settings.host, settings.devices[0], timeout_s)
        client = PairClient(self._process, wiring, cache.geometry, prefill_id, away_s=timeout_s / 3)
        return PairedBuffers(client, cache, channel)


def _places(cache: StoreHandle, buffer: StoreHandle) -> list[tuple[Place, Place]]:
    """Of all parts of the two that have something in common. The cache's parts on other nodes have their own links."""
    return list(
        dict.fromkeys(
            (place_of(one), place_of(other))
            for one in cache.parts or (cache,)
            for other in buffer.parts or (buffer,)
            if one.node_id == cache.node_id and one.slice.intersect(other.slice) is not None
        )
    )
