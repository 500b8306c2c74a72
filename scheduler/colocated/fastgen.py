"""DeepSpeed-FastGen, Dynamic SplitFuse: long prompts are split and short ones fused into passes of equal size."""

from __future__ import annotations

from alignedserve.scheduler.colocated.base import Options
from alignedserve.scheduler.colocated.continuous import ActiveRequest, ContinuousScheduler, Draft, whole
from alignedserve.scheduler.instance.block_allocator import BlockAllocator


class FastGenScheduler(ContinuousScheduler):
    """All decodes first, then prompts, FCFS. `token_budget` is for both.

    A prompt is added only if the cache has KV room for all of its remaining tokens. A decode without a free block sits
    the pass out. If nothing can run, the last request that holds KV is flushed and recomputed later.
    """

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        super().__init__(options, allocator, block_size)
        self._max_num_seqs = whole(options, "max_num_seqs")
        self._budget = whole(options, "token_budget", low=self._max_num_seqs)

    def _fill(self, draft: Draft, now_s: float) -> None:
        self._schedule(draft)
        while not draft.tokens and self._running:
            self._preempt(next(reversed(self._running.values())), draft)
            self._schedule(draft)

    def _schedule(self, draft: Draft) -> None:
        running = list(self._running.values())
        for member in running:
            if member.decoding and draft.tokens < self._budget and self._cover(member, 1):
                draft.add(member, 1)
        for member in running:  # at most one: the prompt that was split last
            if not member.decoding and not self._add_prompt(member, draft):
                return
        while self._waiting and len(self._running) < self._max_num_seqs:
            member = next(iter(self._waiting.values()))
            if not self._add_prompt(member, draft):
                return
            self._admit(member)

    def _add_prompt(self, member: ActiveRequest, draft: Draft) -> bool:
        tokens = min(member.left, self._budget - draft.tokens)
        needed = -(member.known // -self._block_size) - member.blocks
        if tokens <= 0 or needed > self._allocator.available_blocks or not self._cover(member, tokens):
            return False
        draft.add(member, tokens)
        return True
