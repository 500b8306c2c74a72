"""What the disk tier needs of its shard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from alignedserve.kv_pool.counts import Grant
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.records import WriterKey
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.transfer.block_store import HostBlockStore

DISK = WriterKey("kv_pool", "disk", 1)
"""Leases the blocks that are read from disk. It ends with the shard's process, and its leases with it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """`deliver`: gives grants to writers. `settled`: returns once nothing reads the shard's state in another thread;
    nothing does so before the caller's next `await`. `alone`: until it is left, only the caller changes the state.
    `cost`: of computing prompts; None if it is unknown.
    """

    pool: KvPool
    index: PrefixIndex
    store: HostBlockStore
    deliver: Callable[[Iterable[Grant]], None]
    settled: Callable[[], Awaitable[None]]
    alone: Callable[[], AbstractAsyncContextManager[None]]
    verify: bool = False
    cost: StepCost | None = None
