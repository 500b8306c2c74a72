"""NCCL through a communicator of two ranks, so that a peer's death affects no other pair. Not yet run on a GPU.

Two ranks on one GPU need NCCL_MULTI_RANK_GPU_ENABLE=1 in both processes (`pair_choice` checks it).
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from alignedserve.errors import TransferError
from alignedserve.transfer.pair_choice import INSTALL_NCCL, cupy_missing
from alignedserve.transfer.paired.blocks import DeviceBlocks
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.paired.transport import SERVING_RANK, Portion, Transport, Wiring
from alignedserve.transfer.topology import NCCL

ABORT_GRACE_S = 0.2
POLL_S = 50e-6
ASK_S = 0.05
_cuda: Any = torch.cuda  # most of it is untyped

Move = Callable[[torch.Tensor, torch.Tensor, Any], Any]
"""Submits one piece: ids, a staging buffer and the event after which it is idle. Returns the next such event."""


def nccl_problem() -> str:
    """What this process lacks for NCCL, and the remedy; "" if nothing."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        return f"cupy, or its NCCL, is not installed ({error}): {INSTALL_NCCL}"
    return "" if nccl.available else f"this cupy has no NCCL: {INSTALL_NCCL}"


def no_nccl_here(wanted: str, device: str) -> str:
    """Why an instance on `device` cannot use NCCL. CuPy is imported only if `wanted` is NCCL."""
    if device == "cpu":
        return "KV is in host memory"
    return nccl_problem() if wanted == NCCL else cupy_missing()


class NcclTransport(Transport):
    """A communicator, two streams and two staging buffers on the device.

    A piece is gathered by one kernel while the previous one is in flight, and sent as one message; the other end
    receives and scatters in the same way. Nothing waits for the device as a whole.
    """

    def __init__(self, wiring: Wiring, name: str, rendezvous: Rendezvous, *, library: Any = None) -> None:
        """As `open_transport`. `library`: `cupy.cuda.nccl`, except in tests, where `wiring.device` may be "cpu"."""
        self._nccl = library or importlib.import_module("cupy.cuda.nccl")
        self._peer = 1 - wiring.rank
        self._piece_bytes, self._silent_s = wiring.piece_bytes, wiring.silent_s
        self._device = torch.device(wiring.device)
        self._gate = threading.Condition()
        self._inside = self._aborted = False
        self._staging: list[torch.Tensor] = []
        self._idle: list[Any] = [None, None]  # the event after which a staging buffer is free
        self._wire, self._packing = _Line(self._device), _Line(self._device)
        if wiring.rank == SERVING_RANK:
            unique = id_to_bytes(self._nccl.get_unique_id())
            rendezvous.set(f"{name}/id", unique)
        else:
            unique = rendezvous.get(f"{name}/id", wiring.silent_s)
        try:
            with self._on_device():
                self._comm: Any = self._communicator(unique, wiring.rank)
        except (RuntimeError, self._nccl.NcclError) as error:
            raise TransferError(f"NCCL could not connect ({name}, {wiring.device}): {error}") from error

    def send(self, portion: Portion) -> None:
        blocks = _device_blocks(portion)

        def move(ids: torch.Tensor, buffer: torch.Tensor, idle: Any) -> Any:
            self._packing.wait(idle)
            with self._packing.current():
                blocks.gather(portion.part, ids, buffer)
            self._wire.wait(self._packing.record())
            self._message("send", buffer)
            return self._wire.record()

        self._move(portion, blocks, move)

    def receive(self, portion: Portion) -> None:
        blocks = _device_blocks(portion)

        def move(ids: torch.Tensor, buffer: torch.Tensor, idle: Any) -> Any:
            self._wire.wait(idle)
            self._message("recv", buffer)
            self._packing.wait(self._wire.record())
            with self._packing.current():
                blocks.scatter(portion.part, ids, buffer)
            return self._packing.record()

        self._move(portion, blocks, move)

    def abort(self) -> None:
        with self._gate:
            if self._aborted:
                return
            self._aborted = True
            # First let a call that is about to return finish, since `abort` destroys the communicator. A call that
            # waits for the peer does not return, and is ended by `abort`.
            self._gate.wait_for(lambda: not self._inside, ABORT_GRACE_S)
            with self._on_device():
                self._comm.abort()

    def _communicator(self, unique: bytes, rank: int) -> Any:
        try:
            return self._nccl.NcclCommunicator(2, unique, rank)
        except TypeError:  # in CuPy 13 the id is a tuple of signed characters
            return self._nccl.NcclCommunicator(2, tuple(byte - 256 if byte > 127 else byte for byte in unique), rank)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _move(self, portion: Portion, blocks: DeviceBlocks, move: Move) -> None:
        """Move piece after piece, alternating between the two staging buffers; returns when all are complete."""
        with blocks.in_use(), self._on_device(), self._draining():
            ids, over = self._begin(portion, blocks), []
            for number, (begin, end) in enumerate(portion.pieces(self._piece_bytes)):
                slot = number % 2
                self._idle[slot] = move(ids[begin:end], self._buffer(portion, slot, end - begin), self._idle[slot])
                over.append(self._idle[slot])
            self._await(over)

    def _begin(self, portion: Portion, blocks: DeviceBlocks) -> torch.Tensor:
        needed = portion.staging_bytes(self._piece_bytes)
        if not self._staging or self._staging[0].numel() < needed:
            # Not from the default stream's memory, which that may still write to: its allocator only tracks its own
            # stream.
            with self._packing.current():
                self._staging = [torch.empty(needed, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._packing.wait(portion.ready)
        self._wire.wait(portion.ready)
        with self._packing.current():
            return blocks.upload(portion.ids)

    def _buffer(self, portion: Portion, slot: int, count: int) -> torch.Tensor:
        return self._staging[slot][: count * portion.blocks.width_bytes(portion.part)]

    def _message(self, name: str, buffer: torch.Tensor) -> None:
        """One `ncclSend` or `ncclRecv`, in the wire's stream. Raises TransferError."""
        with self._gate:
            if self._aborted:
                raise TransferError("the connection of this pair was ended")
            self._inside = True
        try:
            call: Callable[..., None] = getattr(self._comm, name)
            call(buffer.data_ptr(), buffer.numel(), self._nccl.NCCL_UINT8, self._peer, self._wire.handle)
        except self._nccl.NcclError as error:
            raise TransferError(f"the connection to the other process of this pair broke: {error}") from error
        finally:
            with self._gate:
                self._inside = False
                self._gate.notify_all()

    def _await(self, over: list[Any]) -> None:
        """Wait until every piece is complete; each has `silent_s`. Raises TransferError."""
        for event in over:
            deadline, asked = time.monotonic() + self._silent_s, time.monotonic()
            while event is not None and not event.query():
                now = time.monotonic()
                if self._aborted:
                    raise TransferError("the connection of this pair was ended")
                if now > deadline:
                    raise TransferError(f"the other process of this pair was silent for {self._silent_s:g} s")
                if now - asked > ASK_S:
                    asked = now
                    self._check()
                time.sleep(POLL_S)

    def _check(self) -> None:
        with self._gate:
            if not self._aborted:
                try:
                    self._comm.check_async_error()
                except self._nccl.NcclError as error:
                    raise TransferError(f"the connection to the other process of this pair broke: {error}") from error

    @contextlib.contextmanager
    def _draining(self) -> Iterator[None]:
        """After an error, make sure that nothing of this transport touches blocks or staging any more."""
        try:
            yield
        except BaseException:
            self.abort()
            self._packing.drain()
            self._wire.drain()
            raise


class _Line:
    """A CUDA stream. On "cpu", where every call is synchronous, it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = _cuda.Stream(device) if device.type == "cuda" else None

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream) if self._stream is not None else 0

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def wait(self, event: Any) -> None:
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def record(self) -> Any:
        if self._stream is None:
            return None
        event = _cuda.Event()
        event.record(self._stream)
        return event

    def drain(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def id_to_bytes(unique: bytes | tuple[int, ...]) -> bytes:
    """NCCL's unique id from CuPy: bytes since 14, signed characters before."""
    return unique if isinstance(unique, bytes) else bytes(value & 0xFF for value in unique)


def _device_blocks(portion: Portion) -> DeviceBlocks:
    if not isinstance(portion.blocks, DeviceBlocks):
        raise TransferError(f"store {portion.blocks.store.store_id} is not in device memory: NCCL cannot reach it")
    return portion.blocks
