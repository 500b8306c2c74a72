"""Which slot of the file has which block: the index of the disk tier, and what is known of copies in host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alignedserve.control.metrics import StoreCount
from alignedserve.kv_pool.block_table import NONE
from alignedserve.kv_pool.disk.layout import DiskLayout
from alignedserve.kv_pool.entries import CHECKSUM, Ids, IndexEntries
from alignedserve.kv_pool.prefix_chain import Chain
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.scheduler.cache.values import CachePolicy
from alignedserve.scheduler.instance.block_allocator import Holder
from alignedserve.scheduler.instance.caching_allocator import CachingAllocator

OPENING, WRITING = "opening", "writing"


def empty_entries(layout: DiskLayout) -> IndexEntries:
    """Entries in memory of this process: in a mapped file each access could wait for the disk, or end the process."""
    return IndexEntries(memoryview(bytearray(layout.slots * layout.entry_bytes)), layout.geometry.block_size)


class DiskSlots:
    """A slot is free (perhaps leased: being written), cached, or held by reads and by writes of what continues it.

    The same index and allocator as in host memory, so the same order of eviction, and prefixes that are never cut.
    """

    def __init__(self, store_id: str, entries: IndexEntries, block_size: int, policy: CachePolicy) -> None:
        """Takes over what is in `entries`."""
        self.store_id = store_id
        self.entries = entries
        self.index = PrefixIndex(entries, block_size, policy)
        self.blocks = CachingAllocator(len(entries.words), store_id, self.index)
        before = entries.valid()
        # No entry may be given a generation that one on disk, which was dropped here, names as its parent's.
        self.index.recover(first=time.time_ns())
        self.dropped: list[int] = np.setdiff1d(before, entries.valid()).tolist()
        """Slots whose entries were valid, but what they continue is not there."""
        slots = self.blocks.lease(self.blocks.capacity, OPENING)
        self.blocks.cache_leased([slot for slot in slots if self.index.indexed[slot]], OPENING)
        self.blocks.return_lease([slot for slot in slots if not self.index.indexed[slot]], OPENING)

    def lease(self, count: int) -> list[int]:
        """Up to `count` slots to write to, in their order on disk. Evicts what is to be given up first."""
        return sorted(self.blocks.lease(count, WRITING))

    def add(self, chain: Chain, found: list[int], slots: list[int], proofs: Sequence[int]) -> None:
        """Leased slots hold the blocks of `chain` that continue the slots `found`, now."""
        self.blocks.cache_leased(slots, WRITING)
        self.index.insert(chain, len(found), slots, found[-1] if found else NONE, proofs)
        self.index.queue.touch([*found, *slots])

    def give_back(self, slots: Sequence[int]) -> None:
        self.blocks.return_lease(slots, WRITING)

    def retain(self, slots: Sequence[int], holder: Holder) -> None:
        self.blocks.retain(slots, holder)

    def release(self, slots: Sequence[int], holder: Holder, *, used: bool) -> None:
        """End a holding of slots of one chain; `used`: a request has use for what they hold."""
        self.blocks.release(slots, holder)
        there = [slot for slot in slots if self.index.indexed[slot]]
        if used and there:
            self.index.queue.use(there)
        if there:
            self.index.queue.touch(self.index.chain_to(there[-1]))

    def remove(self, slots: Sequence[int]) -> None:
        """Forget these slots, an indexed one after those that continue it (`PrefixIndex.begun_by`)."""
        self.index.remove(slots)
        self.blocks.uncache([slot for slot in slots if self.blocks.cached[slot]])

    def proofs(self, slots: Sequence[int]) -> list[int]:
        found: list[int] = self.entries.words[np.array(slots, np.int32), CHECKSUM].tolist()
        return found

    def count(self) -> StoreCount:
        blocks = self.blocks
        return StoreCount(self.store_id, blocks.capacity, blocks.free_blocks, blocks.owned_blocks, blocks.cached_blocks)

    def check_integrity(self) -> None:
        """Recount. Raises AccountingError."""
        self.blocks.check_integrity()
        self.index.check_integrity(self.blocks.cached)


class Copies:
    """Which blocks in host memory have a copy on disk. After a restart nothing is known, and found out by matching."""

    def __init__(self, host: PrefixIndex, slots: DiskSlots) -> None:
        capacity = len(host.indexed)
        self._generations = host.entries.generations
        self._indexed: npt.NDArray[Any] = np.frombuffer(slots.index.indexed, np.uint8)
        self._slot_of = np.full(capacity, -1, np.int32)
        self._source = np.zeros(len(slots.entries.words), np.uint64)  # generation of the block whose copy a slot has
        self._promoted = np.zeros(capacity, np.uint64)  # generation in which a block came from disk, until it is used

    def note(self, block_ids: Sequence[int], slots: Sequence[int]) -> int:
        """These slots have copies of these blocks. Returns how many were not known yet."""
        ids, at = np.array(block_ids, np.int32), np.array(slots, np.int32)
        fresh = len(ids) - int(self.there(ids).sum())
        self._slot_of[ids] = at
        self._source[at] = self._generations[ids]
        return fresh

    def there(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these indexed blocks have a copy. Some that have one may be left out."""
        at = self._slot_of[ids]
        known: npt.NDArray[np.bool_] = at >= 0
        at = np.maximum(at, 0)
        known &= self._source[at] == self._generations[ids]
        known &= self._indexed[at] != 0
        return known

    def promoted(self, block_ids: Sequence[int]) -> None:
        ids = np.array(block_ids, np.int32)
        self._promoted[ids] = self._generations[ids]

    def first_used(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks came from disk and are used for the first time now."""
        ids = np.array(block_ids, np.int32)
        fresh = ids[(self._promoted[ids] == self._generations[ids]) & (self._generations[ids] != 0)]
        self._promoted[fresh] = 0
        return len(fresh)
