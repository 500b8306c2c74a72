"""The layout of a shard's file on disk.

    page 0    the header: what KV the blocks are of, in what geometry (a file of another is discarded), and the slots
    slots     the blocks, each in whole pages
    entries   of the prefix index, one a slot, as in the segment (`kv_pool/entries.py`), but with a check of the entry
              in place of its flags; written in whole pages

The entries come last, so that a file can be made longer or shorter, and keeps the blocks of the slots that remain.

An entry's checksum is of its block's bytes *and* of its digest, which names all tokens up to the block's end. A block
is only accepted for a prompt with the same digest. So whatever the disk returns (an older block of the slot, an entry
without its block, garbage) costs a miss. No write needs to be ordered, and none is waited for (fsync).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from alignedserve.errors import ResourceError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.disk.file import PAGE_BYTES, DiskFile, padded, page_buffer
from alignedserve.kv_pool.entries import GENERATION, HAS_CHECKSUM, META, IndexEntries, Words, entry_bytes
from alignedserve.memory import describe_bytes

MAGIC = b"ASKVDSK2"
SCANNED_BYTES = 8 << 20
_CONTENT = struct.Struct("<8sQQ32s32s")
_SLOTS = struct.Struct("<Q")
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
    def entries_at(self) -> int:
        return self.slot_at(self.slots)

    @property
    def size(self) -> int:
        return self.entries_at + padded(self.slots * self.entry_bytes)

    def slot_at(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def content(self) -> bytes:
        """The header up to the number of slots: two files with the same one have blocks of the same kind."""
        names = self.geometry.fingerprint.encode(), self.model.encode()
        return _CONTENT.pack(MAGIC, self.geometry.block_bytes, self.geometry.block_size, *names)

    def found_in(self, file: DiskFile) -> DiskLayout | None:
        """The file's own layout, with its own number of slots; None if its blocks are not of this kind.

        Raises OSError.
        """
        buffer, content = page_buffer(PAGE_BYTES), self.content()
        if file.read_up_to(buffer, 0) < PAGE_BYTES or bytes(buffer[: len(content)]) != content:
            return None
        (slots,) = _SLOTS.unpack_from(buffer, len(content))
        found, header = replace(self, slots=slots), self.header(slots)
        return found if bytes(buffer[: len(header)]) == header else None

    def format(self, file: DiskFile) -> None:
        """Make the file an empty one of this layout. Raises OSError."""
        file.begin_anew(self.size)
        self._write_header(file)

    def discard(self, file: DiskFile) -> None:
        """Make the file one without a header: it has no layout any more. Raises OSError."""
        file.write([page_buffer(PAGE_BYTES)], 0)

    def take_place(self, file: DiskFile, entries: IndexEntries) -> None:
        """Make the file, which has this layout but for the number of slots, one with these entries. Raises OSError.

        If that is cut short, the file's layout is the old one, or this one; some of its blocks are lost.
        """
        for pages, offset in entry_pages(self, entries, range(self.slots)):
            file.write([pages], offset)
        self._write_header(file)
        file.resize(self.size)

    def header(self, slots: int) -> bytes:
        known = self.content() + _SLOTS.pack(slots)
        return known + xxhash.xxh3_128_digest(known)

    def _write_header(self, file: DiskFile) -> None:
        buffer, header = page_buffer(PAGE_BYTES), self.header(self.slots)
        buffer[: len(header)] = header
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

    If the file has more slots than there are `entries`, only the first are read; if it has fewer, the rest stays as it
    is. Raises OSError.
    """
    wrong: list[int] = []
    step = SCANNED_BYTES // PAGE_BYTES * PAGE_BYTES
    stored = entries.memory
    slots = min(layout.slots, len(entries.words))
    total = slots * layout.entry_bytes
    for begin in range(0, total, step):
        buffer = page_buffer(min(step, padded(total - begin)))
        file.read([buffer], layout.entries_at + begin)
        end = min(begin + step, total)
        stored[begin:end] = buffer[: end - begin]
    rows = max(1, SCANNED_BYTES // layout.entry_bytes)
    for first in range(0, slots, rows):
        words = entries.words[first : min(first + rows, slots)]
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
        pages.append((buffer, layout.entries_at + begin))
    return pages


def _checks(words: Words) -> Words:
    """A check of each entry but its flags, 32 bits: multilinear hashing (Lemire and Kaser 2014), 0 for an empty one."""
    raw = hashlib.shake_128(MAGIC).digest(words.shape[1] * 8)
    factors = np.frombuffer(raw, np.uint64) | np.uint64(1)
    own = words.copy()
    own[:, META] &= _DEPTH
    found: Words = (own * factors).sum(axis=1, dtype=np.uint64) >> _HIGH
    return found
