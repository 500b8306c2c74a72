"""Block stores on a device, and the channel that copies to, from and between them. Imports torch: workers only.

With tensors on "cpu" everything here works too, without streams: that is how it is tested where there is no GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.channel import MAX_PENDING_COPIES, Copy, QueuedChannel, cancelled
from alignedserve.transfer.cuda_ipc import export_memory, open_memory
from alignedserve.transfer.handles import CUDA, HOST, StoreHandle
from alignedserve.transfer.pinning import Pinning
from alignedserve.transfer.runs import Cut, Run, common_part, merge_runs, paired_cuts

logger = logging.getLogger(__name__)
_cuda: Any = torch.cuda  # most of it has no types


class DeviceBlockStore(BlockStore):
    """A store in a tensor: an instance's cache, or a candidate buffer in spare HBM."""

    def __init__(
        self,
        store_id: str,
        geometry: KvGeometry,
        tensor: torch.Tensor,
        *,
        part: StoreSlice | None = None,
        node_id: str = "",
        shared: bool = False,
    ) -> None:
        """`tensor`: contiguous, blocks along its first dimension, of any shape and dtype beyond that.

        `shared`: on a GPU, the handle lets other processes of the node open the memory, by `attach_device_store`.
        Raises TransferError where its bytes are not whole blocks of `part` (by default all) of the geometry.
        """
        if not tensor.is_contiguous() or tensor.dim() < 2:
            raise TransferError(f"store {store_id}: a store needs a contiguous tensor with blocks first")
        self._store_id, self._geometry, self._node_id = store_id, geometry, node_id
        self._slice = part or StoreSlice.whole(geometry)
        block_bytes = tensor[0].numel() * tensor.element_size()
        if block_bytes != self.block_bytes:
            raise TransferError(
                f"store {store_id}: blocks of {block_bytes} bytes in the tensor, {self.block_bytes} in the geometry "
                f"({geometry.describe()})"
            )
        self._blocks: torch.Tensor | None = tensor.detach().view(torch.uint8).view(tensor.shape[0], block_bytes)
        self._capacity = tensor.shape[0]
        self._device = tensor.device
        self._ipc_handle = export_memory(self._blocks) if shared and tensor.is_cuda else b""

    @property
    def store_id(self) -> str:
        return self._store_id

    @property
    def geometry(self) -> KvGeometry:
        return self._geometry

    @property
    def slice(self) -> StoreSlice:
        return self._slice

    @property
    def capacity_blocks(self) -> int:
        return self._capacity

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def blocks(self) -> torch.Tensor:
        """Every block as bytes, uint8 `[capacity_blocks, block_bytes]`, on the device, not a copy."""
        if self._blocks is None:
            raise TransferError(f"store {self._store_id} is closed")
        return self._blocks

    def handle(self) -> StoreHandle:
        return StoreHandle(
            self._store_id,
            CUDA if self._device.type == "cuda" else HOST,
            self._geometry,
            self._slice,
            self._capacity,
            self._node_id,
            device=self.device,
            device_handle=self._ipc_handle,
        )

    def read_block(self, block: int) -> memoryview:
        return self.blocks[block].cpu().numpy().data

    def close(self) -> None:  # the memory goes with the last tensor over it; a copy under way keeps its own
        self._blocks = None


class DeviceChannel(QueuedChannel):
    """Asynchronous copies on a stream of their own, between a device and the host, or between two devices.

    A copy begins after the work that the asking thread has given its current streams of both devices by then: what is
    to be copied has been computed, and what is overwritten has been read. It is over when its event is.
    """

    def __init__(
        self,
        source: BlockStore,
        destination: BlockStore,
        name: str,
        *,
        allow_pageable: bool = False,
        max_pending: int = MAX_PENDING_COPIES,
    ) -> None:
        """Locks the host's side in memory (see `transfer.pinning`), for whole seconds where it is large.

        Raises TransferError where that fails, unless `allow_pageable`: then the copies are slow, and a warning says so.
        """
        self._name = name
        self._tensors = _tensor(source), _tensor(destination)
        self._devices = [tensor.device for tensor in self._tensors if tensor.is_cuda]
        self._stream: Any = _cuda.Stream(self._devices[0]) if self._devices else None
        self._views: dict[StoreSlice, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pins: list[int] = []
        self._piece_blocks: tuple[int | None, int | None] = (None, None)
        common_part(source, destination)  # refuses before anything is pinned
        if self._devices:
            self._pin(source, destination, allow_pageable)
        super().__init__(source, destination, in_flight=2, max_pending=max_pending)

    @property
    def name(self) -> str:
        return self._name

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        if not self.pending:  # else the copy that hangs may still use it
            while self._pins:
                _pinning().unpin(self._pins.pop())

    def _pin(self, source: BlockStore, destination: BlockStore, allow_pageable: bool) -> None:
        pieces: list[int | None] = []
        for store in (source, destination):
            pieces.append(None)
            if isinstance(store, HostBlockStore):
                try:
                    self._pins.append(_pinning().pin(store))
                    pieces[-1] = _pinning().piece_blocks(store)
                except TransferError as error:
                    if not allow_pageable:
                        raise
                    logger.warning("copies of %s will be slow, as was allowed: %s", store.store_id, error)
        self._piece_blocks = (pieces[0], pieces[1])

    def _ready(self) -> list[torch.cuda.Event]:
        events = []
        for device in self._devices:
            with torch.cuda.device(device):
                event = _cuda.Event()
                event.record(torch.cuda.current_stream(device))
                events.append(event)
        return events

    def _begin(self, copy: Copy) -> torch.cuda.Event | None:
        runs = merge_runs(copy.source_ids, copy.destination_ids)
        if self._stream is None:
            self._issue(copy, runs)
            return None
        with torch.cuda.stream(self._stream):
            try:
                for event in copy.ready:
                    self._stream.wait_event(event)
                self._issue(copy, runs)
            except BaseException:
                self._stream.synchronize()  # what was issued must be over before the completion says so
                raise
            over: torch.cuda.Event = _cuda.Event(blocking=True)
            over.record(self._stream)
            return over

    def _end(self, copy: Copy, begun: torch.cuda.Event | None) -> None:
        if begun is not None:
            begun.synchronize()

    def _issue(self, copy: Copy, runs: list[Run]) -> None:
        source, destination = self._cut_views(copy.part)
        for run in runs:
            for piece in _within_pieces(run, *self._piece_blocks):
                if copy.completion.cancelled:
                    raise cancelled(copy)
                target = destination[piece.destination : piece.destination + piece.count]
                target.copy_(source[piece.source : piece.source + piece.count], non_blocking=True)

    def _cut_views(self, part: StoreSlice) -> tuple[torch.Tensor, torch.Tensor]:
        if part not in self._views:
            cuts = paired_cuts(self.source, self.destination, part)
            self._views[part] = _view(self._tensors[0], cuts[0]), _view(self._tensors[1], cuts[1])
        return self._views[part]


def attach_device_store(handle: StoreHandle, *, geometry: KvGeometry) -> DeviceBlockStore:
    """Open another process's device store by CUDA IPC. Needs a GPU, the same one or one that reaches it.

    Raises GeometryMismatchError, naming both; TransferError where it cannot be opened.
    """
    geometry.require_same(handle.geometry)
    if handle.kind != CUDA or not handle.device_handle:
        raise TransferError(f"store {handle.store_id} ({handle.kind}, {handle.device}) is not shared device memory")
    tensor = open_memory(handle.device_handle).view(handle.capacity_blocks, handle.block_bytes)
    return DeviceBlockStore(handle.store_id, handle.geometry, tensor, part=handle.slice, node_id=handle.node_id)


def peer_access(source: str, destination: str) -> bool:
    """Whether the first device can reach the second's memory without the host (NVLink, or PCIe peer to peer)."""
    return bool(torch.cuda.can_device_access_peer(torch.device(source), torch.device(destination)))


def reached_devices(device: str) -> list[str]:
    """The devices of this node whose memory `device` reads directly, itself among them; none of a CPU."""
    if device == "cpu":
        return []
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [other for other in devices if other == device or peer_access(device, other)]


def _tensor(store: BlockStore) -> torch.Tensor:
    """The store's blocks, uint8 `[capacity_blocks, block_bytes]`, where they are."""
    if isinstance(store, DeviceBlockStore):
        return store.blocks
    if isinstance(store, HostBlockStore):
        return torch.frombuffer(store.as_memory(), dtype=torch.uint8).view(store.capacity_blocks, store.block_bytes)
    raise TransferError(f"store {store.store_id} is of a kind that no device channel knows")


def _view(blocks: torch.Tensor, cut: Cut) -> torch.Tensor:
    """`[capacity, width]`, or `[capacity, rows, width]` where the rows of the cut lie apart."""
    begin = blocks.storage_offset() + cut.begin_bytes
    if cut.rows == 1:
        return blocks.as_strided((blocks.shape[0], cut.width_bytes), (blocks.stride(0), 1), begin)
    shape = (blocks.shape[0], cut.rows, cut.width_bytes)
    return blocks.as_strided(shape, (blocks.stride(0), cut.stride_bytes, 1), begin)


def _within_pieces(run: Run, source_piece: int | None, destination_piece: int | None) -> Iterator[Run]:
    """`run`, cut where either side goes from one registered piece of host memory to the next."""
    done = 0
    while done < run.count:
        count = run.count - done
        for begin, piece in ((run.source, source_piece), (run.destination, destination_piece)):
            if piece is not None:
                count = min(count, piece - (begin + done) % piece)
        yield Run(run.source + done, run.destination + done, count)
        done += count


@functools.cache
def _pinning() -> Pinning:
    """Of this process; made when a GPU is first used."""
    runtime: Any = _cuda.cudart()
    return Pinning(
        lambda address, count: int(runtime.cudaHostRegister(address, count, 0)),
        lambda address: int(runtime.cudaHostUnregister(address)),
    )
