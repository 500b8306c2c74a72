"""vLLM's scheduler (V1): running requests first, then the queue, prompts in chunks, all within one token budget."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.scheduler.colocated.base import Options
from alignedserve.scheduler.colocated.continuous import ActiveRequest, ContinuousScheduler, Draft, whole
from alignedserve.scheduler.instance.block_allocator import BlockAllocator


class VllmScheduler(ContinuousScheduler):
    """The last admitted request is preempted first, and recomputed. A pass that preempted admits no request.

    `async_scheduling`: a pass is planned while the previous one runs, so that the device never waits for the host. A
    request that arrives in between waits for one more pass.
    """

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        super().__init__(options, allocator, block_size)
        self._max_num_seqs = whole(options, "max_num_seqs")
        self._budget = whole(options, "max_num_batched_tokens", low=self._max_num_seqs)
        self._depth = 2 if options["async_scheduling"] else 1

    @property
    def depth(self) -> int:
        return self._depth

    def _fill(self, draft: Draft, now_s: float) -> None:
        budget = self._budget
        for member in list(self._running.values()):
            tokens = min(member.left, budget - draft.tokens)
            if member.request.key not in self._running or tokens <= 0:
                continue
            if not self._cover_by_preempting(member, tokens, self._latest_first(), draft):
                return
            draft.add(member, tokens)
        while self._waiting and not draft.preempted:
            member = next(iter(self._waiting.values()))
            tokens = min(member.left, budget - draft.tokens)
            if tokens <= 0 or len(self._running) >= self._max_num_seqs or not self._cover(member, tokens):
                return
            self._admit(member)
            draft.add(member, tokens)

    def _latest_first(self) -> Iterator[ActiveRequest]:
        """The last admitted first. Each must be removed before the next is requested."""
        while self._running:
            yield next(reversed(self._running.values()))
