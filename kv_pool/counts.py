"""What a shard tells writers and others about its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.kv_pool.records import WriterKey


@dataclass(frozen=True, slots=True)
class Grant:
    """A reply to a writer: these blocks are leased to it."""

    writer: WriterKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Numbers of blocks: `capacity = free + owned + cached`. `requests` is the number of requests that hold blocks.

    Leased blocks count as free, quarantined blocks as owned. `wanted` blocks were asked for and are not granted yet.
    """

    capacity: int
    free: int
    owned: int
    cached: int
    leased: int
    requests: int
    wanted: int
