"""Routings that look at load: the default, and two baselines that do not look at the caches."""

from __future__ import annotations

import random
from collections.abc import Sequence

from alignedserve.config import SchedulerConfig
from alignedserve.scheduler.core.prefill_queue import QueuedGroup
from alignedserve.scheduler.core.routing.base import Route, Routing
from alignedserve.scheduler.core.routing.load import PrefillLoad, choose_prefill


class LeastTtft(Routing):
    """The least predicted time to first token, counting only what the instance's shard lacks of the prompt."""

    def choose(self, able: Sequence[PrefillLoad], group: QueuedGroup, background: bool = False) -> Route:
        load = choose_prefill(able, group, background)
        assert load is not None
        return Route(load, load.work(group))


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
