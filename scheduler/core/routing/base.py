"""The contract of a routing: it chooses the prefill instance of the next prompt, by load and by cached prefixes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alignedserve.config import SchedulerConfig
from alignedserve.scheduler.core.prefill_queue import QueuedGroup
from alignedserve.scheduler.core.routing.load import PrefillLoad


@dataclass(frozen=True, slots=True)
class Route:
    """`tokens`: what the instance computes of the prompt. `copy_from`: the shard whose cached prefix is copied to the
    instance's shard first; "": none is.
    """

    load: PrefillLoad
    tokens: int
    copy_from: str = ""


@dataclass(frozen=True, slots=True)
class PrefixCopies:
    """How long a cached prefix takes from one shard to another."""

    seconds_per_token: float
    latency_s: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.latency_s + self.seconds_per_token * tokens


class Routing(ABC):
    """Called from one thread, once for each prompt that is begun. Pure but for its own random numbers."""

    KNOWS_COMING: ClassVar[bool] = False
    """What prompts under way will leave in a cache counts as cached, as in a global tree of prompts that is updated
    when a prompt is routed. The simulator's hints follow it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.copies: PrefixCopies | None = None  # None: cached prefixes are not copied between shards

    def copy_s(self, load: PrefillLoad, tokens: int) -> float:
        """Predicted time to copy a cached prefix to the shard of an instance; infinite if that is not done."""
        if self.copies is None:
            return math.inf
        return load.copy_s_per_token * tokens or self.copies.seconds(tokens)

    @abstractmethod
    def choose(self, able: Sequence[PrefillLoad], group: QueuedGroup, background: bool = False) -> Route:
        """The route of the group's prompt. `able`: the instances that can take it, at least one.

        `background`: the prompt lets all others go first.
        """
