"""The layout of a shard's file on disk.

    page 0    the header: what KV the blocks are of, and in what geometry; a file with another one is discarded
    entries   of the prefix index, one a slot, as in the segment (`kv_pool/entries.py`), but with a check of the entry
              in place of its flags; written in whole pages
    slots     the blocks, each in whole pages

An entry's checksum is of its block's bytes *and* of its digest, which names all tokens up to the block's end. A block
is only accepted for a prompt with the same digest. So whatever the disk returns (an older block of the slot, an entry
without its block, garbage) costs a miss. No write needs to be ordered, and none is waited for (fsync).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from alignedserve.errors import ResourceError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.disk.file import PAGE_BYTES, DiskFile, padded, page_buffer
from alignedserve.kv_pool.entries import GENERATION, HAS_CHECKSUM, META, IndexEntries, Words, entry_bytes
from alignedserve.memory import describe_bytes

MAGIC = b"ASKVDSK1"
SCANNED_BYTES = 8 << 20
_HEADER = struct.Struct("<8sQQQ32s32s")
_DEPTH = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """Where slots and entries are. `model`: what the KV depends on beside it (`ModelInfo.weights`)."""

    slots: int
    geometry: KvGeometry
    model: str

    @classmethod
    def within(cls, size: int, geometry: KvGeometry, model: str) -> DiskLayout:
        """As many slots as fit in `size` bytes. Raises ResourceError if fewer than two do."""
        each = padded(geometry.block_bytes) + entry_bytes(geometry.block_size)
        slots = (size - 2 * PAGE_BYTES) // each
        if slots < 2:
            raise ResourceError(
                f"kv_pool.disk_gib: {describe_bytes(size)} hold {max(0, slots)} blocks of "
                f"{describe_bytes(geometry.block_bytes)}; set it higher"
            )
        return cls(slots, geometry, model)

    @property
    def slot_bytes(self) -> int:
        return padded(self.geometry.block_bytes)

    @property
    def entry_bytes(self) -> int:
        return entry_bytes(self.geometry.block_size)

    @property
    def data_at(self) -> int:
        return PAGE_BYTES + padded(self.slots * self.entry_bytes)

    @property
    def size(self) -> int:
        return self.data_at + self.slots * self.slot_bytes

    def slot_at(self, slot: int) -> int:
        return self.data_at + slot * self.slot_bytes

    def header(self) -> bytes:
        names = self.geometry.fingerprint.encode(), self.model.encode()
        return _HEADER.pack(MAGIC, self.slots, self.geometry.block_bytes, self.geometry.block_size, *names)

    def is_of(self, file: DiskFile) -> bool:
        """Whether the file has this layout, of this model. Raises OSError."""
        buffer = page_buffer(PAGE_BYTES)
        return file.read_up_to(buffer, 0) == PAGE_BYTES and bytes(buffer[: _HEADER.size]) == self.header()

    def format(self, file: DiskFile) -> None:
        """Make the file an empty one of this layout. Raises OSError."""
        file.begin_anew(self.size)
        buffer = page_buffer(PAGE_BYTES)
        buffer[: _HEADER.size] = self.header()
        file.write([buffer], 0)


def proof(checksum: int, digest: bytes) -> int:
    """The checksum of an entry: of its block, whose xxh3 is `checksum`, as the block of this digest."""
    return xxhash.xxh3_64_intdigest(checksum.to_bytes(8, "little") + digest)


def runs(slots: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """The parts `begin .. end - 1` of `slots` that are side by side on disk, each at most `most` long."""
    begin = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1 or end - begin == most:
            yield begin, end
            begin = end


def read_entries(file: DiskFile, layout: DiskLayout, entries: IndexEntries) -> list[int]:
    """Fill `entries` with what is valid on disk. Returns the slots of the others that are not empty.

    Raises OSError.
    """
    wrong: list[int] = []
    step = SCANNED_BYTES // PAGE_BYTES * PAGE_BYTES
    stored = entries.memory
    total = layout.slots * layout.entry_bytes
    for begin in range(0, total, step):
        buffer = page_buffer(min(step, padded(total - begin)))
        file.read([buffer], PAGE_BYTES + begin)
        end = min(begin + step, total)
        stored[begin:end] = buffer[: end - begin]
    rows = max(1, SCANNED_BYTES // layout.entry_bytes)
    for first in range(0, layout.slots, rows):
        words = entries.words[first : first + rows]
        right = (words[:, META] >> _HIGH) == _checks(words)
        right &= words[:, GENERATION] != 0
        wrong += (np.flatnonzero(~right & words.any(axis=1)) + first).tolist()
        words[~right] = 0
        words[right, META] = (words[right, META] & _DEPTH) | np.uint64(HAS_CHECKSUM)
    return wrong


def entry_pages(layout: DiskLayout, entries: IndexEntries, slots: Iterable[int]) -> list[tuple[memoryview, int]]:
    """The pages, as they are to be on disk, with the entries of these slots: bytes and their offset in the file."""
    size = layout.entry_bytes
    numbers = sorted(
        {page for slot in slots for page in (slot * size // PAGE_BYTES, ((slot + 1) * size - 1) // PAGE_BYTES)}
    )
    pages = []
    for first, last in runs(numbers, 256):
        begin, end = numbers[first] * PAGE_BYTES, (numbers[last - 1] + 1) * PAGE_BYTES
        low, high = begin // size, min(layout.slots, -(-end // size))
        words = entries.words[low:high].copy()
        words[words[:, GENERATION] == 0] = 0
        words[:, META] = (words[:, META] & _DEPTH) | (_checks(words) << _HIGH)
        buffer = page_buffer(end - begin)
        content = words.tobytes()[begin - low * size : end - low * size]
        buffer[: len(content)] = content
        pages.append((buffer, PAGE_BYTES + begin))
    return pages


def _checks(words: Words) -> Words:
    """A check of each entry but its flags, 32 bits: multilinear hashing (Lemire and Kaser 2014), 0 for an empty one."""
    raw = hashlib.shake_128(MAGIC).digest(words.shape[1] * 8)
    factors = np.frombuffer(raw, np.uint64) | np.uint64(1)
    own = words.copy()
    own[:, META] &= _DEPTH
    found: Words = (own * factors).sum(axis=1, dtype=np.uint64) >> _HIGH
    return found
