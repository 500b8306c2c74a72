"""The allocator of a store with a prefix cache: a block that nothing holds any more is kept as long as there is room.

owned ──last release──► cached, if it is indexed; else free
leased ──cache_leased──► cached
cached ──retain──► owned                   cached ──no block is free, and one is wanted──► leased or owned
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from alignedserve.errors import AccountingError
from alignedserve.scheduler.instance.block_allocator import BlockAllocator, BlockState, Holder, Writer


class Cache(Protocol):
    """What the allocator asks the index of cached blocks."""

    @property
    def indexed(self) -> bytearray:
        """A flag for each block: whether its content can be found again."""
        ...

    def evict(self, count: int, cached: bytearray) -> list[int]:
        """Forget `count` of the blocks whose flag in `cached` is set, in the order in which they are to be reused."""
        ...


class CachingAllocator(BlockAllocator):
    """Hands out free blocks first, then cached ones, which are evicted at that moment.

    A block may be added to the index while it is owned. It is removed by `evict`, or with `uncache` if it is cached.
    """

    def __init__(self, capacity: int, store_id: str, cache: Cache) -> None:
        super().__init__(capacity, store_id)
        self.cached = bytearray(capacity)
        self._cached = 0
        self._cache = cache
        self._indexed = cache.indexed

    @property
    def available_blocks(self) -> int:
        return len(self._free) + self._cached

    @property
    def cached_blocks(self) -> int:
        return self._cached

    def allocate(self, count: int, holder: Holder) -> list[int] | None:
        if count > self.available_blocks:
            return None
        self._make_room(count)
        return super().allocate(count, holder)

    def allocate_one(self, holder: Holder) -> int | None:
        if self.available_blocks:
            self._make_room(1)
        return super().allocate_one(holder)

    def lease(self, count: int, writer: Writer) -> list[int]:
        if writer not in self._quarantine:
            self._make_room(min(count, self.available_blocks))
        return super().lease(count, writer)

    def retain(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Make `holder` one more holder of owned blocks, or the holder of cached ones."""
        block_ids = self._distinct(block_ids)
        kept = [block for block in block_ids if self.cached[block]]
        if not kept:
            super().retain(block_ids, holder)
            return
        super().retain([block for block in block_ids if not self.cached[block]], holder)  # raises before any change
        self._uncache(kept)
        self._give(kept, holder)

    def cache_leased(self, block_ids: Sequence[int], writer: Writer) -> None:
        """Blocks from the lease of `writer` are cached from now on. Raises like `return_lease`."""
        self._take_leased(block_ids, writer)
        for block in block_ids:
            self.cached[block] = 1
        self._cached += len(block_ids)

    def uncache(self, block_ids: Sequence[int]) -> None:
        """Free cached blocks that are no longer indexed. Raises AccountingError if one is not cached."""
        if not all(self.cached[block] for block in self._distinct(block_ids)):
            raise AccountingError(f"{self.store_id}: {list(block_ids)[:8]} are not all cached")
        self._uncache(block_ids)
        self._free.extend(reversed(block_ids))

    def state(self, block: int) -> BlockState:
        return BlockState.CACHED if self.cached[block] else super().state(block)

    def _make_room(self, count: int) -> None:
        missing = count - len(self._free)
        if missing <= 0:
            return
        found = self._cache.evict(missing, self.cached)
        if len(found) != missing:
            raise AccountingError(f"{self.store_id}: {missing} cached blocks are to go, and {len(found)} were found")
        self.uncache(found)

    def _uncache(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.cached[block] = 0
        self._cached -= len(block_ids)

    def _drop(self, block: int, holder: Holder) -> None:
        if self._indexed[block] and self._sole[block] is not None:
            self._sole[block] = None
            self._owned -= 1
            self.cached[block] = 1
            self._cached += 1
            return
        super()._drop(block, holder)

    def _kept(self) -> Iterable[int]:
        return (block for block, flag in enumerate(self.cached) if flag)

    def _check_counters(self) -> None:
        super()._check_counters()
        if self._cached != self.cached.count(1):
            raise AccountingError(f"{self.store_id}: {self._cached} blocks count as cached, not {self.cached.count(1)}")
