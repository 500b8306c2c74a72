"""The routings by name."""

from __future__ import annotations

from collections.abc import Mapping

from alignedserve.config import SchedulerConfig
from alignedserve.errors import ConfigError
from alignedserve.scheduler.core.routing.base import Routing
from alignedserve.scheduler.core.routing.by_load import LeastLoaded, LeastTtft, Random
from alignedserve.scheduler.core.routing.by_prefix import Conductor, LongestPrefix

ROUTINGS: Mapping[str, type[Routing]] = {
    "least-ttft": LeastTtft,
    "least-loaded": LeastLoaded,
    "random": Random,
    "prefix": LongestPrefix,
    "conductor": Conductor,
}


def make_routing(config: SchedulerConfig) -> Routing:
    """The configured routing. Raises ConfigError for an unknown name."""
    kind = ROUTINGS.get(config.routing)
    if kind is None:
        raise ConfigError(f"scheduler.routing {config.routing!r}: choose one of: {', '.join(ROUTINGS)}")
    return kind(config)
