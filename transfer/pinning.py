"""Page-locked host memory: without it the driver copies through its own buffer, and the caller waits meanwhile.

Registering touches every page and takes about 0.1 s a GB. So it is done in the background, piece by piece from block 0
on, while copies already run: memory that is not locked yet is copied another way (`transfer.bounce`). One registration
of 512 GiB fails where pieces of 64 GiB work (reported: vllm #51080); a single copy must not cross from one piece to the
next.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

import numpy as np

from alignedserve.errors import TransferError
from alignedserve.memory import describe_bytes
from alignedserve.transfer.block_store import ALIGNMENT_BYTES, ByteArray, HostBlockStore
from alignedserve.transfer.channel import PageLocked

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 64 << 30
PIECE_BYTES = 1 << 30
"""Bytes of one registration: the driver may block other calls of the process while it lasts."""

Register = Callable[[int, int], int]
"""Address and bytes to a CUDA error code, 0 for success."""
Touch = Callable[[int, int], None]
"""Address and bytes of memory that is about to be registered; must not change its contents."""


class PinnedStore:
    """One store's memory, locked from block 0 on by its own thread. Created by `Pinning.pin`."""

    def __init__(self, store: HostBlockStore, piece_blocks: int, register: Register, unregister: Callable[[int], int]):
        self.store_id = store.store_id
        self.piece_blocks = piece_blocks  # a copy must not cross a multiple of it
        self.users = 1
        self._register, self._unregister = register, unregister
        # The view keeps the memory mapped until the last piece is released, even if the store is closed.
        self._memory: ByteArray = np.frombuffer(store.as_memory(), np.uint8)
        self.address = int(self._memory.ctypes.data)
        self._piece_bytes = piece_blocks * store.block_bytes
        self._total_bytes = self._memory.nbytes
        self._pieces: list[int] = []
        self._locked_bytes = 0
        self._error: TransferError | None = None
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"pin-{store.store_id}", daemon=True)

    @property
    def locked_bytes(self) -> int:
        """Locked bytes of the blocks, from the first on; it never decreases until the last user releases the store."""
        return self._locked_bytes

    @property
    def progress(self) -> PageLocked:
        return PageLocked(self.store_id, self._locked_bytes, self._total_bytes, self._ended)

    @property
    def error(self) -> TransferError | None:
        """Why not all of it could be locked."""
        return self._error

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once all is locked, or cannot be."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Release the locked memory, after waiting for a registration in progress. No copy may be in flight."""
        self._stopping = True
        self._thread.join()
        self._locked_bytes = 0
        while self._pieces:
            self._unregister(self._pieces.pop())

    def _run(self) -> None:
        begun_s = time.monotonic()
        try:
            for begin in range(0, self._total_bytes, self._piece_bytes):
                if self._stopping:
                    return
                self._lock(begin, min(self._piece_bytes, self._total_bytes - begin))
        except Exception as error:  # on any error the users of the store must be told
            known = isinstance(error, TransferError)
            self._error = error if isinstance(error, TransferError) else TransferError(f"{self.store_id}: {error!r}")
            logger.error("page-locking stopped: %s", self._error, exc_info=not known)
            return
        finally:
            self._ended = True
        took_s = time.monotonic() - begun_s
        logger.info("%s: %s of host memory page-locked in %.1f s", self.store_id, self._words(), took_s)

    def _lock(self, begin: int, count: int) -> None:
        code = self._register(self.address + begin, count)
        if code:
            raise TransferError(
                f"store {self.store_id}: CUDA could not lock {describe_bytes(count)} of host memory at byte {begin} of "
                f"{describe_bytes(self._total_bytes)} (error {code}); make it smaller (kv_pool.size_gib), or set "
                "cluster.allow_slow_channel to copy without page-locking",
                store_id=self.store_id,
            )
        self._pieces.append(self.address + begin)
        before, self._locked_bytes = self._locked_bytes, begin + count
        tenth = max(1, self._total_bytes // 10)
        if before // tenth != self._locked_bytes // tenth and self._locked_bytes < self._total_bytes:
            logger.info("%s: %s page-locked", self.store_id, self._words())

    def _words(self) -> str:
        return f"{describe_bytes(self._locked_bytes)} of {describe_bytes(self._total_bytes)}"


class Pinning:
    """This process's host memory that is registered with CUDA.

    Users of a store are counted: several channels may use it.
    """

    def __init__(
        self,
        register: Register,
        unregister: Callable[[int], int],
        *,
        touch: Touch | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`touch` is called with each piece before it is registered: several threads fault pages in faster."""
        self._register, self._unregister, self._touch = register, unregister, touch
        self._piece_bytes = min(piece_bytes, MAX_PIECE_BYTES)
        self._pinned: dict[int, PinnedStore] = {}
        self._lock = threading.Lock()

    def piece_blocks(self, store: HostBlockStore) -> int:
        """Blocks of one registration. Pieces begin at a page boundary."""
        step = ALIGNMENT_BYTES // math.gcd(store.block_bytes, ALIGNMENT_BYTES)
        return max(step, self._piece_bytes // store.block_bytes // step * step)

    def pin(self, store: HostBlockStore) -> PinnedStore:
        """Begin to register the store's blocks, unless another user has; returns at once.

        Pass the result to `unpin`.
        """
        address = int(np.frombuffer(store.as_memory(), np.uint8).ctypes.data)
        with self._lock:
            pinned = self._pinned.get(address)
            if pinned is not None:
                pinned.users += 1
                return pinned
            pinned = PinnedStore(store, self.piece_blocks(store), self._prepare_and_register, self._unregister)
            self._pinned[address] = pinned
        pinned.start()
        return pinned

    def unpin(self, pinned: PinnedStore) -> None:
        """The last user's call releases the registration, and waits for a piece in progress."""
        with self._lock:
            pinned.users -= 1
            last = pinned.users == 0
            if last:
                del self._pinned[pinned.address]
        if last:
            pinned.stop()

    def _prepare_and_register(self, address: int, count: int) -> int:
        if self._touch is not None:
            self._touch(address, count)
        return self._register(address, count)
