"""What the core believes one shard holds: committed and reserved blocks, and copies that could be dropped.

The shard's own count is authoritative. This one runs ahead of it by the messages in flight, and takes from each report
the blocks it did not know of (blocks that several answers share, writers' leases).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey

if TYPE_CHECKING:
    from alignedserve.scheduler.core.request_table import Record


@dataclass(slots=True)
class _Report:
    capacity_blocks: int
    free_blocks: int


class PoolShard:
    """Blocks by request. Every operation is O(1). `waiting`: the requests whose KV waits here, in order of arrival.

    `background`: those of them that only take what others leave.
    """

    def __init__(self, pool_id: str) -> None:
        self.pool_id = pool_id
        self.waiting: dict[RequestKey, Record] = {}
        self.background: dict[RequestKey, Record] = {}
        self.reports: dict[str, _Report] = {}
        self._committed: dict[RequestKey, int] = {}
        self._reserved: dict[RequestKey, int] = {}
        self._droppable: dict[RequestKey, None] = {}  # decoding, with a clean copy; oldest first
        self.droppable_blocks = 0  # of those copies
        self._unknown = 0  # used at the last report, but not committed or reserved here
        self.up = False  # its process has reported, and is not away
        self.capacity = 0
        self.committed = 0
        self.reserved = 0

    def report(self, pool_id: str, capacity_blocks: int, free_blocks: int) -> None:
        self.reports[pool_id] = _Report(capacity_blocks, free_blocks)
        self._take_stock()

    def lose(self, pool_id: str) -> None:
        """Its process is away. Its memory remains, and a successor takes it over."""
        self.reports.pop(pool_id, None)
        self._take_stock()

    @property
    def free(self) -> int:
        """Blocks that hold no committed copy, as far as is known; includes reserved ones."""
        return max(0, self.capacity - self.committed - self._unknown)

    def reserve(self, key: RequestKey, blocks: int) -> None:
        """The request is being prefilled and will need `blocks` blocks."""
        self._reserved[key] = blocks
        self.reserved += blocks

    def cancel_reserve(self, key: RequestKey) -> None:
        self.reserved -= self._reserved.pop(key, 0)

    def commit(self, key: RequestKey, blocks: int) -> None:
        """`blocks` unshared blocks now hold the request's KV."""
        added = blocks - self._committed.get(key, 0)
        reserved = self._reserved.pop(key, None)
        if reserved is None:  # the last report may already include these blocks
            self._unknown = max(0, self._unknown - added)
        self.reserved -= reserved or 0
        self.pin(key)
        self.committed += added
        self._committed[key] = blocks

    def committed_of(self, key: RequestKey) -> int | None:
        """Unshared blocks that hold this request's KV; None if there is no copy of it."""
        return self._committed.get(key)

    def holders(self) -> list[RequestKey]:
        """The requests that have, or will have, a copy here."""
        return list({**self._committed, **self._reserved})

    def mark_droppable(self, key: RequestKey) -> None:
        """The request decodes, or waits to be prefilled again: its copy here is clean, and may be dropped."""
        if key in self._committed and key not in self._droppable:
            self._droppable[key] = None
            self.droppable_blocks += self._committed[key]

    def pin(self, key: RequestKey) -> None:
        """Its copy is in use: it must not be dropped."""
        if key in self._droppable:
            del self._droppable[key]
            self.droppable_blocks -= self._committed[key]

    def next_to_drop(self) -> tuple[RequestKey, int] | None:
        """The oldest copy that may be dropped, and how many blocks that would free."""
        key = next(iter(self._droppable), None)
        return None if key is None else (key, self._committed[key])

    def leave(self, key: RequestKey) -> None:
        """The request is gone from the core, but its KV remains here: its next epoch may adopt it."""
        blocks = self._committed.get(key, 0)
        self.release(key)
        self._unknown += blocks

    def release(self, key: RequestKey) -> bool:
        """Remove what is committed for the request. Returns False if nothing was."""
        blocks = self._committed.pop(key, None)
        if blocks is None:
            return False
        self.committed -= blocks
        if key in self._droppable:
            del self._droppable[key]
            self.droppable_blocks -= blocks
        return True

    def check_integrity(self) -> None:
        if self.committed != sum(self._committed.values()) or self.reserved != sum(self._reserved.values()):
            raise AccountingError("the pool ledger does not match a recount")
        if self.droppable_blocks != sum(self._committed[key] for key in self._droppable if key in self._committed):
            raise AccountingError("the droppable copies do not match a recount")
        if not self._droppable.keys() <= self._committed.keys() or self._droppable.keys() & self._reserved.keys():
            raise AccountingError("the pool ledger lists a droppable copy that is in use or does not exist")

    def _take_stock(self) -> None:
        self.up = bool(self.reports)
        self.capacity = sum(report.capacity_blocks for report in self.reports.values())
        used = self.capacity - sum(report.free_blocks for report in self.reports.values())
        self._unknown = max(0, used - self.committed - self.reserved)
