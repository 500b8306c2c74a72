"""ORCA: iteration-level scheduling with selective batching (its algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection

from alignedserve.request import RequestKey
from alignedserve.scheduler.colocated.base import MixedPlan, Options
from alignedserve.scheduler.colocated.continuous import ContinuousScheduler, Draft, whole
from alignedserve.scheduler.instance.block_allocator import BlockAllocator


class OrcaScheduler(ContinuousScheduler):
    """Each pass takes up to `max_batch` requests that are in no other pass, by arrival.

    A prompt is computed in one pass. A new request reserves blocks for its maximum length, so that no request is ever
    preempted. `n_workers` batches are in flight, one for each pipeline stage.
    """

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        super().__init__(options, allocator, block_size)
        self._max_batch = whole(options, "max_batch")
        self._workers = whole(options, "n_workers")
        self._in_flight: set[RequestKey] = set()

    @property
    def depth(self) -> int:
        return self._workers

    @property
    def stages(self) -> int:
        return self._workers

    def done(self, plan: MixedPlan, finished: Collection[RequestKey]) -> None:
        self._in_flight.difference_update(plan.keys())
        super().done(plan, finished)

    def quiet_passes(self, plan: MixedPlan) -> int:
        """With several batches in flight, passes are run one by one."""
        return super().quiet_passes(plan) if self._workers == 1 else 0

    def _fill(self, draft: Draft, now_s: float) -> None:
        selected = 0
        for key, member in self._running.items():
            if selected == self._max_batch:
                return
            if key not in self._in_flight:
                draft.add(member, member.left)
                self._in_flight.add(key)
                selected += 1
        while self._waiting and selected < self._max_batch:
            member = next(iter(self._waiting.values()))
            if not self._cover(member, member.request.max_total_tokens):
                return
            self._admit(member)
            draft.add(member, member.left)
            self._in_flight.add(member.request.key)
            selected += 1
