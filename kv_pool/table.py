"""The allocation table: a journal in the pool's segment, in front of the blocks.

The memory outlives the process, so a successor reads here which blocks are held and leased. A record is appended as
bytes, and becomes visible by one aligned 8-byte write of its length and checksum in front of them. So a process that is
killed has either written a record or not. When the journal is twice as large as the live state (or its region is full),
that state is written to the other region, and one 8-byte write makes that region active. Few pages are ever touched.

    page 0    magic, capacity, block bytes, region bytes, geometry fingerprint; at byte 64 the active region's number;
              at byte 72 whether the prefix index is in use
    region 1  [length and checksum | record, padded to 8 bytes] ... 0
    region 2  likewise
    pages     of payloads (`payloads.py`), which records of region 1 or 2 name
    entries   of the prefix index (`entries.py`)

One process writes, and no other process reads meanwhile: the node agent fences a shard's process before a successor
starts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

from alignedserve.errors import GeometryMismatchError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.entries import LINE_BYTES, IndexEntries, entry_bytes
from alignedserve.kv_pool.payloads import PAGE_BYTES, PayloadPages, payload_pages
from alignedserve.kv_pool.records import PoolState, Record, decode, encode

MAGIC = b"ASKVTAB4"
HEADER_BYTES = 4096
BYTES_PER_BLOCK = 256  # of a region: enough for a block's id, checksum and page in 16 holdings, or for one holding
MOST_ALONE_BYTES = 64  # of a region for a block of a request that shares none, on average
LEAST_SLACK_BYTES = 1 << 18  # a journal is rewritten when it has grown by its first size, and by at least this
ROOM_SHARE = 7 / 8  # of regions and of payloads' pages: what is under way needs room, too
SPARE_BYTES = 4096  # only records that shrink the state may use the end of a region
_HEADER = struct.Struct("<8sQQQ32s")
_ACTIVE_WORD = 64 // 8
_INDEX_WORD = 72 // 8


def region_bytes(capacity_blocks: int) -> int:
    """Room for the live state in the worst case, in whole pages. Untouched pages take up no memory."""
    return -(-((1 << 20) + capacity_blocks * BYTES_PER_BLOCK) // 4096) * 4096


def table_bytes(capacity_blocks: int, block_size: int = 16) -> int:
    """Bytes to leave in front of the blocks (`HostBlockStore.create(front_bytes=...)`)."""
    size = HEADER_BYTES + 2 * region_bytes(capacity_blocks) + payload_pages(capacity_blocks) * PAGE_BYTES
    return -(-size // LINE_BYTES) * LINE_BYTES + capacity_blocks * entry_bytes(block_size)


class AllocationTable:
    """The journal. `found` is the state that a predecessor left; `append` and `rewrite` continue from it.

    `payloads`: the payload pages that follow it.
    """

    def __init__(self, memory: memoryview, geometry: KvGeometry, capacity_blocks: int, *, region: int = 0) -> None:
        """Open the table in `memory`, or create it if there is none. `region`: bytes of a region, for tests.

        Raises GeometryMismatchError if the table has another geometry or capacity, and TransferError if it is damaged
        or `memory` is too small.
        """
        self._region_bytes = region or region_bytes(capacity_blocks)
        pages_at = HEADER_BYTES + 2 * self._region_bytes
        size = pages_at + payload_pages(capacity_blocks) * PAGE_BYTES
        if memory.nbytes < size:
            raise TransferError(f"an allocation table of {size} bytes does not fit in {memory.nbytes} bytes")
        self._block_size = geometry.block_size
        index_at = -(-size // LINE_BYTES) * LINE_BYTES
        self._index = memory.cast("B")[index_at : index_at + capacity_blocks * entry_bytes(geometry.block_size)]
        self._bytes = memory.cast("B")[:size]
        self._words = self._bytes.cast("Q")
        self.capacity_blocks = capacity_blocks
        header = _HEADER.pack(
            MAGIC, capacity_blocks, geometry.block_bytes, self._region_bytes, geometry.fingerprint.encode()
        )
        if not self._words[0]:
            self._format(header)
        elif bytes(self._bytes[: _HEADER.size]) != header:
            magic, capacity, block_bytes, _, fingerprint = _HEADER.unpack(self._bytes[: _HEADER.size])
            name = fingerprint.rstrip(b"\0").decode(errors="replace")
            raise GeometryMismatchError(
                f"the pool's memory holds {capacity} blocks of {block_bytes} bytes (geometry {name}, {magic!r}), not "
                f"{capacity_blocks} of {geometry.block_bytes} ({geometry.fingerprint}: {geometry.describe()})"
            )
        self._begin = self._end = self._at = self._rewrite_at = 0
        self._enter(self._words[_ACTIVE_WORD])
        self.found = self._read()
        self._allow_slack()
        payloads = (holding.payload for holding in self.found.holdings.values() if holding.payload is not None)
        self.payloads = PayloadPages(self._bytes[pages_at:], payloads)

    def open_index(self) -> IndexEntries:
        """The entries of the prefix index. Raises TransferError if the memory has no room for them."""
        if self._index.nbytes < self.capacity_blocks * entry_bytes(self._block_size):
            raise TransferError(f"the entries of a prefix index do not fit in {self._index.nbytes} bytes")
        self._words[_INDEX_WORD] = 1
        return IndexEntries(self._index, self._block_size)

    def forget_index(self) -> None:
        """This process has no prefix index: blocks change, and what a predecessor indexed is no longer true."""
        if self._words[_INDEX_WORD]:
            IndexEntries(self._index, self._block_size).generations[:] = 0
            self._words[_INDEX_WORD] = 0

    def room(self, record_bytes: int) -> int:
        """How many blocks more requests may surely hold, while the records of all holdings have `record_bytes` bytes.

        At least as many as are free, unless requests share far more blocks than they have for themselves: a holding
        names all of its blocks, and its payload has all of its tokens.
        """
        bytes_left = int(self._region_bytes * ROOM_SHARE) - record_bytes
        pages_left = int(self.payloads.pages * ROOM_SHARE) - self.payloads.used_pages
        return max(0, min(bytes_left // MOST_ALONE_BYTES, pages_left))

    def state(self) -> PoolState:
        """The state in the table, read again from memory. Raises TransferError if the table is damaged."""
        return self._read()

    def append(self, record: Record, *, shrinks: bool = False) -> bool:
        """Append `record`. Returns False if a `rewrite` is due, or if the region has no room.

        `shrinks`: the record does not enlarge the state, so it may use the spare end of the region.
        """
        data = encode(record)
        following = self._at + 8 + _padded(len(data))
        if following > self._rewrite_at or not self._has_room(following, shrinks):
            return False
        self._put(data)
        return True

    def rewrite(self, records: Iterable[Record]) -> None:
        """Write exactly `records` to the other region, and make it active.

        Raises TransferError, and changes nothing, if they do not fit.
        """
        before = (self._begin, self._end, self._at)
        active = self._words[_ACTIVE_WORD]
        self._enter(3 - active)
        self._words[self._begin // 8] = 0
        self._at = self._begin
        for record in records:
            data = encode(record)
            if not self._has_room(self._at + 8 + _padded(len(data)), shrinks=True):
                self._begin, self._end, self._at = before
                self._rewrite_at = self._end  # a rewrite frees nothing: use the rest of the region first
                raise TransferError("the allocation table of the KV pool is full")
            self._put(data)
        self._words[_ACTIVE_WORD] = 3 - active
        self._allow_slack()

    def _has_room(self, following: int, shrinks: bool) -> bool:
        return following + 8 <= self._end - (0 if shrinks else SPARE_BYTES)

    def _allow_slack(self) -> None:
        self._rewrite_at = self._at + max(LEAST_SLACK_BYTES, self._at - self._begin)

    def _format(self, header: bytes) -> None:
        for region in (1, 2):
            self._enter(region)
            self._words[self._begin // 8] = 0
        self._words[_ACTIVE_WORD] = 1
        self._bytes[8 : len(header)] = header[8:]
        self._words[0] = int.from_bytes(header[:8], "little")  # the magic comes last: it makes the table valid

    def _enter(self, region: int) -> None:
        if region not in (1, 2):
            raise TransferError(f"the allocation table is damaged: its active region is {region}")
        self._begin = HEADER_BYTES + (region - 1) * self._region_bytes
        self._end = self._begin + self._region_bytes

    def _put(self, data: bytes) -> None:
        start = self._at + 8
        following = start + _padded(len(data))
        self._words[following // 8] = 0  # mark the end before the record in front of it becomes visible
        self._bytes[start : start + len(data)] = data
        self._words[self._at // 8] = len(data) << 32 | zlib.crc32(data)
        self._at = following

    def _read(self) -> PoolState:
        """Apply the records of the active region, and find its end. Raises TransferError if it is damaged."""
        state, at = PoolState(), self._begin
        while word := self._words[at // 8]:
            length, checksum = word >> 32, word & 0xFFFFFFFF
            data = bytes(self._bytes[at + 8 : at + 8 + length])
            following = at + 8 + _padded(length)
            if following + 8 > self._end or zlib.crc32(data) != checksum:
                raise TransferError(f"the allocation table is damaged at byte {at}")
            state.apply(decode(data))
            at = following
        self._at = at
        return state


def _padded(length: int) -> int:
    return -(-length // 8) * 8
