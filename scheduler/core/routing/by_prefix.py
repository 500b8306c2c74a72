"""Routings by cached prefixes: MemServe's global scheduler, and Mooncake's Conductor."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.config import SchedulerConfig
from alignedserve.scheduler.core.prefill_queue import QueuedGroup
from alignedserve.scheduler.core.routing.base import Route, Routing
from alignedserve.scheduler.core.routing.load import PrefillLoad


class _ByPrefix(Routing):
    KNOWS_COMING = True

    def _route(
        self, load: PrefillLoad, group: QueuedGroup, best: tuple[str, int], background: bool, threshold: float = 1.0
    ) -> tuple[float, Route]:
        """Seconds to read from disk, to copy and to compute the prompt there, without the wait for the instance.

        `best`: of the group. What the instance's own shard lacks of it is copied if it is more than `threshold` times
        as long as the own prefix, and if that is quicker than to compute it.
        """
        pool_id, tokens = best
        own = group.tokens - load.work(group)
        computed_s = load.cost.predict_prompt_s(group.tokens - own, own) + load.late_s(group, load.pool_id, background)
        if self.copies is not None and tokens > own * threshold:
            left_s = load.cost.predict_prompt_s(group.tokens - tokens, tokens)
            copied_s = self.copy_s(load, tokens - own) + left_s + load.late_s(group, pool_id, background)
            if copied_s < computed_s:
                return copied_s, Route(load, group.tokens - tokens, pool_id)
        return computed_s, Route(load, group.tokens - own)


class LongestPrefix(_ByPrefix):
    """The longest cached prefix, weighed with load; a longer one is copied if that is quicker (MemServe, section 6).

    An instance is passed over if waiting for it takes longer, by more than the time to compute the whole prompt anew,
    than waiting for the instance that is free first: then no prefix is worth it.
    """

    def choose(self, able: Sequence[PrefillLoad], group: QueuedGroup, background: bool = False) -> Route:
        waits_s = [load.ahead_s(background) for load in able]
        first_s = min(waits_s)
        worth_it = [
            (load.work(group), wait_s, load)
            for load, wait_s in zip(able, waits_s, strict=True)
            if wait_s - first_s <= load.cost.predict_prompt_s(group.tokens, 0)
        ]
        load = min(worth_it, key=lambda found: found[:2])[2]
        return self._route(load, group, group.best, background)[1]


class Conductor(_ByPrefix):
    """The least predicted time to first token, copies of prefixes counted (Mooncake, algorithm 1).

    Where the best cached prefix is more than `scheduler.copy_threshold` times as long as the instance's own, what the
    own one lacks is copied from there, if that is quicker than to compute it. The instance's shard has it from then on:
    so prefixes that many prompts ask for get to several shards. Otherwise the own prefix is used.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._threshold = config.copy_threshold

    def choose(self, able: Sequence[PrefillLoad], group: QueuedGroup, background: bool = False) -> Route:
        best = group.best
        routes = [self._route(load, group, best, background, self._threshold) for load in able]
        return min(routes, key=lambda found: found[0] + found[1].load.ahead_s(background))[1]
