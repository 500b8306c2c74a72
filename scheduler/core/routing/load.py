"""Chooses the prefill instance for a prompt: the one with the least predicted time to first token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.scheduler.core.pool_shard import PoolShard
from alignedserve.scheduler.core.prefill_queue import QueuedGroup
from alignedserve.scheduler.cost.pass_model import CostModel, LinearCostModel


@dataclass(slots=True)
class PrefillLoad:
    """The work that one prefill instance was given, and its speed as learned from its own chunks."""

    prefill_id: str
    cache_tokens: int = 0  # the longest prompt that it can take; 0: not known yet
    pending_tokens: int = 0
    background_tokens: int = 0  # of those, of prompts that let all others go first
    reading_s: float = 0.0  # of the pending prompts: predicted time for attention to cached and earlier tokens
    cost: CostModel = field(default_factory=LinearCostModel)
    copy_s_per_token: float = 0.0  # of cached prefixes from other shards, as measured; 0: not known
    home: PoolShard | None = None  # its shard; set by `CoreState.place`, since each prompt reads it of all instances

    def begin(self, tokens: int, background: bool = False, reading_s: float = 0.0) -> None:
        self.pending_tokens += tokens
        self.background_tokens += tokens * background
        self.reading_s += reading_s

    def drop(self, tokens: int, background: bool = False, reading_s: float = 0.0) -> None:
        """A prompt was computed, or removed without being computed."""
        self.pending_tokens -= tokens
        self.background_tokens -= tokens * background
        self.reading_s = max(0.0, self.reading_s - reading_s) if self.pending_tokens else 0.0

    def ahead_tokens(self, background: bool = False) -> int:
        """Tokens that are computed before a prompt that arrives now."""
        return self.pending_tokens if background else self.pending_tokens - self.background_tokens

    def ahead_s(self, background: bool = False) -> float:
        """Predicted time until a prompt that arrives now is begun."""
        return self.predicted_ttft_s(0, background)

    def predicted_ttft_s(self, tokens: int, background: bool = False) -> float:
        """Until so many tokens that arrive now are computed, without what they read of cached and earlier tokens."""
        ahead = self.ahead_tokens(background)
        seconds = self.cost.predict_prefill_s(ahead + tokens)
        return seconds + self.reading_s * ahead / self.pending_tokens if self.reading_s else seconds

    def late_s(self, group: QueuedGroup, pool_id: str, background: bool = False, more_tokens: int = 0) -> float:
        """By how much the shard's disk is predicted to be later than the instance, which computes other prompts first.

        `more_tokens`: that it computes before, beside those it was given.
        """
        ready_s = group.reads_s.get(pool_id, 0.0) if group.reads_s else 0.0
        return max(0.0, ready_s - self.predicted_ttft_s(more_tokens, background)) if ready_s else 0.0

    @property
    def pool_id(self) -> str:
        """Of its shard; "" if it has none yet."""
        return "" if self.home is None else self.home.pool_id

    def work(self, group: QueuedGroup) -> int:
        """Tokens of the group's prompt that it would compute."""
        return group.work_at(self.pool_id, self.prefill_id)


def able_to_prefill(
    loads: Iterable[PrefillLoad], group: QueuedGroup, queue_tokens: int, background: bool = False
) -> list[PrefillLoad]:
    """The instances that can be given the group's prompt now.

    At most `queue_tokens` are dispatched ahead of computing, except to an idle instance: a prompt that waits here can
    still go elsewhere.
    """
    found = []
    for load in loads:
        ahead = load.ahead_tokens(background)
        if load.cache_tokens >= group.tokens and (not ahead or ahead + load.work(group) <= queue_tokens):
            found.append(load)
    return found
