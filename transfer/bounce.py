"""Copies of host memory that is not page-locked (yet, or at all), through a small page-locked buffer.

The driver has its own such way for pageable memory. This one never passes CUDA an address that another thread may be
registering at that moment, and releases the interpreter while it copies.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from alignedserve.transfer.pieces import Pieces

_cuda: Any = torch.cuda  # most of it is untyped

SLOTS = 2  # one is filled while the other is copied
BOUNCE_BYTES = 32 << 20
"""Page-locked host memory of a process with a GPU, while some store is not locked; shared by its channels."""


class Bounce:
    """One for each process. Copies use it one at a time."""

    def __init__(self, pin_memory: bool = True) -> None:
        self._slots = list(torch.empty(SLOTS, BOUNCE_BYTES // SLOTS, dtype=torch.uint8, pin_memory=pin_memory))
        self._lock = threading.Lock()

    def copy(
        self,
        source: torch.Tensor,
        destination: torch.Tensor,
        pieces: Pieces,
        stream: Any,
        require_wanted: Callable[[], None],
    ) -> None:
        """Copy `pieces` between flat uint8 tensors, one on the host. It is complete when `stream` is, or on return.

        `require_wanted` is called between parts, and raises if the copy is to end early. `stream` None: both tensors
        are on the host, as in tests.
        """
        if stream is not None:
            stream.synchronize()  # the data to copy must be there; the wait is not under the lock
        with self._lock:
            events: list[Any] = [None] * SLOTS
            for turn, (begin, target, count) in enumerate(self._parts(pieces)):
                require_wanted()
                slot, at = self._slots[turn % SLOTS][:count], turn % SLOTS
                if events[at] is not None:
                    events[at].synchronize()
                wanted, room = source[begin : begin + count], destination[target : target + count]
                if room.is_cuda or stream is None:
                    _host_copy(slot, wanted)
                    room.copy_(slot, non_blocking=True)
                    events[at] = _recorded(stream)
                else:
                    slot.copy_(wanted, non_blocking=True)
                    stream.synchronize()
                    _host_copy(room, slot)
            if stream is not None:
                stream.synchronize()  # the next copy reuses the slots

    @staticmethod
    def _parts(pieces: Pieces) -> Iterator[tuple[int, int, int]]:
        step = BOUNCE_BYTES // SLOTS
        for begin, target, size in pieces.triples():
            for done in range(0, size, step):
                yield begin + done, target + done, min(step, size - done)


def _recorded(stream: Any) -> Any:
    if stream is None:
        return None
    event = _cuda.Event(blocking=True)
    event.record(stream)
    return event


def _host_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), destination.numel())  # releases the interpreter lock
