"""What the core believes the KV pool holds: committed and reserved blocks, and copies that could be dropped.

The pool counts the truth. The ledger runs ahead of it by what is in flight, and takes over from each report what it
did not know of (blocks that several answers share, writers' leases).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey


@dataclass(slots=True)
class _Report:
    capacity_blocks: int
    free_blocks: int


class PoolLedger:
    """Blocks by request. Every operation is O(1)."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}  # by pool shard
        self._committed: dict[RequestKey, int] = {}
        self._reserved: dict[RequestKey, int] = {}
        self._droppable: dict[RequestKey, None] = {}  # decoding, with a clean copy; oldest first
        self.droppable_blocks = 0  # of those copies
        self._unknown = 0  # used, at the last report, beyond what is committed or reserved here
        self.capacity = 0
        self.committed = 0
        self.reserved = 0

    def report(self, pool_id: str, capacity_blocks: int, free_blocks: int) -> None:
        self._reports[pool_id] = _Report(capacity_blocks, free_blocks)
        self._take_stock()

    def lose(self, pool_id: str) -> None:
        self._reports.pop(pool_id, None)
        self._take_stock()

    @property
    def pool_ids(self) -> Iterable[str]:
        """Shards that have reported."""
        return self._reports

    @property
    def free(self) -> int:
        """Blocks that nothing committed lies in, as far as is known; reserved ones among them."""
        return max(0, self.capacity - self.committed - self._unknown)

    def reserve(self, key: RequestKey, blocks: int) -> None:
        """The request is being prefilled and will need so many."""
        self._reserved[key] = blocks
        self.reserved += blocks

    def commit(self, key: RequestKey, blocks: int) -> None:
        """So many of the pool's blocks hold the request's KV now, and nobody else's."""
        added = blocks - self._committed.get(key, 0)
        reserved = self._reserved.pop(key, None)
        if reserved is None:  # the last report may have counted these already
            self._unknown = max(0, self._unknown - added)
        self.reserved -= reserved or 0
        self.pin(key)
        self.committed += added
        self._committed[key] = blocks

    def committed_of(self, key: RequestKey) -> int | None:
        """Blocks that hold this request's KV and nobody else's; None where the pool has no copy of it."""
        return self._committed.get(key)

    def mark_droppable(self, key: RequestKey) -> None:
        """The request decodes, or waits to be prefilled again: its copy here is clean, and could go."""
        if key in self._committed and key not in self._droppable:
            self._droppable[key] = None
            self.droppable_blocks += self._committed[key]

    def pin(self, key: RequestKey) -> None:
        """Its copy is in use: it is not to be dropped."""
        if key in self._droppable:
            del self._droppable[key]
            self.droppable_blocks -= self._committed[key]

    def drop_copies(self, blocks: int) -> list[RequestKey]:
        """Give up clean copies, oldest first, until `blocks` more are free; whose."""
        dropped = []
        freed = 0
        while freed < blocks and self._droppable:
            key = next(iter(self._droppable))
            freed += self._committed[key]
            dropped.append(key)
            self.release(key)
        return dropped

    def leave(self, key: RequestKey) -> None:
        """The request is gone from here, but not from the pool: its next epoch may adopt what lies there."""
        blocks = self._committed.get(key, 0)
        self.release(key)
        self._unknown += blocks

    def release(self, key: RequestKey) -> bool:
        """The request has nothing here any more. False where it had nothing committed."""
        self.reserved -= self._reserved.pop(key, 0)
        self.pin(key)
        blocks = self._committed.pop(key, None)
        self.committed -= blocks or 0
        return blocks is not None

    def check_integrity(self) -> None:
        if self.committed != sum(self._committed.values()) or self.reserved != sum(self._reserved.values()):
            raise AccountingError("the pool ledger does not match a recount")
        if self.droppable_blocks != sum(self._committed[key] for key in self._droppable if key in self._committed):
            raise AccountingError("the copies that could be dropped do not match a recount")
        if not self._droppable.keys() <= self._committed.keys() or self._droppable.keys() & self._reserved.keys():
            raise AccountingError("the pool ledger would drop a copy that is in use, or that it does not have")

    def _take_stock(self) -> None:
        self.capacity = sum(report.capacity_blocks for report in self._reports.values())
        used = self.capacity - sum(report.free_blocks for report in self._reports.values())
        self._unknown = max(0, used - self.committed - self.reserved)
