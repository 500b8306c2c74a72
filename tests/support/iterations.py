"""A decode worker with the real iteration scheduler, but without an engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from alignedserve.config import DecodeConfig
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import BufferKind, Candidate, IterationPlan
from support.chains import chain_of
from support.core_cell import key


def names(items: Iterable[Any]) -> list[str]:
    """The key of an item that has a key or is a key."""
    return [getattr(item, "key", item).request_id for item in items]


class Worker:
    """Executes plans; an iteration takes one second. Copies end at once or, if not `instant`, when a test ends them.

    `lease`: blocks of the candidate request buffer for evictions. The other arguments are the scheduler's.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int = 4,
        *,
        instant: bool = True,
        lease: int = 1000,
        starvation_after_s: float = float("inf"),
        window: float | None = None,
        pace: Pace | None = None,
        **config: Any,
    ) -> None:
        self.allocator, self.block_size = BlockAllocator(capacity, "decode-0"), block_size
        self.config = DecodeConfig(**{"join_iterations": 2, **config})
        self.scheduler = IterationScheduler(
            self.config,
            self.allocator,
            block_size,
            starvation_after_s=starvation_after_s,
            join_window=window,
            pace=pace,
        )
        self.scheduler.set_requests_buffer_lease(lease)
        self.now_s = 0.0
        self._instant = instant

    def offer(
        self,
        name: object,
        kv_tokens: int,
        most: int | None = None,
        buffer: BufferKind = BufferKind.BATCH,
        batch_id: int = 1,
        *,
        group: str = "",
        shared: int = 0,
        due_s: float = math.inf,
        evictions: int = 0,
        rank: int = 0,
    ) -> None:
        most = most or kv_tokens + 8
        of_buffer = buffer, batch_id, due_s
        chain = chain_of([group] * shared, self.block_size)
        candidate = Candidate(key(name), kv_tokens, most, chain, *of_buffer, evictions=evictions, rank=rank)
        self.scheduler.offer(candidate, self.now_s)

    def plan(self) -> IterationPlan:
        plan = self.scheduler.plan(self.now_s)
        if self._instant:
            for join in plan.joins:
                self.scheduler.copied_in(join.key)
            for evict in plan.evictions:
                self.scheduler.copied_out(evict.key)
        self.scheduler.check_integrity()
        return plan

    def run(self, plan: IterationPlan, finished: Collection[str] = ()) -> None:
        self.scheduler.advance([(item.key, item.key.request_id in finished) for item in plan.run])
        self.scheduler.check_integrity()
        self.now_s += 1

    def step(self, finished: Collection[str] = ()) -> IterationPlan:
        plan = self.plan()
        self.run(plan, finished)
        return plan
