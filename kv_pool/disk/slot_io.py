"""Moves blocks between host memory and slots on disk, with their checksums. Blocks; for any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import xxhash

from alignedserve.kv_pool.disk.file import PAGE_BYTES, DiskFile, page_buffer
from alignedserve.kv_pool.disk.layout import DiskLayout, proof
from alignedserve.transfer.block_store import HostBlockStore

PIECE_BYTES = 4 << 20  # of one call
MOST_BUFFERS = 512  # of one call; the kernel takes 1,024


class SlotIo:
    """Blocks of whole pages go straight between the store and the disk, others through a buffer."""

    def __init__(self, file: DiskFile, layout: DiskLayout, store: HostBlockStore) -> None:
        self.file, self.layout = file, layout
        self._store = store
        self._straight = layout.geometry.block_bytes % PAGE_BYTES == 0
        self.most = max(1, min(PIECE_BYTES // layout.slot_bytes, MOST_BUFFERS))
        """The most slots of one call."""
        self._own = threading.local()

    def write(self, slots: Sequence[int], block_ids: Sequence[int]) -> list[int]:
        """Write blocks to slots that are side by side. Returns the xxh3 of each. Raises OSError.

        If a block changes meanwhile, its checksum need not be that of what was written.
        """
        if self._straight:
            views = [self._store.read_block(block) for block in block_ids]
            sums = [xxhash.xxh3_64_intdigest(view) for view in views]
            self.file.write(views, self.layout.slot_at(slots[0]))
            return sums
        buffer, rows = self._buffer(len(slots))
        size = self.layout.geometry.block_bytes
        np.take(self._store.blocks, np.array(block_ids), axis=0, out=rows[:, :size], mode="clip")
        sums = [xxhash.xxh3_64_intdigest(row[:size].data) for row in rows]
        self.file.write([buffer], self.layout.slot_at(slots[0]))
        return sums

    def read(self, slots: Sequence[int], block_ids: Sequence[int], digests: bytes, proofs: Sequence[int]) -> list[int]:
        """Read slots that are side by side into blocks. Raises OSError, also if none of them is what is expected.

        Returns the xxh3 of the blocks up to the first that is not the one with its digest (16 bytes each) and proof.
        """
        if self._straight:
            views = [self._store.read_block(block) for block in block_ids]
            self.file.read(views, self.layout.slot_at(slots[0]))
        else:
            buffer, rows = self._buffer(len(slots))
            self.file.read([buffer], self.layout.slot_at(slots[0]))
            for block, row in zip(block_ids, rows, strict=True):
                self._store.blocks[block] = row[: self.layout.geometry.block_bytes]
            views = [self._store.read_block(block) for block in block_ids]
        sums: list[int] = []
        for place, view in enumerate(views):
            found = xxhash.xxh3_64_intdigest(view)
            if proof(found, digests[place * 16 : place * 16 + 16]) != proofs[place]:
                break
            sums.append(found)
        return sums

    def discard(self) -> None:
        """Have the next start discard the file. Raises OSError."""
        self.layout.discard(self.file)

    def write_entries(self, pages: Sequence[tuple[memoryview, int]]) -> None:
        """Write what `entry_pages` has prepared. Raises OSError."""
        for buffer, offset in pages:
            self.file.write([buffer], offset)

    def _buffer(self, count: int) -> tuple[memoryview, np.ndarray[tuple[int, int], np.dtype[np.uint8]]]:
        """This thread's buffer for `count` slots: its bytes, and uint8 `[count, slot_bytes]`."""
        size = self.layout.slot_bytes
        if not hasattr(self._own, "buffer"):
            self._own.buffer = page_buffer(self.most * size)
        view: memoryview = self._own.buffer[: count * size]
        return view, np.frombuffer(view, np.uint8).reshape(count, size)
