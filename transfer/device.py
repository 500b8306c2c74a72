"""Block stores on a device, and the channel that copies to, from and between them. Imports torch: workers only.

With tensors on "cpu" everything works too, without streams, for tests without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from alignedserve.errors import TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.transfer.batched import MAX_BATCH, batched_copies
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.bounce import Bounce
from alignedserve.transfer.channel import MAX_PENDING_COPIES, Copy, PageLocked, QueuedChannel, cancelled
from alignedserve.transfer.cuda_ipc import export_memory, open_memory
from alignedserve.transfer.first_touch import FirstTouch
from alignedserve.transfer.handles import CUDA, HOST, StoreHandle
from alignedserve.transfer.parted import PartedStore
from alignedserve.transfer.pieces import Pieces, pieces_of
from alignedserve.transfer.pinning import PinnedStore, Pinning
from alignedserve.transfer.ranged import RangedStore
from alignedserve.transfer.runs import Cut, common_part, paired_cuts
from alignedserve.transfer.topology import CUDA_IPC

logger = logging.getLogger(__name__)
_cuda: Any = torch.cuda  # most of it is untyped
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process
STAGED_BYTES = 16 << 20  # at once, on each of two GPUs
_pinnings: list[Pinning] = []  # at most one: memory cannot be registered twice


class DeviceBlockStore(BlockStore):
    """A store in a tensor: an instance's cache, or a candidate buffer in device memory."""

    def __init__(
        self,
        store_id: str,
        geometry: KvGeometry,
        tensor: torch.Tensor,
        *,
        part: StoreSlice | None = None,
        node_id: str = "",
        shared: bool = False,
        computing: str = "",
    ) -> None:
        """`tensor`: contiguous, blocks along its first dimension, of any shape and dtype beyond that.

        `computing`: the device whose work of this process the blocks' contents wait for, by default its own; of a part
        that another rank computes, that of rank 0. `shared`: on a GPU, the handle lets other processes of the node open
        the memory, by `attach_device_store`.
        Raises TransferError if its bytes are not whole blocks of `part` (by default all) of the geometry.
        """
        if not tensor.is_contiguous() or tensor.dim() < 2:
            raise TransferError(f"store {store_id}: the tensor must be contiguous, with blocks first")
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
        self.computing = torch.device(computing) if computing else tensor.device
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
        """All blocks as bytes, uint8 `[capacity_blocks, block_bytes]`, on the device, not a copy."""
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

    def close(self) -> None:  # the last tensor over it frees the memory; a copy in flight has its own
        self._blocks = None


class DeviceChannel(QueuedChannel):
    """Asynchronous copies on their own stream, between a device and the host, or between two devices.

    A copy begins after the work that the calling thread has submitted to its current streams of both devices by then:
    the source has been computed, and the destination has been read. It is complete when its event is.

    Many blocks are copied in few calls: within one device by one kernel (`transfer.block_kernel`), parts of them
    between two devices by `copy_staged`, else by the copy engines (`transfer.batched`). The host's side is page-locked
    in the background (`transfer.pinning`); memory that is not locked yet is copied through a small locked buffer
    (`transfer.bounce`).
    """

    def __init__(
        self,
        source: BlockStore,
        destination: BlockStore,
        name: str,
        *,
        allow_pageable: bool = False,
        computed: bool = True,
        max_pending: int = MAX_PENDING_COPIES,
    ) -> None:
        """`allow_pageable`: host memory that cannot be locked is not `trouble`.

        Copies stay slow, and a warning is logged. `computed` False: no computation of this process reads or writes
        either store, so that no copy waits for it. Returns at once: copies may be requested while the host's side is
        still being locked.
        """
        self._name, self._allow_pageable, self._computed = name, allow_pageable, computed
        self._stores = source, destination
        self._tensors = _tensor(source), _tensor(destination)
        self._flat = self._tensors[0].view(-1), self._tensors[1].view(-1)
        self._devices = [tensor.device for tensor in self._tensors if tensor.is_cuda]
        stores = [store for store in self._stores if isinstance(store, DeviceBlockStore)]
        self._computing = {store.computing for store in stores if store.computing.type == "cuda"}
        self._stream: Any = _cuda.Stream(self._devices[0]) if self._devices else None
        # torch has a copy between two GPUs wait for the current stream of the destination, and that one for the copy.
        apart = len(set(self._devices)) == 2
        self._landing: Any = _cuda.Stream(self._devices[1]) if apart else None
        self._cuts: dict[StoreSlice, tuple[Cut, Cut]] = {}
        common_part(source, destination)  # raises before anything is pinned
        self._pinned: list[PinnedStore | None] = [
            _pinning(self._devices[0]).pin(store) if self._devices and isinstance(store, HostBlockStore) else None
            for store in (source, destination)
        ]
        if self._stream is not None and not computed:  # still wait for work submitted by now, which created the stores
            for device in self._devices:
                self._stream.wait_stream(torch.cuda.current_stream(device))
        self._within_one = len(self._devices) == 2 and self._devices[0] == self._devices[1]
        if self._within_one:
            self._warm_up()
        super().__init__(source, destination, in_flight=2, max_pending=max_pending)

    @property
    def name(self) -> str:
        return self._name

    def page_locked(self) -> PageLocked | None:
        return next((pinned.progress for pinned in self._pinned if pinned is not None), None)

    def trouble(self) -> TransferError | None:
        if self._allow_pageable:
            return None
        return next((pinned.error for pinned in self._pinned if pinned is not None and pinned.error), None)

    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        if not self.pending:  # else a copy that hangs may still use it
            pinned, self._pinned = self._pinned, [None, None]
            for store in pinned:
                if store is not None:
                    _pinning(self._devices[0]).unpin(store)

    def _warm_up(self) -> None:
        """Compile the kernel for these stores' blocks before the first copy."""
        cuts = self._cuts_of(common_part(*self._stores))
        if (kernel := self._kernel(cuts)) is None:
            return
        first = np.zeros(1, dtype=np.int64)
        with on_stream(self._stream):
            kernel.copy_blocks(*(torch.empty_like(blocks[:1]) for blocks in self._tensors), (first, first), cuts)
        self._stream.synchronize()

    def _kernel(self, cuts: tuple[Cut, Cut]) -> Any:
        """The kernel that moves blocks within one device; None if there is none, or it cannot."""
        kernel = _block_kernel() if self._within_one else None
        sizes = self._tensors[0].shape[1], self._tensors[1].shape[1]
        return kernel if kernel is not None and kernel.serves(cuts, sizes) else None

    def _ready(self) -> list[torch.cuda.Event]:
        events = []
        for device in self._computing if self._computed else ():
            with torch.cuda.device(device):
                event = _cuda.Event()
                event.record(torch.cuda.current_stream(device))
                events.append(event)
        return events

    def _begin(self, copy: Copy) -> torch.cuda.Event | None:
        if self._stream is None:
            self._issue(copy)
            return None
        landing = contextlib.nullcontext() if self._landing is None else on_stream(self._landing)
        with landing, on_stream(self._stream):
            try:
                for event in copy.ready or ():
                    self._stream.wait_event(event)
                self._issue(copy)
            except BaseException:
                self._stream.synchronize()  # issued work must be complete before the completion ends
                raise
            over: torch.cuda.Event = _cuda.Event(blocking=True)
            over.record(self._stream)
            return over

    def _end(self, copy: Copy, begun: torch.cuda.Event | None) -> None:
        if begun is not None:
            begun.synchronize()

    def _issue(self, copy: Copy) -> None:
        cuts = self._cuts_of(copy.part)
        ids = copy.source_ids, copy.destination_ids
        sizes = self.source.block_bytes, self.destination.block_bytes
        if (kernel := self._kernel(cuts)) is not None:
            kernel.copy_blocks(*self._tensors, ids, cuts)
            return
        if len(set(self._devices)) == 2 and cuts[0].rows > 1:
            try:
                copy_staged(self._tensors, ids, cuts, lambda: _require_wanted(copy))
            finally:
                self._stream.wait_stream(self._landing)
            return
        limits = [None if pinned is None else pinned.piece_blocks for pinned in self._pinned]
        pieces = pieces_of(ids, cuts, sizes, (limits[0], limits[1]))
        for side, pinned in enumerate(self._pinned):
            if pinned is not None and (unlocked := self._unlocked(pieces, side, pinned)).any():
                _bounce().copy(*self._flat, pieces.where(unlocked), self._stream, lambda: _require_wanted(copy))
                pieces = pieces.where(~unlocked)
        for begin in range(0, pieces.sizes.size, MAX_BATCH):
            _require_wanted(copy)
            self._copy_pieces(copy, pieces.part(begin, begin + MAX_BATCH))

    @staticmethod
    def _unlocked(pieces: Pieces, side: int, pinned: PinnedStore) -> npt.NDArray[np.bool_]:
        begins = (pieces.sources, pieces.destinations)[side]
        return begins + pieces.sizes > pinned.locked_bytes

    def _copy_pieces(self, copy: Copy, pieces: Pieces) -> None:
        # Between two devices torch knows whether they have peer access, and lets the driver handle it.
        one_device = len(set(self._devices)) == 1
        if self._stream is not None and one_device and (batched := batched_copies()) is not None:
            addresses = [tensor.data_ptr() for tensor in self._tensors]
            stream = self._stream
            if batched.issue(pieces, addresses[0], addresses[1], stream.device_index, stream.cuda_stream):
                return
        source, destination = self._flat
        for begin, target, size in pieces.triples():
            _require_wanted(copy)
            destination[target : target + size].copy_(source[begin : begin + size], non_blocking=True)

    def _cuts_of(self, part: StoreSlice) -> tuple[Cut, Cut]:
        if part not in self._cuts:
            self._cuts[part] = paired_cuts(*self._stores, part)
        return self._cuts[part]


def copy_staged(
    blocks: tuple[torch.Tensor, torch.Tensor],
    ids: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    cuts: tuple[Cut, Cut],
    check: Callable[[], None],
) -> None:
    """Copy parts of blocks between two devices, each as (source, destination): gathered on the first, copied at once,
    and put in their places on the second, on the current stream of each.

    One by one they would be as many copies as blocks times layers: 10,000 for 2,000 tokens of a model with 80 layers.
    `check` is called before each portion of `STAGED_BYTES`.
    """
    sizes = [size for cut in cuts for size in (cut.begin_bytes, cut.stride_bytes, cut.width_bytes)]
    sizes += [size for each in blocks for size in (each.shape[1], each.storage_offset())]
    aligned = not any(size % 8 for size in sizes)
    source, destination = (_rows(each, cut, 8 if aligned else 1) for each, cut in zip(blocks, cuts, strict=True))
    count = max(1, STAGED_BYTES // cuts[0].total_bytes)
    for begin in range(0, ids[0].size, count):
        check()
        chosen, places = (torch.from_numpy(side[begin : begin + count]) for side in ids)
        rows = source.index_select(0, chosen.to(source.device)).to(destination.device, non_blocking=True)
        destination.index_copy_(0, places.to(destination.device), rows)


def _rows(blocks: torch.Tensor, cut: Cut, unit: int) -> torch.Tensor:
    """The part of all blocks, in place: `[blocks, rows, width]` in units of 8 bytes or of 1."""
    whole = blocks.view(torch.int64) if unit == 8 else blocks
    block, begin, stride, width = (
        size // unit for size in (blocks.shape[1], cut.begin_bytes, cut.stride_bytes, cut.width_bytes)
    )
    return whole.as_strided((blocks.shape[0], cut.rows, width), (block, stride, 1), whole.storage_offset() + begin)


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Make `stream` and its device current. Switching back to the first GPU afterwards creates no context there."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def compile_copies(store: BlockStore) -> None:
    """Compile the copies between `store` and others on its GPU: takes seconds the first time. No effect on a CPU."""
    if isinstance(store, PartedStore | RangedStore):
        for part in store.parts if isinstance(store, PartedStore) else store.ranges:
            compile_copies(part)
    if isinstance(store, DeviceBlockStore) and store.device != "cpu":
        DeviceChannel(store, store, CUDA_IPC).close()


def attach_device_store(handle: StoreHandle, *, geometry: KvGeometry) -> DeviceBlockStore:
    """Open another process's device store by CUDA IPC. Needs the same GPU, or one with access to it.

    Raises GeometryMismatchError, naming both; TransferError if it cannot be opened.
    """
    geometry.require_same(handle.geometry)
    if handle.kind != CUDA or not handle.device_handle:
        raise TransferError(f"store {handle.store_id} ({handle.kind}, {handle.device}) is not shared device memory")
    tensor = open_memory(handle.device_handle).view(handle.capacity_blocks, handle.block_bytes)
    return DeviceBlockStore(handle.store_id, handle.geometry, tensor, part=handle.slice, node_id=handle.node_id)


def peer_access(source: str, destination: str) -> bool:
    """Whether the first device can access the second's memory without the host (NVLink, or PCIe peer to peer)."""
    return bool(torch.cuda.can_device_access_peer(torch.device(source), torch.device(destination)))


def reached_devices(device: str) -> list[str]:
    """The devices of this node whose memory `device` reads directly, including itself; none for a CPU."""
    if device == "cpu":
        return []
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [other for other in devices if other == device or peer_access(device, other)]


def _tensor(store: BlockStore) -> torch.Tensor:
    """The store's blocks, uint8 `[capacity_blocks, block_bytes]`, in place."""
    if isinstance(store, DeviceBlockStore):
        return store.blocks
    if isinstance(store, HostBlockStore):
        return torch.frombuffer(store.as_memory(), dtype=torch.uint8).view(store.capacity_blocks, store.block_bytes)
    raise TransferError(f"store {store.store_id} is of a kind that device channels do not support")


def _require_wanted(copy: Copy) -> None:
    if copy.completion.cancelled:
        raise cancelled(copy)


def _pinning(device: torch.device) -> Pinning:
    """This process's pinning, whose memory is locked for all its GPUs. The first call's `device` registers it."""
    if not _pinnings:
        _pinnings.append(_new_pinning(device))
    return _pinnings[0]


def _new_pinning(device: torch.device) -> Pinning:
    runtime: Any = _cuda.cudart()

    def register(address: int, count: int) -> int:
        with torch.cuda.device(device):  # the thread's default device would create a context on another GPU
            return int(runtime.cudaHostRegister(address, count, _PORTABLE))

    def unregister(address: int) -> int:
        with torch.cuda.device(device):
            return int(runtime.cudaHostUnregister(address))

    return Pinning(register, unregister, touch=FirstTouch())


@functools.cache
def _bounce() -> Bounce:
    """This process's bounce buffer; created when unlocked memory is first copied."""
    return Bounce()


@functools.cache
def _block_kernel() -> Any:
    """The kernel's module; None without Triton: blocks are then copied one by one."""
    try:
        from alignedserve.transfer import block_kernel
    except ImportError as error:
        logger.warning("Triton is not available (%s): blocks are copied within the GPU one by one", error)
        return None
    return block_kernel
