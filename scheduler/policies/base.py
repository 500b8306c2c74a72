"""The contract of a batch-formation policy: it keeps the requests that wait in the pool and chooses who is next.

The core calls it, from one thread. It never learns a request's output length, and knows no instance: what fits is told
with each question. Nothing leaves a policy on its own: the core removes what it has prefetched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchLimits
from alignedserve.scheduler.cost.pass_model import CostModel
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.quad_tree import Entry

__all__ = ["BatchLimits", "BatchPolicy", "Entry", "InstanceState", "as_many_as_fit"]


@dataclass(frozen=True, slots=True)
class InstanceState:
    """What runs at the decode instance that the next batch is for: its number of requests and their lengths in tokens.

    `cost`: what was learnt from its iterations. `cache_tokens`: what its cache holds; 0: not known.
    """

    requests: int
    shortest_tokens: int
    longest_tokens: int
    mean_tokens: int
    cost: CostModel
    cache_tokens: int = 0

    def lengths(self) -> list[int]:
        """Lengths with this number, extremes and (but for those) mean."""
        extremes = [self.shortest_tokens, self.longest_tokens][: self.requests]
        return extremes + [self.mean_tokens] * (self.requests - len(extremes))


def as_many_as_fit(entries: Iterable[Entry], limits: BatchLimits) -> list[Entry]:
    """The first of these, in their order, up to the first that is too many or too large."""
    found: list[Entry] = []
    blocks = 0
    for entry in entries:
        blocks += entry.blocks
        if len(found) >= limits.max_requests or blocks > limits.max_blocks:
            break
        found.append(entry)
    return found


class BatchPolicy(ABC):
    """Seven methods. Each is at most logarithmic in the number of waiting requests, plus the size of its answer."""

    BY_LENGTH: ClassVar[bool] = True
    """Decode instances specialise by length; else each request goes to the one with the least load."""

    NEEDS_OUTPUT_LENGTHS: ClassVar[bool] = False
    """An oracle, which the simulator tells how long answers will be; no cluster can."""

    @abstractmethod
    def __init__(self, config: SchedulerConfig) -> None:
        """Empty."""

    @abstractmethod
    def insert(self, entry: Entry) -> None:
        """A request waits. Raises AccountingError where it does already."""

    @abstractmethod
    def remove(self, key: RequestKey) -> None:
        """It waits no more. Raises AccountingError where it did not."""

    @abstractmethod
    def totals(self) -> tuple[int, int]:
        """(requests, blocks) that wait."""

    @abstractmethod
    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        """The next candidate batch, in the order in which they should join; empty only where nothing waits.

        At most `limits.max_blocks`, but for a request that is larger: that is a batch alone. With a `seed` (the
        overdue one that was due first) the batch holds it, whatever else.
        """

    @abstractmethod
    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        """Whether a request of this length may join a running batch late; the lengths include the join window."""

    @abstractmethod
    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        """Waiting requests that match a running batch, best first; all of them fit."""

    def look_at(self, instance: InstanceState) -> None:
        """The instance that the next `form` is for. Most policies do not care."""
        return

    def use_cost(self, cost: StepCost) -> None:
        """A measured cost of iterations, instead of `scheduler.cost_model`: the simulator's own. Most do not care."""
        return

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AccountingError where its books do not match."""
