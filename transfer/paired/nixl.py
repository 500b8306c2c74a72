"""NIXL over UCX: RDMA, TCP or shared memory, as UCX finds them (`UCX_TLS`, `UCX_NET_DEVICES`). Chosen by name only.

Each end has two registered buffers, in host memory or in its GPU's. A piece is gathered into one, written into the
peer's with a single operation, and announced by the notification that comes with it. Not yet run on a GPU.

UCX's transports that write to another process's memory without its participation (CMA, KNEM, XPMEM, CUDA IPC) are
disabled: such a write could still happen after the other process has freed the buffer.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import logging
import os
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from alignedserve.errors import TransferError
from alignedserve.transfer.pair_choice import INSTALL_NIXL, NIXL_PACKAGES
from alignedserve.transfer.paired.identity import close_new_doors, listening
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.paired.transport import SERVING_RANK, Portion, Transport, Wiring

logger = logging.getLogger(__name__)

POLL_S = 50e-6
_BACKEND = "UCX"
_HELLO, _FREE = b"hello", b"free"
_PIECES = (b"piece 0", b"piece 1")  # in the first buffer, in the second one
_PATIENCE = 4  # an agent takes half a second to start, its library another one, and directions connect one by one
# The module for EFA loads the system's libibverbs and libnl beside the wheel's, and the process dies of SIGSEGV when
# they are unloaded.
_ENVIRONMENT = {"UCX_TLS": "^cma,knem,xpmem,cuda_ipc", "UCX_LOG_FILE": "stderr", "UCX_MODULES": "^efa"}
_making = threading.Lock()  # of an agent, so that the sockets that appear meanwhile are its own
_PLACE = struct.Struct("!QQQIB")  # addresses of the two buffers, their size, the device's number, whether it is a GPU


def load_library(host: str) -> Any:
    """The wheel for this process's CUDA if it can be imported, else the other one. Raises TransferError.

    `host`: this process's address. UCX is told about it only if it is loopback, since RDMA has devices of its own.
    """
    only_here = {"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"} if ipaddress.ip_address(host).is_loopback else {}
    for name, value in {**_ENVIRONMENT, **only_here}.items():
        os.environ.setdefault(name, value)
    names = sorted(NIXL_PACKAGES, key=lambda name: not name.endswith((torch.version.cuda or "").partition(".")[0]))
    reasons, raises = [], logging.raiseExceptions
    for name in names:
        try:
            library = importlib.import_module(f"{name}._api")
        except ImportError as error:
            reasons.append(f"{name}: {error}")
            continue
        finally:
            logging.raiseExceptions = raises  # the library changes it
        own = logging.getLogger("nixl")  # it writes to stdout
        own.handlers.clear()
        own.propagate = True
        own.setLevel(logging.WARNING)
        return library
    raise TransferError(f"NIXL cannot be imported ({'; '.join(reasons)}): {INSTALL_NIXL}")


class NixlTransport(Transport):
    """One direction of a pair: a piece is gathered while the one before is in flight."""

    def __init__(self, wiring: Wiring, name: str, rendezvous: Rendezvous) -> None:
        """As `open_transport`."""
        self._rank, self._name, self._rendezvous = wiring.rank, name, rendezvous
        self._piece_bytes, self._silent_s = wiring.piece_bytes, wiring.silent_s
        self._device = torch.device(wiring.device)
        self._aborted = False
        self._ends = 0
        self._end: _End | None = None
        with self._failing(f"NIXL could not connect ({name})"):
            self._library = load_library(wiring.host)
            self._end = self._connect(wiring.piece_bytes)

    def send(self, portion: Portion) -> None:
        with self._failing("the connection to the other process of this pair broke"):
            end = self._large_enough(portion)
            for begin, stop in portion.pieces(self._piece_bytes):
                slot = end.moved % 2
                self._until(end.has_room)
                buffer = end.buffer(portion, slot, stop - begin)
                with portion.blocks.in_use():
                    portion.blocks.read(portion.part, portion.ids[begin:stop], buffer, portion.ready)
                if self._aborted:
                    raise TransferError("it was ended")
                end.write(slot, buffer.numel(), _PIECES[slot])
                end.moved += 1
            for number in range(2):
                self._until(partial(end.written, (end.moved + number) % 2))  # the older one first

    def receive(self, portion: Portion) -> None:
        with self._failing("the connection to the other process of this pair broke"):
            end = self._large_enough(portion)
            for begin, stop in portion.pieces(self._piece_bytes):
                slot = end.moved % 2
                self._until(end.has_piece)
                buffer = end.buffer(portion, slot, stop - begin)
                with portion.blocks.in_use():
                    portion.blocks.write(portion.part, portion.ids[begin:stop], buffer, portion.ready)
                end.tell(_FREE)
                end.moved += 1

    def abort(self) -> None:
        self._aborted = True
        self._end = None  # its last user ends the connection

    def _connect(self, size: int) -> _End:
        """Both ends call it at the same time. Each writes its whole buffer once, so that all of UCX's connections exist
        before further ones are dropped. The server listens only after the client has sent its description.
        """
        key, theirs, patience_s = f"{self._name}/{self._ends}", b"", _PATIENCE * self._silent_s
        self._ends += 1
        if self._rank == SERVING_RANK:
            theirs = self._rendezvous.get(f"{key}/{1 - self._rank}", patience_s)
        with _making:
            before = listening()
            end = _End(self._library, size, self._device)
            opened = listening() - before
        self._rendezvous.set(f"{key}/{self._rank}", end.description)
        end.meet(theirs or self._rendezvous.get(f"{key}/{1 - self._rank}", patience_s))
        end.write(0, size, _HELLO)
        self._until(lambda: end.heard[_HELLO] > 0)
        self._until(partial(end.written, 0))
        if opened and not close_new_doors(opened, end.description):
            logger.warning("the ports on which UCX listens for %s stay open to other processes", self._name)
        return end

    def _large_enough(self, portion: Portion) -> _End:
        """The end, with buffers that hold a piece: both ends enlarge theirs for the same portion."""
        end, needed = self._end, portion.staging_bytes(self._piece_bytes)
        if end is not None and end.size < needed:
            end = self._end = self._connect(needed)
        if end is None or self._aborted:
            raise TransferError("it was ended")
        return end

    def _until(self, there: Callable[[], bool]) -> None:
        """Raises TransferError if the peer is silent, or the transport is aborted."""
        deadline = time.monotonic() + self._silent_s
        while not there():
            if self._aborted:
                raise TransferError("it was ended")
            if time.monotonic() > deadline:
                raise TransferError(f"the other end was silent for {self._silent_s:g} s")
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """After any error the connection ends. The library's errors have no common class."""
        on_gpu = self._device.type == "cuda"
        try:
            with torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext():
                yield
        except Exception as error:
            self.abort()
            raise TransferError(f"{what}: {error}") from error


class _End:
    """An agent with two registered buffers, and the peer's.

    The peer cannot write to the buffers once this is deleted: its connection ends with the agent, and RDMA's keys with
    the registration.
    """

    def __init__(self, library: Any, size: int, device: torch.device) -> None:
        self.size = size
        self.moved = 0  # pieces sent or received
        self._heard: Counter[bytes] = Counter()
        self._handles: list[Any] = [None, None]
        on_gpu = device.type == "cuda"
        # Zeros, since the peer gets the first one whole when it meets this end.
        self._buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()  # NIXL knows no streams
        # Without a thread that makes progress: it would spin. Both ends poll while they copy.
        config = library.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        # A random name: `heard` counts only notifications that carry the peer's name.
        self._agent: Any = library.nixl_agent(secrets.token_hex(16), config)
        for buffer in self._buffers:
            self._agent.register_memory([buffer], backends=[_BACKEND])
        addresses = [buffer.data_ptr() for buffer in self._buffers]
        place = _PLACE.pack(*addresses, size, device.index or 0 if on_gpu else 0, on_gpu)
        self.description: bytes = place + self._agent.get_agent_metadata()
        self._peer = ""
        self._theirs: tuple[int, int, int, str] = (0, 0, 0, "")

    def __del__(self) -> None:
        self._handles, self._agent = [], None  # before the memory that the peer may write to is given back

    @property
    def heard(self) -> Counter[bytes]:
        """How many notifications of each kind the peer has sent. Also makes progress with this end's own writes."""
        for slot in range(2):
            self.written((self.moved + slot) % 2)
        for message in self._agent.get_new_notifs(backends=[_BACKEND]).get(self._peer, ()):
            self._heard[message] += 1
        return self._heard

    def has_room(self) -> bool:
        """Whether the next piece can be gathered here, and written there."""
        return self.heard[_FREE] > self.moved - 2 and self.written(self.moved % 2)

    def has_piece(self) -> bool:
        """Whether the next piece has come."""
        return self.heard[_PIECES[self.moved % 2]] > self.moved // 2

    def meet(self, description: bytes) -> None:
        """Raises TransferError if the peer's buffers differ in size."""
        first, second, size, device, on_gpu = _PLACE.unpack_from(description)
        if size != self.size:
            raise TransferError(f"the other end has buffers of {size} bytes, not {self.size}")
        peer = self._agent.add_remote_agent(description[_PLACE.size :])
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        self._theirs = (first, second, device, "VRAM" if on_gpu else "DRAM")

    def write(self, slot: int, count: int, notice: bytes) -> None:
        """Begins to write the beginning of a buffer into the same of the peer's."""
        agent, (*addresses, device, kind) = self._agent, self._theirs
        ours = agent.get_xfer_descs([self._buffers[slot][:count]])
        theirs = agent.get_xfer_descs([(addresses[slot], count, device)], mem_type=kind)
        handle = agent.initialize_xfer("WRITE", ours, theirs, self._peer, notice)
        self._handles[slot] = handle
        agent.transfer(handle)

    def written(self, slot: int) -> bool:
        """Whether nothing is being written from a buffer. Raises an error of the library, or TransferError."""
        if (handle := self._handles[slot]) is None:
            return True
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise TransferError("a write failed")
        if state != "DONE":
            return False
        self._handles[slot] = None
        self._agent.release_xfer_handle(handle)
        return True

    def tell(self, notice: bytes) -> None:
        self._agent.send_notif(self._peer, notice)

    def buffer(self, portion: Portion, slot: int, count: int) -> torch.Tensor:
        return self._buffers[slot][: count * portion.blocks.width_bytes(portion.part)]
