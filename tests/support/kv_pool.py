"""A small shard without a process or memory for KV: only its decisions and its table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.table import AllocationTable, table_bytes

GEOMETRY = KvGeometry("random", "float32", 2, 2, 8, 4)
CAPACITY = 20
PREFILL, OTHER = WriterKey("prefill", "prefill-0", 5), WriterKey("prefill", "prefill-1", 5)
DECODE = WriterKey("decode", "decode-0", 5)


def table_memory() -> memoryview:
    return memoryview(bytearray(table_bytes(CAPACITY)))


def open_pool(memory: memoryview, reserve: int = 0, region: int = 0) -> KvPool:
    """A shard that continues from the state of the table in `memory`."""
    table = AllocationTable(memory, GEOMETRY, CAPACITY, region=region)
    return KvPool("kv_pool-0", table, GEOMETRY.block_size, reserve_blocks=reserve)


def leased(pool: KvPool, writer: WriterKey, count: int) -> list[int]:
    """Lease blocks, which must be free: the writer gets them all at once."""
    (grant,) = pool.want(writer, count)
    assert (grant.writer, len(grant.block_ids)) == (writer, count)
    return list(grant.block_ids)


def drop_prefix(pool: KvPool, root: bytes, token_ids: Sequence[int], spared: Collection[int] = ()) -> int:
    """Drop what begins with these tokens, as the shard does. Returns how many blocks there were."""
    return pool.remove(pool.begun_by(root, token_ids).tolist(), spared)[0]
