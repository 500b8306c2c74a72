"""Transfers of bytes between the two processes of a pair: the contract, and its kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from alignedserve.errors import TransferError
from alignedserve.geometry import StoreSlice
from alignedserve.transfer.paired.blocks import PackedBlocks
from alignedserve.transfer.paired.rendezvous import Rendezvous
from alignedserve.transfer.runs import IdArray
from alignedserve.transfer.topology import GLOO, NCCL, NIXL

SERVING_RANK, ASKING_RANK = 0, 1
PIECE_BYTES = {GLOO: 8 << 20, NCCL: 32 << 20, NIXL: 8 << 20}


@dataclass(frozen=True, slots=True)
class Portion:
    """One end's share of a copy: `part` of the blocks `ids` of a store. `ready`: what they wait for, if anything."""

    blocks: PackedBlocks
    part: StoreSlice
    ids: IdArray
    ready: Any = None

    def pieces(self, piece_bytes: int) -> Iterator[tuple[int, int]]:
        """`(begin, end)` in `ids`, of at most `piece_bytes` or one block: the same at both ends."""
        step = max(1, piece_bytes // self.blocks.width_bytes(self.part))
        for begin in range(0, self.ids.size, step):
            yield begin, min(begin + step, self.ids.size)

    def staging_bytes(self, piece_bytes: int) -> int:
        """The most that a piece may need."""
        return max(piece_bytes, self.blocks.width_bytes(self.part))


class Transport(ABC):
    """One direction of a pair, with its own connection: one end sends, the other receives the same copies in order.

    `send` and `receive` are called by one thread at a time, and return when nothing of the portion is used any more.
    They raise TransferError, after which the transport is unusable. `abort` may be called by any thread: running
    transfers end with an error, at once or within the time that a peer may be silent; idempotent.
    """

    @abstractmethod
    def send(self, portion: Portion) -> None: ...

    @abstractmethod
    def receive(self, portion: Portion) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Wiring:
    """Parameters of a transport. `silent_s`: how long a peer may be silent; `host`: this process's address."""

    channel: str
    rank: int
    host: str
    device: str
    piece_bytes: int
    silent_s: float

    @classmethod
    def between_workers(cls, channel: str, rank: int, host: str, device: str, copy_timeout_s: float) -> Wiring:
        """Allow a quarter of the copy's time for silence, so that a pair is given up before its process is."""
        return cls(channel, rank, host, device, PIECE_BYTES.get(channel, 0), copy_timeout_s / 4)


def open_transport(wiring: Wiring, name: str, rendezvous: Rendezvous) -> Transport:
    """Connect with the other end, which calls this at the same time with the same `name`. Blocks.

    Raises TransferError if the connection cannot be made.
    """
    if wiring.channel == GLOO:
        from alignedserve.transfer.paired.gloo import GlooTransport

        return GlooTransport(wiring, name, rendezvous)
    if wiring.channel == NCCL:
        from alignedserve.transfer.paired.nccl import NcclTransport

        return NcclTransport(wiring, name, rendezvous)
    if wiring.channel == NIXL:
        from alignedserve.transfer.paired.nixl import NixlTransport

        return NixlTransport(wiring, name, rendezvous)
    raise TransferError(f"no paired channel is called {wiring.channel!r}; there are {', '.join(PIECE_BYTES)}")
