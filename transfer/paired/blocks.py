"""Gathers a part of scattered blocks into contiguous bytes, and scatters it from them: layer by layer of each block."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from alignedserve.errors import TransferError
from alignedserve.geometry import StoreSlice
from alignedserve.transfer.block_store import BlockStore, ByteArray, HostBlockStore
from alignedserve.transfer.device import DeviceBlockStore, on_stream
from alignedserve.transfer.handles import slice_block_bytes
from alignedserve.transfer.host_channel import cut_view
from alignedserve.transfer.runs import IdArray, part_cut

_cuda: Any = torch.cuda  # most of it is untyped
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class PackedBlocks(ABC):
    """The blocks of one store. Used by one thread at a time. Keeps the store's memory even if the store is closed."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.busy = False
        """Whether the copy that uses it waits for this process's memory and devices, not for the other process."""

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """`busy` within."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def width_bytes(self, part: StoreSlice) -> int:
        """Bytes of `part` of one block."""
        return slice_block_bytes(self.store.geometry, part)

    @property
    @abstractmethod
    def on_gpu(self) -> bool: ...

    @abstractmethod
    def now(self) -> Any:
        """A mark of the device work submitted by the calling thread, for `Portion.ready`."""

    @abstractmethod
    def read(self, part: StoreSlice, ids: IdArray, packed: torch.Tensor, ready: Any) -> None:
        """Gather into `packed`, uint8 `[len(ids) * width_bytes]`, in host memory or where the blocks are.

        Returns when it is complete.
        """

    @abstractmethod
    def write(self, part: StoreSlice, ids: IdArray, packed: torch.Tensor, ready: Any) -> None:
        """Scatter from `packed`, as in `read`. Returns when it is complete."""


def packed_blocks(store: BlockStore) -> PackedBlocks:
    """Raises TransferError for a store whose memory is not in this process."""
    if isinstance(store, HostBlockStore):
        return HostBlocks(store)
    if isinstance(store, DeviceBlockStore):
        return DeviceBlocks(store)
    raise TransferError(f"store {store.store_id} has no memory in this process")


class HostBlocks(PackedBlocks):
    """Blocks in host memory."""

    def __init__(self, store: HostBlockStore) -> None:
        super().__init__(store)
        self._blocks = store.blocks
        self._views: dict[StoreSlice, ByteArray] = {}

    @property
    def on_gpu(self) -> bool:
        return False

    def now(self) -> None:
        return None

    def read(self, part: StoreSlice, ids: IdArray, packed: torch.Tensor, ready: Any) -> None:
        view = self._view(part)
        out = packed.numpy().reshape(ids.size, *view.shape[1:])
        if view.flags.c_contiguous:
            np.take(view, ids, axis=0, out=out, mode="clip")  # "raise" would gather into a second buffer first
        else:
            out[...] = view[ids]

    def write(self, part: StoreSlice, ids: IdArray, packed: torch.Tensor, ready: Any) -> None:
        view = self._view(part)
        view[ids] = packed.numpy().reshape(ids.size, *view.shape[1:])

    def _view(self, part: StoreSlice) -> ByteArray:
        if part not in self._views:
            self._views[part] = cut_view(self._blocks, part_cut(self.store, part))
        return self._views[part]


class DeviceBlocks(PackedBlocks):
    """Blocks in a tensor. On a GPU `read` and `write` use a staging buffer on it, on their own stream.

    With a tensor on "cpu" everything works too, without streams, for tests without a GPU.
    """

    def __init__(self, store: DeviceBlockStore) -> None:
        super().__init__(store)
        self._blocks = store.blocks
        self._views: dict[StoreSlice, torch.Tensor] = {}
        self._computing = store.computing
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._blocks.device)
        self._stream: Any = _cuda.Stream(self._blocks.device) if self.on_gpu else None

    @property
    def on_gpu(self) -> bool:
        return self._blocks.is_cuda

    @property
    def device(self) -> torch.device:
        return self._blocks.device

    def now(self) -> torch.cuda.Event | None:
        if not self.on_gpu:
            return None
        with torch.cuda.device(self._computing):
            event: torch.cuda.Event = _cuda.Event()
            event.record(torch.cuda.current_stream(self._computing))
        return event

    def read(self, part: StoreSlice, ids: IdArray, packed: torch.Tensor, ready: Any) -> None:
        if self._stream is None:
            self.gather(part, self.upload(ids), packed)
            return
        with on_stream(self._stream):
            self._after(ready)
            staging = packed if packed.is_cuda else self._staged(packed.numel())
            self.gather(part, self.upload(ids), staging)
            if staging is not packed:
                packed.copy_(staging, non_blocking=True)
            self._settle()

    def write(self, part: StoreSlice, ids: IdArray, packed: torch.Tensor, ready: Any) -> None:
        if self._stream is None:
            self.scatter(part, self.upload(ids), packed)
            return
        with on_stream(self._stream):
            self._after(ready)
            staging = packed if packed.is_cuda else self._staged(packed.numel())
            if staging is not packed:
                staging.copy_(packed, non_blocking=True)
            self.scatter(part, self.upload(ids), staging)
            self._settle()

    def upload(self, ids: IdArray) -> torch.Tensor:
        """`ids` on the blocks' device, int64; from page-locked memory, in the current stream."""
        tensor = torch.from_numpy(np.ascontiguousarray(ids))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else tensor

    def gather(self, part: StoreSlice, ids: torch.Tensor, packed: torch.Tensor) -> None:
        """Gather into `packed`, uint8 on the blocks' device: one kernel, in the current stream."""
        view = self._view(part)
        torch.index_select(view, 0, ids, out=self._like(view, ids, packed))

    def scatter(self, part: StoreSlice, ids: torch.Tensor, packed: torch.Tensor) -> None:
        """Scatter from `packed`, uint8 on the blocks' device: one kernel, in the current stream."""
        view = self._view(part)
        view.index_copy_(0, ids, self._like(view, ids, packed))

    @staticmethod
    def _like(view: torch.Tensor, ids: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return packed.view(view.dtype).view(ids.numel(), *view.shape[1:])

    def _view(self, part: StoreSlice) -> torch.Tensor:
        """`[capacity, width]`, or `[capacity, rows, width]` if rows are apart, in the widest words that fit."""
        if part not in self._views:
            cut, blocks = part_cut(self.store, part), self._blocks
            sizes = (blocks.stride(0), blocks.data_ptr(), cut.begin_bytes, cut.stride_bytes, cut.width_bytes)
            size, dtype = next((size, dtype) for size, dtype in _WORDS if not any(n % size for n in sizes))
            words = blocks.view(dtype)
            begin, width = cut.begin_bytes // size, cut.width_bytes // size
            if cut.rows == 1:
                self._views[part] = words[:, begin : begin + width]
            else:
                shape = (words.shape[0], cut.rows, width)
                strides = (words.stride(0), cut.stride_bytes // size, 1)
                self._views[part] = words.as_strided(shape, strides, words.storage_offset() + begin)
        return self._views[part]

    def _staged(self, count: int) -> torch.Tensor:
        if self._staging.numel() < count:
            self._staging = torch.empty(count, dtype=torch.uint8, device=self.device)
        return self._staging[:count]

    def _after(self, ready: Any) -> None:
        if ready is not None:
            self._stream.wait_event(ready)

    def _settle(self) -> None:
        over = _cuda.Event(blocking=True)
        over.record(self._stream)
        over.synchronize()
