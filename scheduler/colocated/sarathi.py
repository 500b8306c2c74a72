"""Sarathi-Serve: stall-free batches. Every pass holds all decodes; prompt chunks fill the rest of the token budget."""

from __future__ import annotations

from alignedserve.errors import ConfigError
from alignedserve.scheduler.colocated.base import Options
from alignedserve.scheduler.colocated.continuous import ActiveRequest, ContinuousScheduler, Draft, whole
from alignedserve.scheduler.instance.block_allocator import BlockAllocator


class SarathiScheduler(ContinuousScheduler):
    """A new request needs blocks for its whole prompt, and a share of `watermark` of the cache must stay free after it.

    `dynamic`: instead of `token_budget`, a chunk fills its pass up to a size that falls from `chunk_high` to
    `chunk_low` in `chunk_steps` equal steps over the first `chunk_tokens` tokens of its prompt, because attention costs
    more for a chunk after a long prefix.
    """

    def __init__(self, options: Options, allocator: BlockAllocator, block_size: int) -> None:
        super().__init__(options, allocator, block_size)
        self._max_num_seqs = whole(options, "max_num_seqs")
        watermark = float(options["watermark"])
        if not 0 <= watermark < 1:
            raise ConfigError(f"option watermark must be at least 0 and below 1, not {watermark}")
        self._reserve = int(allocator.capacity * watermark)
        self._step_tokens = whole(options, "chunk_tokens")
        if not options["dynamic"]:
            self._sizes = [whole(options, "token_budget", low=self._max_num_seqs)]
        else:
            low = whole(options, "chunk_low", low=self._max_num_seqs)
            high, steps = whole(options, "chunk_high", low), whole(options, "chunk_steps")
            self._sizes = [high - (high - low) * step // max(steps - 1, 1) for step in range(steps)]
            self._step_tokens = max(self._step_tokens // steps, 1)

    def _fill(self, draft: Draft, now_s: float) -> None:
        by_arrival = sorted(self._running.values(), key=lambda member: (member.request.arrival_s, member.request.key))
        for member in by_arrival:
            if member.decoding and member.request.key in self._running:
                latest = (other for other in reversed(by_arrival) if other.request.key in self._running)
                if self._cover_by_preempting(member, 1, latest, draft):
                    draft.add(member, 1)
        for member in by_arrival:
            if not member.decoding and member.request.key in self._running:
                self._add_chunk(member, draft)
        while self._waiting and not draft.preempted and len(self._running) < self._max_num_seqs:
            member = next(iter(self._waiting.values()))
            if self._room(member, draft) <= 0 or not self._fits(member):
                return
            self._admit(member)
            self._add_chunk(member, draft)

    def _fits(self, member: ActiveRequest) -> bool:
        """Take blocks for the whole prompt if the reserve stays free. An empty instance needs no reserve."""
        needed = -(member.left // -self._block_size)
        reserve = self._reserve if self._running else 0
        return self._allocator.available_blocks - needed >= reserve and self._cover(member, member.left)

    def _add_chunk(self, member: ActiveRequest, draft: Draft) -> None:
        tokens = min(member.left, self._room(member, draft))
        if tokens > 0:
            draft.add(member, tokens)

    def _room(self, member: ActiveRequest, draft: Draft) -> int:
        """How many more tokens of this prompt the pass may take."""
        step = min(member.computed // self._step_tokens, len(self._sizes) - 1)
        return self._sizes[step] - draft.tokens
