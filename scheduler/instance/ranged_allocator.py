"""The blocks of a store in equal ranges, one for each rank that holds all KV of its own requests.

A block goes back to its range. So the allocator is several ones with one numbering, and one set of books.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from alignedserve.errors import AccountingError
from alignedserve.scheduler.instance.block_allocator import BlockAllocator, Holder, Writer


class RangedAllocator(BlockAllocator):
    """Range `r` has the blocks `r * each` to `(r + 1) * each - 1`. No blocks are leased to writers."""

    def __init__(self, ranges: int, each: int, store_id: str) -> None:
        """Raises ValueError unless there is a range, and a block in each."""
        if ranges < 1 or each < 1:
            raise ValueError("there must be at least 1 range of at least 1 block")
        super().__init__(ranges * each, store_id)
        self.ranges, self.each = ranges, each
        self._free.clear()  # blocks that have just become free, on their way to the stack of their range
        self._free_in = [list(range((number + 1) * each - 1, number * each - 1, -1)) for number in range(ranges)]

    def range_of(self, block: int) -> int:
        return block // self.each

    def available_in(self, number: int) -> int:
        """Blocks of the range that can be handed out now."""
        return len(self._free_in[number])

    def available_beside(self, block: int) -> int:
        """In the range of `block`."""
        return self.available_in(block // self.each)

    @property
    def request_blocks(self) -> int:
        return self.each

    @property
    def free_blocks(self) -> int:
        return sum(map(len, self._free_in))

    @property
    def available_blocks(self) -> int:
        return self.free_blocks

    def allocate_in(self, number: int, count: int, holder: Holder) -> list[int] | None:
        """`count` free blocks of the range for `holder`, or None (and nothing changes) if fewer are available."""
        free = self._free_in[number]
        if count > len(free):
            return None
        if count <= 0:
            return []
        block_ids = free[: -count - 1 : -1]
        del free[-count:]
        self._give(block_ids, holder)
        return block_ids

    def allocate(self, count: int, holder: Holder) -> list[int] | None:
        """In the range that has most blocks available."""
        return self.allocate_in(max(range(self.ranges), key=self.available_in), count, holder)

    def allocate_one(self, holder: Holder) -> int | None:
        found = self.allocate(1, holder)
        return found[0] if found else None

    def lease(self, count: int, writer: Writer) -> list[int]:
        """Raises AccountingError."""
        raise AccountingError(f"{self.store_id}: no blocks of a store in ranges are leased, and {writer} asks for some")

    def _drop(self, block: int, holder: Holder) -> None:
        super()._drop(block, holder)
        if self._free:
            self._free_in[block // self.each].append(self._free.pop())

    def _unused(self) -> Collection[int]:
        return list(chain(self._free, *self._free_in))

    def check_integrity(self) -> None:
        super().check_integrity()
        for number, free in enumerate(self._free_in):
            wrong = [block for block in free if block // self.each != number]
            if wrong:
                raise AccountingError(f"{self.store_id}: block {wrong[0]} is free in range {number}, not in its own")
