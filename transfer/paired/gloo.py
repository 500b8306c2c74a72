"""Gloo over TCP: between nodes without NCCL, and between any two processes for tests. Through host memory.

If a peer dies, its kernel closes the connection, which ends waits for it at once. A peer that is stopped, or whose node
is gone, ends them after `silent_s` a piece. (`ProcessGroupGloo.abort` ends no wait of another thread: seen with torch
2.13.)
"""

from __future__ import annotations

import logging
import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from alignedserve.errors import TransferError
from alignedserve.transfer.paired.addresses import GroupStore
from alignedserve.transfer.paired.identity import PROOF_BYTES, SECRET_BYTES, check_proof, close_door, proof
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.paired.transport import Portion, Transport, Wiring

logger = logging.getLogger(__name__)

_dist: Any = dist  # its process groups are untyped


class GlooTransport(Transport):
    """A group of two ranks, and two host buffers: a piece is gathered or scattered while the next one is in flight."""

    def __init__(self, wiring: Wiring, name: str, rendezvous: Rendezvous) -> None:
        """As `open_transport`."""
        self._rank, self._peer = wiring.rank, 1 - wiring.rank
        self._piece_bytes = wiring.piece_bytes
        self._silent = timedelta(seconds=wiring.silent_s)
        self._buffers: list[torch.Tensor] = []
        options = _dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = self._silent, 1
        try:
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=wiring.host)]
            store = GroupStore(rendezvous, name, wiring.silent_s)
            self._group: Any = _dist.ProcessGroupGloo(store, wiring.rank, 2, options)
        except RuntimeError as error:
            raise TransferError(f"Gloo could not connect ({name}, at {wiring.host}): {error}") from error
        self._meet(name, rendezvous)
        if not close_door(store.own):
            logger.warning("the port on which Gloo listens for %s stays open to other processes", name)

    def _meet(self, name: str, rendezvous: Rendezvous) -> None:
        """Both ends prove to each other that they share the stream. Raises TransferError if one cannot."""
        key = f"{name}/secret"
        if self._rank == 0:
            rendezvous.set(key, secrets.token_bytes(SECRET_BYTES))
        secret = rendezvous.get(key, self._silent.total_seconds())
        own = torch.frombuffer(bytearray(proof(secret, name, self._rank)), dtype=torch.uint8)
        shown = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
        try:
            works = [self._group.send([own], self._peer, 0), self._group.recv([shown], self._peer, 0)]
            self._settle(works, 0)
            self._settle(works, 1)
        except RuntimeError as error:
            raise self._failed(error) from error
        check_proof(shown.numpy().tobytes(), secret, name, self._peer)

    def send(self, portion: Portion) -> None:
        group, part, ids, ready = self._live(), portion.part, portion.ids, portion.ready
        works: list[Any] = [None, None]
        try:
            for number, (begin, end) in enumerate(portion.pieces(self._piece_bytes)):
                self._settle(works, number % 2)
                buffer = self._buffer(portion, number % 2, end - begin)
                with portion.blocks.in_use():
                    portion.blocks.read(part, ids[begin:end], buffer, ready)
                works[number % 2] = group.send([buffer], self._peer, 0)
            self._settle(works, 0)
            self._settle(works, 1)
        except RuntimeError as error:
            raise self._failed(error) from error

    def receive(self, portion: Portion) -> None:
        group, part, ids, ready = self._live(), portion.part, portion.ids, portion.ready
        works: list[Any] = [None, None]
        pieces = list(portion.pieces(self._piece_bytes))
        try:
            for number in range(len(pieces) + 1):
                if number < len(pieces):
                    begin, end = pieces[number]
                    works[number % 2] = group.recv([self._buffer(portion, number % 2, end - begin)], self._peer, 0)
                if number > 0:
                    begin, end = pieces[number - 1]
                    self._settle(works, (number - 1) % 2)
                    buffer = self._buffer(portion, (number - 1) % 2, end - begin)
                    with portion.blocks.in_use():
                        portion.blocks.write(part, ids[begin:end], buffer, ready)
        except RuntimeError as error:
            raise self._failed(error) from error

    def abort(self) -> None:
        self._group = None  # the last user of the group closes the connection

    def _live(self) -> Any:
        group = self._group
        if group is None:
            raise TransferError("the connection of this pair was ended")
        return group

    def _buffer(self, portion: Portion, slot: int, count: int) -> torch.Tensor:
        """A buffer for `count` blocks. It is enlarged for a part of which a single block needs it."""
        needed = portion.staging_bytes(self._piece_bytes)
        if not self._buffers or self._buffers[0].numel() < needed:
            pinned = portion.blocks.on_gpu
            self._buffers = [torch.empty(needed, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        return self._buffers[slot][: count * portion.blocks.width_bytes(portion.part)]

    def _settle(self, works: list[Any], slot: int) -> None:
        """Wait for the work of a slot, if there is any. Raises RuntimeError."""
        work, works[slot] = works[slot], None
        if work is not None:
            work.wait(self._silent)

    def _failed(self, error: RuntimeError) -> TransferError:
        self.abort()
        reason = str(error).partition("] ")[2] or str(error)
        return TransferError(f"the connection to the other process of this pair broke: {reason.splitlines()[0]}")
