"""Page-locked host memory: without it the driver copies through a buffer of its own, and the caller waits meanwhile.

Registering takes about 0.1 s a GB and touches every page. One registration of 512 GiB fails where pieces of 64 GiB work
(reported: vllm #51080); a single copy must not cross from one piece to the next.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from alignedserve.errors import TransferError
from alignedserve.memory import describe_bytes
from alignedserve.transfer.block_store import ALIGNMENT_BYTES, HostBlockStore

MAX_PIECE_BYTES = 64 << 30

Register = Callable[[int, int], int]
"""Address and bytes to a CUDA error code, 0 for success."""


@dataclass(slots=True)
class _Pinned:
    users: int
    pieces: list[int]


class Pinning:
    """What of this process's host memory is registered with CUDA. Stores are counted: several channels may use one."""

    def __init__(
        self, register: Register, unregister: Callable[[int], int], *, max_piece_bytes: int = MAX_PIECE_BYTES
    ) -> None:
        self._register, self._unregister = register, unregister
        self._max_piece_bytes = max_piece_bytes
        self._pinned: dict[int, _Pinned] = {}
        self._lock = threading.Lock()

    def piece_blocks(self, store: HostBlockStore) -> int:
        """Blocks of one registration: a copy must not cross a multiple of it. Pieces begin on a page of their own."""
        step = ALIGNMENT_BYTES // math.gcd(store.block_bytes, ALIGNMENT_BYTES)
        return max(step, self._max_piece_bytes // store.block_bytes // step * step)

    def pin(self, store: HostBlockStore) -> int:
        """Register the store's blocks and return their address, for `unpin`. Raises TransferError where it fails."""
        address = int(np.frombuffer(store.as_memory(), np.uint8).ctypes.data)
        with self._lock:
            if address in self._pinned:
                self._pinned[address].users += 1
                return address
            piece_bytes = self.piece_blocks(store) * store.block_bytes
            total = store.as_memory().nbytes
            done: list[int] = []
            for begin in range(0, total, piece_bytes):
                code = self._register(address + begin, min(piece_bytes, total - begin))
                if code:
                    for piece in done:
                        self._unregister(piece)
                    raise TransferError(
                        f"store {store.store_id}: CUDA could not lock {describe_bytes(total)} of host memory (error "
                        f"{code}); make it smaller, or set cluster.allow_slow_channel to copy without"
                    )
                done.append(address + begin)
            self._pinned[address] = _Pinned(1, done)
            return address

    def unpin(self, address: int) -> None:
        """The last user's call gives the registration up. Call it before the memory is unmapped."""
        with self._lock:
            pinned = self._pinned[address]
            pinned.users -= 1
            if pinned.users == 0:
                del self._pinned[address]
                for piece in pinned.pieces:
                    self._unregister(piece)
