"""Static batching, as before ORCA. For comparison."""

from __future__ import annotations

from alignedserve.scheduler.colocated.base import Options
from alignedserve.scheduler.colocated.continuous import ContinuousScheduler, Draft, whole
from alignedserve.scheduler.instance.block_allocator import BlockAllocator


class StaticScheduler(ContinuousScheduler):
    """Takes up to `max_batch` requests, FCFS, with blocks for their maximum lengths, then none until all have ended.

    Prompts are computed in one pass. A request that ends early leaves its place empty, but costs nothing from then on.
    """

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        super().__init__(options, allocator, block_size)
        self._max_batch = whole(options, "max_batch")

    def _fill(self, draft: Draft, now_s: float) -> None:
        if not self._running:
            while self._waiting and len(self._running) < self._max_batch:
                member = next(iter(self._waiting.values()))
                if not self._cover(member, member.request.max_total_tokens):
                    break
                self._admit(member)
        for member in self._running.values():
            draft.add(member, member.left)
