"""Which decode instance takes which waiting requests (`scheduler.sharing`): the contract, and sharing without ranges.

none       one pool; a request that can join at once goes to the instance with the least load
nearest    one pool; requests and batches go to the instance whose mean prefix length is nearest
quantiles  each instance has a range of lengths with an equal share of the cost (`length_shares.py`)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.by_priority import ByPriority
from alignedserve.scheduler.core.instances import DecodeView, Instances
from alignedserve.scheduler.core.waiting import WaitingClock
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.policies.base import BatchPolicy, Entry

if TYPE_CHECKING:
    from alignedserve.metrics import Page

Prepare = Callable[[BatchPolicy], None]


class Share(ABC):
    """Waiting requests that instances take from, and the policies of their ranks that form batches of them."""

    def __init__(self, policy: ByPriority) -> None:
        self.policy = policy

    @abstractmethod
    def seed(self) -> RequestKey | None:
        """The overdue request of this share with the earliest deadline."""


class Sharing(ABC):
    """Keeps the entries of all WAITING requests. Each operation is at most logarithmic in their number."""

    REDIRECTS = False
    """Whether a batch may go to another instance than the one that it was formed for."""

    @abstractmethod
    def insert(self, entry: Entry, max_total_tokens: int) -> None:
        """Add a waiting request."""

    @abstractmethod
    def remove(self, key: RequestKey) -> None:
        """Remove a waiting request."""

    @abstractmethod
    def totals(self) -> tuple[int, int]:
        """(requests, blocks) that are waiting."""

    @abstractmethod
    def share_of(self, decode: DecodeView) -> Share:
        """What the instance takes from first."""

    def takes_own(self, decode: DecodeView) -> bool:
        """Whether the instance has a share of its own."""
        return False

    def takes(self, decode: DecodeView, key: RequestKey) -> bool:
        """Whether the request waits in this instance's share."""
        return True

    def helps(self, decode: DecodeView) -> Share | None:
        """Another instance's share, not empty, that this one may take from since its own is empty."""
        return None

    @abstractmethod
    def takers(self, decode: DecodeView) -> Sequence[DecodeView]:
        """The open instances that take from the same share as this one."""

    @abstractmethod
    def order(self, decodes: Sequence[DecodeView], tokens: int) -> list[DecodeView]:
        """Decode instances for a request of this prefix length, best first."""

    def mark_overdue(self, key: RequestKey, due_s: float) -> None:
        """The waiting request is overdue since its deadline `due_s`."""
        return

    def instances_changed(self) -> None:
        """An instance joined, was lost, drains, or has reported for the first time."""
        return

    def update(self, now_s: float) -> None:
        """Called after each event, before instances are given requests."""
        return

    @abstractmethod
    def prepare(self, prepare: Prepare) -> None:
        """Call this with each policy, now and when more are created."""

    def use_cost(self, cost: StepCost) -> None:
        """The simulator's measured cost of iterations, in place of `scheduler.cost_model`."""
        self.prepare(lambda policy: policy.use_cost(cost))

    @abstractmethod
    def policies(self) -> Iterable[BatchPolicy]:
        """The first one exists for good."""

    def show_metrics(self, page: Page, decodes: Iterable[DecodeView]) -> None:
        """The order in which the policies serve each instance, and what decides it under `rounds`."""
        for decode in decodes:
            meaning = "1 if batches for the decode instance go in order of arrival, 0 if by another order"
            overtakes = self.share_of(decode).policy.overtakes()
            page.gauge("decode_in_order_of_arrival", meaning, not overtakes, decode=decode.decode_id)
            learned = decode.cost.unequal_lengths_share()
            meaning = (
                "without a cost model: share of its iterations' time that unequal lengths cost, as learned; else NaN"
            )
            share = learned.value if learned is not None and learned.useful else math.nan
            page.gauge("decode_unequal_lengths_share", meaning, share, decode=decode.decode_id)

    def check_integrity(self) -> None:
        """Raises AccountingError if its state, or that of a policy, is inconsistent."""
        for policy in self.policies():
            policy.check_integrity()


class _WholePool(Share):
    def __init__(self, policy: ByPriority, clock: WaitingClock) -> None:
        super().__init__(policy)
        self._clock = clock

    def seed(self) -> RequestKey | None:
        return self._clock.oldest_overdue_in_pool()


class Pooled(Sharing):
    """All instances take from one pool: the policy sees every waiting request."""

    def __init__(
        self, config: SchedulerConfig, new_policy: Callable[[], BatchPolicy], instances: Instances, clock: WaitingClock
    ) -> None:
        self._policy = ByPriority(config, new_policy)
        self._whole = _WholePool(self._policy, clock)
        self._instances = instances
        self._slack = config.balance_slack

    def insert(self, entry: Entry, max_total_tokens: int) -> None:
        self._policy.insert(entry)

    def remove(self, key: RequestKey) -> None:
        self._policy.remove(key)

    def totals(self) -> tuple[int, int]:
        return self._policy.totals()

    def share_of(self, decode: DecodeView) -> Share:
        return self._whole

    def takers(self, decode: DecodeView) -> Sequence[DecodeView]:
        return self._instances.open_decode()

    def order(self, decodes: Sequence[DecodeView], tokens: int) -> list[DecodeView]:
        """Least load first."""
        return sorted(decodes, key=DecodeView.load_s) if len(decodes) > 1 else list(decodes)

    def prepare(self, prepare: Prepare) -> None:
        self._policy.prepare(prepare)

    def policies(self) -> Iterable[BatchPolicy]:
        return self._policy.policies()

    def check_integrity(self) -> None:
        self._policy.check_integrity()


class Nearest(Pooled):
    """Instances specialise: requests and batches go where the mean prefix length is nearest.

    Instances loaded much more than the least loaded one come last, by load.
    """

    REDIRECTS = True

    def order(self, decodes: Sequence[DecodeView], tokens: int) -> list[DecodeView]:
        return by_place(decodes, [decode.distance(tokens) for decode in decodes], self._slack)


def by_place(decodes: Sequence[DecodeView], places: Sequence[int], slack: float) -> list[DecodeView]:
    """Instances by place, least first. Those loaded over `slack` more than the least loaded one come last, by load."""
    if len(decodes) < 2:
        return list(decodes)
    loads = [decode.load_s() for decode in decodes]
    most_s = min(loads) * (1.0 + slack)
    order = sorted(range(len(decodes)), key=lambda i: (0, places[i]) if loads[i] <= most_s else (1, loads[i]))
    return [decodes[i] for i in order]
