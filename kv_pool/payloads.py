"""What a request's KV is of no use without (its StoredRequest, as bytes), in pages of the shard's segment.

The pages lie behind the allocation table, and the table's records name them. Bytes are written to free pages before
the record that names them, and pages are free only after the record that does so no more: a killed pool process
leaves every payload whole for its successor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from alignedserve.errors import TransferError
from alignedserve.kv_pool.records import Payload

PAGE_BYTES = 1024
# For each block of the pool, however many tokens it has: prompts that n = 16 answers share are here 16 times. Pages
# that were never used take up no memory.
PAGES_PER_BLOCK = 4
LEAST_PAGES = 1024


def payload_pages(capacity_blocks: int) -> int:
    """How many pages a pool of so many blocks has."""
    return LEAST_PAGES + capacity_blocks * PAGES_PER_BLOCK


class PayloadPages:
    """Pages of `memory`, handed out last freed first, so that few are ever touched."""

    def __init__(self, memory: memoryview, used: Iterable[Payload]) -> None:
        """`used`: what a predecessor has left. Raises TransferError where two claim one page, or one is not there."""
        self._memory = memory
        self._capacity = len(memory) // PAGE_BYTES
        claimed = [page for payload in used for page in payload.page_ids]
        taken = set(claimed)
        if len(taken) != len(claimed) or max(taken, default=-1) >= self._capacity:
            raise TransferError("the allocation table contradicts itself: payloads share pages, or lie nowhere")
        self._untouched = max(taken, default=-1) + 1  # this page and those behind it were never used
        self._free = [page for page in range(self._untouched) if page not in taken]

    @property
    def used_pages(self) -> int:
        return self._untouched - len(self._free)

    def write(self, data: bytes) -> Payload | None:
        """Bytes to be read again; None where there is no room for them. Nothing is kept of no bytes."""
        count = -(-len(data) // PAGE_BYTES)
        if count > self._capacity - self.used_pages:
            return None
        pages = [self._take() for _ in range(count)]
        for number, page in enumerate(pages):
            part = data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
            self._memory[page * PAGE_BYTES : page * PAGE_BYTES + len(part)] = part
        return Payload(tuple(pages), len(data), zlib.crc32(data))

    def read(self, payload: Payload) -> bytes:
        """What was written. Raises TransferError where it is not the same any more."""
        pages = (self._memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] for page in payload.page_ids)
        data = b"".join(pages)[: payload.length]
        if zlib.crc32(data) != payload.checksum:
            raise TransferError("a stored request was changed where it lay")
        return data

    def free(self, payload: Payload) -> None:
        """No record names it any more."""
        self._free.extend(payload.page_ids)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._untouched += 1
        return self._untouched - 1
