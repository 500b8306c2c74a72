"""The two ends of a channel, filled, poisoned and verified by checksum. One may be in another process."""

from __future__ import annotations

import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash

from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.device import DeviceBlockStore
from alignedserve.transfer.paired.remote import RemoteBlockStore

POISON = 0xA5
ASKED_S = 60.0


class End(ABC):
    """One end's blocks."""

    @abstractmethod
    def fill(self, seed: int) -> list[int]:
        """Write random bytes to every block. Returns the checksums."""

    @abstractmethod
    def poison(self) -> None:
        """Overwrite every byte of every block with `POISON`."""

    @abstractmethod
    def checksums(self) -> list[int]:
        """The current checksum of every block."""


class StoreEnd(End):
    """A store that this process has open."""

    def __init__(self, store: BlockStore) -> None:
        self._bytes = block_bytes(store)

    def fill(self, seed: int) -> list[int]:
        generator = torch.Generator(self._bytes.device).manual_seed(seed)
        self._bytes.view(torch.int64).random_(generator=generator)
        return self.checksums()

    def poison(self) -> None:
        self._bytes.fill_(POISON)
        _settle(self._bytes)

    def checksums(self) -> list[int]:
        _settle(self._bytes)
        rows = self._bytes.cpu().numpy()
        return [xxhash.xxh3_64_intdigest(row.data) for row in rows]


class PairEnd(End):
    """The other process's store of a pair. Only pushes write to it."""

    def __init__(self, store: RemoteBlockStore) -> None:
        self._store = store

    def fill(self, seed: int) -> list[int]:
        return self.checksums()

    def poison(self) -> None:
        """Not needed: every push brings new random bytes."""

    def checksums(self) -> list[int]:
        return self._store.checksums(range(self._store.capacity_blocks))


class RemoteEnd(End):
    """A store of another process, which answers through `serve`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fill(self, seed: int) -> list[int]:
        found: list[int] = self._ask("fill", seed)
        return found

    def poison(self) -> None:
        self._ask("poison")

    def checksums(self) -> list[int]:
        found: list[int] = self._ask("checksums")
        return found

    def _ask(self, what: str, *args: int) -> Any:
        self._connection.send((what, *args))
        if not self._connection.poll(ASKED_S):
            raise TimeoutError(f"the other process did not answer to {what!r} within {ASKED_S:g} s")
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"the other process failed: {answer}")
        return answer


def serve(connection: Connection, end: End) -> None:
    """Answers a RemoteEnd until it closes the connection."""
    while True:
        try:
            what, *args = connection.recv()
        except (EOFError, OSError):
            return
        try:
            connection.send(getattr(end, what)(*args) or [])
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


def start_process(target: Callable[..., None], *args: object) -> tuple[Any, Connection]:
    """Start a daemon process that runs `target(connection, *args)`. Returns it and our end of the connection."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def end_process(process: Any, connection: Connection) -> None:
    """Close the connection, which should end the process, and kill it if it is still alive after 10 s."""
    connection.close()
    process.join(10.0)
    if process.is_alive():
        process.kill()
        process.join()


def block_bytes(store: BlockStore) -> torch.Tensor:
    """A view of the store, uint8 `[blocks, block_bytes]`."""
    if isinstance(store, DeviceBlockStore):
        return store.blocks
    assert isinstance(store, HostBlockStore)
    return torch.frombuffer(store.as_memory(), dtype=torch.uint8).view(store.capacity_blocks, store.block_bytes)


def _settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
