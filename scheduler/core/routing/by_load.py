"""Routings that look at load: the default, and two baselines that do not look at the caches."""

from __future__ import annotations

import random
from collections.abc import Sequence

from alignedserve.config import SchedulerConfig
from alignedserve.scheduler.core.prefill_queue import QueuedGroup
from alignedserve.scheduler.core.routing.base import Route, Routing
from alignedserve.scheduler.core.routing.load import PrefillLoad


class LeastTtft(Routing):
    """The least predicted time to first token, counting only what the instance's shard lacks of the prompt.

    What another shard has of it is copied, if that is predicted to be quicker. Then both shards have it. Ties go to the
    least pending, then to the first.
    """

    def choose(self, able: Sequence[PrefillLoad], group: QueuedGroup, background: bool = False) -> Route:
        best = group.best
        routes = [self._route(load, group, best, background) for load in able]
        return min(routes, key=lambda found: (found[0], found[1].load.pending_tokens))[1]

    def _route(
        self, load: PrefillLoad, group: QueuedGroup, best: tuple[str, int], background: bool
    ) -> tuple[float, Route]:
        """The predicted time to first token there, and how."""
        (pool_id, tokens), computed = best, load.work(group)
        ttft_s = self._ttft_s(load, group, computed, background) + load.late_s(group, load.pool_id, background)
        left = group.tokens - tokens
        if self.copies is not None and left < computed and pool_id != load.pool_id:
            copied_s = self.copy_s(load, tokens) + self._ttft_s(load, group, left, background)
            copied_s += load.late_s(group, pool_id, background)
            if copied_s < ttft_s:
                return copied_s, Route(load, left, copy_from=pool_id)
        return ttft_s, Route(load, computed)

    def _ttft_s(self, load: PrefillLoad, group: QueuedGroup, left: int, background: bool) -> float:
        """If it computes the last `left` tokens."""
        reading_s = load.cost.predict_reading_s(left, group.tokens - left)
        return load.predicted_ttft_s(left, background) + reading_s


class LeastLoaded(Routing):
    """The fewest tokens ahead of the prompt, whatever the caches hold."""

    def choose(self, able: Sequence[PrefillLoad], group: QueuedGroup, background: bool = False) -> Route:
        load = min(able, key=lambda one: (one.ahead_tokens(background), one.pending_tokens))
        return Route(load, load.work(group))


class Random(Routing):
    """Any instance, with equal chances. The same decisions in each run."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._random = random.Random("alignedserve routing")

    def choose(self, able: Sequence[PrefillLoad], group: QueuedGroup, background: bool = False) -> Route:
        load = self._random.choice(able)
        return Route(load, load.work(group))
