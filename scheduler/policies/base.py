"""The contract of a batch-formation policy: it keeps the requests that wait in the pool and chooses the next ones.

The core calls it from one thread. A policy never knows a request's output length, nor any instance: the limits come
with each call. Requests leave a policy only when the core removes those it has prefetched.
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
    """The running batch of the decode instance that the next batch is for: number of requests, lengths in tokens.

    `cost`: the model learned from its iterations. `cache_tokens`: capacity of its cache; 0: not known.
    """

    requests: int
    shortest_tokens: int
    longest_tokens: int
    mean_tokens: int
    cost: CostModel
    cache_tokens: int = 0

    def lengths(self) -> list[int]:
        """Lengths with this number of requests, these extremes and (except for them) this mean."""
        extremes = [self.shortest_tokens, self.longest_tokens][: self.requests]
        return extremes + [self.mean_tokens] * (self.requests - len(extremes))


def as_many_as_fit(entries: Iterable[Entry], limits: BatchLimits) -> list[Entry]:
    """The first of these entries, in their order, before the first that exceeds a limit."""
    found: list[Entry] = []
    blocks = 0
    for entry in entries:
        blocks += entry.blocks
        if len(found) >= limits.max_requests or blocks > limits.max_blocks:
            break
        found.append(entry)
    return found


class BatchPolicy(ABC):
    """Seven methods. Each is at most logarithmic in the number of waiting requests, plus the size of its result."""

    BY_LENGTH: ClassVar[bool] = True
    """Decode instances specialise by length. If False, each request goes to the instance with the least load."""

    OVERDUE: ClassVar[bool] = True
    """Requests without a wait objective of their own are overdue after `scheduler.starvation_after_s`. If False, never:
    the policy itself bounds their waits. Decode instances learn it from the scheduler."""

    NEEDS_OUTPUT_LENGTHS: ClassVar[bool] = False
    """An oracle, which the simulator tells the output lengths. It cannot serve in a cluster."""

    @abstractmethod
    def __init__(self, config: SchedulerConfig) -> None:
        """Create an empty policy."""

    @abstractmethod
    def insert(self, entry: Entry) -> None:
        """Add a waiting request. Raises AccountingError if it is already waiting."""

    @abstractmethod
    def remove(self, key: RequestKey) -> None:
        """Remove a request. Raises AccountingError if it is not waiting."""

    @abstractmethod
    def totals(self) -> tuple[int, int]:
        """(requests, blocks) that are waiting."""

    @abstractmethod
    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        """The next candidate batch, in the order in which its requests should join.

        Empty only if no request is waiting. At most `limits.max_blocks`, except that a larger request is a batch alone.
        With a `seed` (the overdue request with the earliest deadline) the batch contains it.
        """

    @abstractmethod
    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        """Whether a request of this prefix length may join a running batch late; the range includes the join window."""

    @abstractmethod
    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        """Waiting requests that match a running batch, best first; all of them fit."""

    def overtakes(self) -> bool:
        """Whether requests may join late before a candidate batch that waits for the same instance."""
        return True

    def look_at(self, instance: InstanceState) -> None:
        """The instance that the next `form` is for. Most policies ignore it."""
        return

    def use_cost(self, cost: StepCost) -> None:
        """The simulator's measured cost of iterations, in place of `scheduler.cost_model`. Most policies ignore it."""
        return

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AccountingError if its state is inconsistent."""
