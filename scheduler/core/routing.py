"""Chooses the prefill instance for a prompt: the one with the least predicted time to first token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.scheduler.core.pool_shard import PoolShard
from alignedserve.scheduler.cost.pass_model import CostModel, LinearCostModel


@dataclass(slots=True)
class PrefillLoad:
    """The work that one prefill instance was given, and its speed as learned from its own chunks."""

    prefill_id: str
    cache_tokens: int = 0  # the longest prompt that it can take; 0: not known yet
    pending_tokens: int = 0
    cost: CostModel = field(default_factory=LinearCostModel)
    home: PoolShard | None = None  # its shard; set by `CoreState.place`, since each prompt reads it of all instances

    def begin(self, tokens: int) -> None:
        self.pending_tokens += tokens

    def drop(self, tokens: int) -> None:
        """A prompt was computed, or removed without being computed."""
        self.pending_tokens -= tokens

    def predicted_ttft_s(self, tokens: int) -> float:
        return self.cost.predict_prefill_s(self.pending_tokens + tokens)


def able_to_prefill(
    loads: Iterable[PrefillLoad], tokens: int, queue_tokens: int, kept_tokens: int = 0
) -> list[PrefillLoad]:
    """The instances that can be given a prompt of `tokens` now, of which `kept_tokens` need no computing.

    At most `queue_tokens` are dispatched ahead of computing, except to an idle instance: a prompt that waits here can
    still go elsewhere.
    """
    work = tokens - kept_tokens
    return [
        load
        for load in loads
        if load.cache_tokens >= tokens and (not load.pending_tokens or load.pending_tokens + work <= queue_tokens)
    ]


def choose_prefill(able: Iterable[PrefillLoad], work_tokens: int) -> PrefillLoad | None:
    """The instance with the least predicted time to first token; ties go to the least pending, then to the first.

    Returns None if `able` is empty.
    """
    return min(able, key=lambda load: (load.predicted_ttft_s(work_tokens), load.pending_tokens), default=None)
