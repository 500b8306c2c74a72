"""Payloads: the StoredRequest of each request, as bytes in pages of the shard's segment.

Without it a request's KV cannot be decoded. The pages follow the allocation table, whose records name them. Bytes are
written to free pages before the record that names the pages, and pages are freed only after a record that no longer
names them. So a killed shard process leaves every payload whole for its successor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from alignedserve.errors import TransferError
from alignedserve.kv_pool.records import Payload

PAGE_BYTES = 1024
# Independent of the block size in tokens. A prompt that n = 16 answers share is stored 16 times. Pages that were never
# used take up no memory.
PAGES_PER_BLOCK = 4
LEAST_PAGES = 1024


def payload_pages(capacity_blocks: int) -> int:
    """The number of payload pages of a shard with `capacity_blocks` blocks."""
    return LEAST_PAGES + capacity_blocks * PAGES_PER_BLOCK


class PayloadPages:
    """Allocates pages of `memory`. The page freed last is reused first, so that few pages are ever touched."""

    def __init__(self, memory: memoryview, used: Iterable[Payload]) -> None:
        """`used`: the payloads that a predecessor left.

        Raises TransferError if two payloads claim one page, or if a page is outside `memory`.
        """
        self._memory = memory
        self._capacity = len(memory) // PAGE_BYTES
        claimed = [page for payload in used for page in payload.page_ids]
        taken = set(claimed)
        if len(taken) != len(claimed) or max(taken, default=-1) >= self._capacity:
            raise TransferError("the allocation table contradicts itself: payloads share or lack pages")
        self._untouched = max(taken, default=-1) + 1  # this page and all later ones were never used
        self._free = [page for page in range(self._untouched) if page not in taken]

    @property
    def pages(self) -> int:
        return self._capacity

    @property
    def used_pages(self) -> int:
        return self._untouched - len(self._free)

    def write(self, data: bytes) -> Payload | None:
        """Write `data` to free pages; None if there is no room. Empty `data` takes no page."""
        count = -(-len(data) // PAGE_BYTES)
        if count > self._capacity - self.used_pages:
            return None
        pages = [self._take() for _ in range(count)]
        for number, page in enumerate(pages):
            part = data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
            self._memory[page * PAGE_BYTES : page * PAGE_BYTES + len(part)] = part
        return Payload(tuple(pages), len(data), zlib.crc32(data))

    def read(self, payload: Payload) -> bytes:
        """The bytes that were written. Raises TransferError if their checksum has changed."""
        pages = (self._memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] for page in payload.page_ids)
        data = b"".join(pages)[: payload.length]
        if zlib.crc32(data) != payload.checksum:
            raise TransferError("a stored request is damaged: its checksum has changed")
        return data

    def free(self, payload: Payload) -> None:
        """Free the pages of a payload that no record names any more."""
        self._free.extend(payload.page_ids)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._untouched += 1
        return self._untouched - 1
