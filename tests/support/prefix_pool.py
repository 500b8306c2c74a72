"""A small shard with a prefix index whose process can be killed between any two writes to its segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.entries import Ids, IndexEntries, Words
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import digest
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.records import Record
from alignedserve.kv_pool.table import AllocationTable, table_bytes
from alignedserve.scheduler.cache.values import CachePolicy, LruPolicy

GEOMETRY = KvGeometry("random", "float32", 2, 2, 8, 4)


class Killed(BaseException):
    """The process ends here."""


class Fuse:
    """Kills the process before its next write number `left`; never if `left` is negative."""

    def __init__(self) -> None:
        self.left = -1
        self.writes = 0

    def tick(self) -> None:
        self.writes += 1
        if self.left == 0:
            self.left = -1
            raise Killed
        self.left = max(-1, self.left - 1)


class FusedEntries(IndexEntries):
    """Writes entry after entry."""

    fuse: Fuse

    def fill(self, ids: Ids, rows: Words) -> None:
        for at in range(len(ids)):
            self.fuse.tick()
            super().fill(ids[at : at + 1], rows[at : at + 1])

    def publish(self, ids: Ids, generations: Words) -> None:
        for at in range(len(ids)):
            self.fuse.tick()
            super().publish(ids[at : at + 1], generations[at : at + 1])

    def withdraw(self, ids: Ids) -> None:
        for at in range(len(ids)):
            self.fuse.tick()
            super().withdraw(ids[at : at + 1])

    def fill_each(
        self,
        block_ids: Sequence[int],
        meta: int,
        checksums: Sequence[int],
        parent: int,
        before: tuple[int, int],
        generation: int,
        digests: bytes,
        tokens: bytes,
    ) -> None:
        self.fuse.tick()
        super().fill_each(block_ids, meta, checksums, parent, before, generation, digests, tokens)
        self.fuse.tick()

    def publish_each(self, block_ids: Sequence[int], generation: int) -> None:
        for number, block in enumerate(block_ids):
            self.fuse.tick()
            super().publish_each([block], generation + number)

    def withdraw_each(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.fuse.tick()
            super().withdraw_each([block])


class FusedTable(AllocationTable):
    fuse: Fuse | None = None

    def open_index(self) -> IndexEntries:
        super().open_index()
        entries = FusedEntries(self._index, GEOMETRY.block_size)
        entries.fuse = self.fuse or Fuse()
        return entries

    def append(self, record: Record, *, shrinks: bool = False) -> bool:
        self._tick()
        written = super().append(record, shrinks=shrinks)
        self._tick()
        return written

    def rewrite(self, records: Iterable[Record]) -> None:
        def ticking() -> Iterator[Record]:
            for record in records:
                self._tick()
                yield record

        super().rewrite(ticking())
        self._tick()

    def _tick(self) -> None:
        if self.fuse is not None:
            self.fuse.tick()


def index_memory(capacity: int) -> memoryview:
    return memoryview(bytearray(table_bytes(capacity, GEOMETRY.block_size)))


def open_indexed(
    memory: memoryview,
    capacity: int,
    policy: CachePolicy | None = None,
    reserve: int = 0,
    fuse: Fuse | None = None,
    digest: Callable[[bytes], bytes] = digest,
) -> tuple[KvPool, PrefixIndex]:
    """A shard, and its index, that continue from the state in `memory`."""
    table = FusedTable(memory, GEOMETRY, capacity)
    table.fuse = fuse
    index = PrefixIndex(table.open_index(), GEOMETRY.block_size, policy or LruPolicy(), digest)
    return KvPool("kv_pool-0", table, GEOMETRY.block_size, reserve_blocks=reserve, index=index), index
