"""Block stores: arrays of equal KV blocks in one memory. Host stores are here, device stores in `transfer.device`."""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import xxhash

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.handles import HOST, StoreHandle, slice_block_bytes
from alignedserve.transfer.segment import Segment
from alignedserve.transfer.segments import SegmentClient

ALIGNMENT_BYTES = 4096
ByteArray = npt.NDArray[np.uint8]


class BlockStore(ABC):
    """`capacity_blocks` blocks of one geometry, or of a slice of it, numbered from 0, each contiguous.

    A store does not know which request holds a block; the allocator does. Layout of a block:
    `[layer][kv_head][k|v][token][head_dim]`, with the layers and heads of `slice` only.
    """

    @property
    @abstractmethod
    def store_id(self) -> str:
        """Name of the store in its cluster: "kv_pool-0", "prefill-0/batch"."""

    @property
    @abstractmethod
    def geometry(self) -> KvGeometry:
        """The geometry of the whole model, which must be the same for two stores of a channel."""

    @property
    @abstractmethod
    def slice(self) -> StoreSlice:
        """The layers and heads that this store holds."""

    @property
    @abstractmethod
    def capacity_blocks(self) -> int: ...

    @property
    @abstractmethod
    def device(self) -> str:
        """The place of the memory: "cpu", or a device such as "cuda:0"."""

    @abstractmethod
    def handle(self) -> StoreHandle:
        """The data that another process needs to attach this store."""

    @abstractmethod
    def read_block(self, block: int) -> memoryview:
        """One block's `block_bytes` bytes: a view for host memory, else a copy."""

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """xxh3, 64 bits, of each block's bytes. Raises TransferError if they cannot be computed."""
        return [xxhash.xxh3_64_intdigest(self.read_block(block)) for block in block_ids]

    @abstractmethod
    def close(self) -> None:
        """Release the memory here; idempotent. Live views and copies in flight keep it mapped."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this store, that is, of its slice."""
        return slice_block_bytes(self.geometry, self.slice)


class HandleBlockStore(BlockStore):
    """A store that is described by its handle."""

    def __init__(self, handle: StoreHandle) -> None:
        self._handle = handle

    @property
    def store_id(self) -> str:
        return self._handle.store_id

    @property
    def geometry(self) -> KvGeometry:
        return self._handle.geometry

    @property
    def slice(self) -> StoreSlice:
        return self._handle.slice

    @property
    def capacity_blocks(self) -> int:
        return self._handle.capacity_blocks

    @property
    def device(self) -> str:
        return self._handle.device

    def handle(self) -> StoreHandle:
        return self._handle


class HostBlockStore(HandleBlockStore):
    """A store in host memory: over a segment that other processes attach, or in memory of this process alone."""

    def __init__(self, handle: StoreHandle, memory: memoryview, segment: Segment | None = None) -> None:
        """`memory`: the bytes from block 0 on. Use `over`, `private`, `create` or `attach_store` instead.

        Raises TransferError if it is too small for the handle's blocks.
        """
        needed = handle.capacity_blocks * handle.block_bytes
        if handle.capacity_blocks <= 0 or memory.nbytes < needed:
            raise TransferError(
                f"store {handle.store_id}: {handle.capacity_blocks} blocks of {handle.block_bytes} bytes do not fit in "
                f"{memory.nbytes} bytes",
                store_id=handle.store_id,
            )
        super().__init__(handle)
        self._segment = segment
        self._memory = memory[:needed]
        self._blocks = np.frombuffer(self._memory, np.uint8).reshape(handle.capacity_blocks, handle.block_bytes)

    @classmethod
    def private(
        cls,
        store_id: str,
        geometry: KvGeometry,
        capacity_blocks: int,
        *,
        part: StoreSlice | None = None,
        node_id: str = "",
        descriptor: int = -1,
    ) -> HostBlockStore:
        """A store in anonymous, zeroed memory of this process, which no other can attach.

        `descriptor`: of an anonymous file (memfd) for its memory, which this process's children may map. It gets the
        store's size. Raises TransferError on failure.
        """
        whole = part or StoreSlice.whole(geometry)
        handle = StoreHandle(store_id, HOST, geometry, whole, capacity_blocks, node_id)
        try:
            size, flags = capacity_blocks * handle.block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            if descriptor >= 0:
                os.ftruncate(descriptor, size)
                flags = mmap.MAP_SHARED
            area = mmap.mmap(descriptor, size, flags=flags)
        except (OSError, ValueError) as error:
            raise TransferError(f"store {store_id}: no memory for {capacity_blocks} blocks: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without huge pages uses small ones
            area.madvise(mmap.MADV_HUGEPAGE)
        return cls(handle, memoryview(area))

    @classmethod
    def over(cls, segment: Segment, handle: StoreHandle) -> HostBlockStore:
        """A store over a mapped segment, which it owns and closes. Raises TransferError if the segment is too small."""
        try:
            if handle.offset_bytes % ALIGNMENT_BYTES:
                raise TransferError(f"store {handle.store_id}: offset {handle.offset_bytes} is not page-aligned")
            return cls(handle, segment.memory()[handle.offset_bytes :], segment)
        except TransferError:
            segment.close()
            raise

    @classmethod
    def create(
        cls,
        client: SegmentClient,
        store_id: str,
        geometry: KvGeometry,
        capacity_blocks: int,
        *,
        part: StoreSlice | None = None,
        node_id: str = "",
        front_bytes: int = 0,
    ) -> HostBlockStore:
        """A store in a new segment called `store_id` (or the one of a predecessor), with `front_bytes` before block 0.

        Raises the errors of `SegmentClient.create`: ResourceError if there is not enough memory, TransferError if the
        segment exists with another size.
        """
        handle = StoreHandle(
            store_id,
            HOST,
            geometry,
            part or StoreSlice.whole(geometry),
            capacity_blocks,
            node_id,
            client.socket_path,
            segment=store_id,
            offset_bytes=aligned(front_bytes),
        )
        segment = client.create(store_id, segment_bytes(handle))
        return cls.over(segment, replace(handle, memory=segment.identity))

    @property
    def segment(self) -> Segment | None:
        """The segment of the blocks; None for private memory."""
        return self._segment

    @property
    def blocks(self) -> ByteArray:
        """All blocks as bytes, uint8 `[capacity_blocks, block_bytes]`, writable, not a copy."""
        return self._blocks

    def front(self) -> memoryview:
        """The bytes before block 0 (the pool's allocation table), writable; empty for private memory."""
        return self._segment.memory()[: self._handle.offset_bytes] if self._segment else memoryview(b"")

    def as_memory(self) -> memoryview:
        """All blocks as one writable buffer of `capacity_blocks * block_bytes` bytes, for `torch.frombuffer`."""
        return self._memory

    def read_block(self, block: int) -> memoryview:
        view: ByteArray = self._blocks[block]
        return view.data

    def close(self) -> None:
        self._blocks = np.empty((0, self.block_bytes), np.uint8)
        self._memory = memoryview(b"")
        if self._segment is not None:
            self._segment.close()


def attach_store(handle: StoreHandle, client: SegmentClient, *, geometry: KvGeometry) -> HostBlockStore:
    """Map another process's host store. `geometry`: that of this process.

    Raises GeometryMismatchError, naming both, TransferError if the store cannot be attached from here, and the errors
    of `SegmentClient.attach`.
    """
    geometry.require_same(handle.geometry)
    if handle.kind != HOST or not handle.segment:
        raise TransferError(
            f"store {handle.store_id} ({handle.kind}, {handle.device}) is not in shared host memory: it has no segment",
            store_id=handle.store_id,
        )
    segment = client.attach(handle.segment)
    if handle.memory and segment.identity != handle.memory:
        segment.close()
        raise TransferError(f"store {handle.store_id}: its segment was recreated meanwhile", store_id=handle.store_id)
    return HostBlockStore.over(segment, handle)


def aligned(count: int) -> int:
    """`count` bytes, rounded up to whole pages."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def segment_bytes(handle: StoreHandle) -> int:
    """Size of the segment of the store: the bytes before block 0, and the blocks."""
    return handle.offset_bytes + handle.capacity_blocks * handle.block_bytes
