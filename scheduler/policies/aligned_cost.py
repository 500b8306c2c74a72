"""Of several candidate batches of similar lengths, the one with the most predicted tokens a second.

`aligned` takes the densest range of at least N requests. Here that one is compared, by the predicted time of an
iteration of what runs and the batch together, with wider and narrower ranges about it, its neighbours, the range
nearest to what runs, the shortest requests, and the range of the oldest one. Each is a contiguous range within K.
A batch whose own iterations would miss the objective for TPOT is taken only where all do; then the quickest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.age_order import AgeOrder
from alignedserve.scheduler.batch_generator import Selection
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.policies.aligned import AlignedPolicy
from alignedserve.scheduler.policies.base import BatchLimits, Entry, InstanceState

logger = logging.getLogger(__name__)


class AlignedCostPolicy(AlignedPolicy):
    """The cost model is `scheduler.cost_model`. Without one it is the instance's own linear model, learnt as it goes:

    that knows bytes, but not what unequal lengths cost, so that what runs has no say in which range is next.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._objective_s = config.tpot_objective_s
        self._ages = AgeOrder()
        self._instance: InstanceState | None = None
        self._cost: StepCost | None = None
        if config.cost_model:
            from alignedserve.scheduler.cost.load import configured_cost

            self._cost = configured_cost(config)

    def use_cost(self, cost: StepCost) -> None:
        self._cost = cost

    def look_at(self, instance: InstanceState) -> None:
        if self._instance is None and self._cost is None:
            logger.warning(
                "policy aligned-cost has no scheduler.cost_model: the linear model that is learnt as it goes does not "
                "know what unequal lengths cost"
            )
        self._instance = instance

    def insert(self, entry: Entry) -> None:
        super().insert(entry)
        self._ages.add(entry.key, entry.since_s)

    def remove(self, key: RequestKey) -> None:
        entry = self.tree.remove(key)
        self._ages.remove(key, entry.since_s)

    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        best = self._generator.select(limits, seed)
        if best.enough and best.requests < len(self.tree):
            best = self._best([best, *self._others(best, limits, seed)])
        batch = self._generator.entries(best)
        self.tree.stamp(batch, now_s)
        return batch

    def _others(self, first: Selection, limits: BatchLimits, seed: RequestKey | None) -> Iterator[Selection]:
        """What could be instead of `first`: with the seed where there is one, and with enough requests."""
        select, tree = self._generator.select, self.tree
        taken = {*first.leaves, *(tree.leaf_of(entry.tokens) for entry in first.parts)}
        about = seed or next(tree.oldest(min(taken))).key
        found = [select(replace(limits, min_requests=limits.max_requests), about)]
        if limits.max_blocks > 1:
            found.append(select(replace(limits, max_blocks=limits.max_blocks // 2), about))
        if seed is None:
            found += [select(limits, next(tree.oldest(leaf)).key) for leaf in self._elsewhere(taken)]
        return (other for other in found if other.requests >= limits.min_requests)

    def _elsewhere(self, taken: Collection[int]) -> Iterator[int]:
        """Leaves to form a batch around: beside those `taken`, the shortest, near what runs, the oldest."""
        tree = self.tree
        last = tree.leaf_of(tree.max_tokens)
        found = [
            tree.leaves_between(0, min(taken) - 1, leftwards=True),
            tree.leaves_between(max(taken) + 1, last),
            tree.leaves_between(0, last),
        ]
        running, oldest = self._instance, self._ages.first()
        if running is not None and running.requests:
            found.append(tree.leaves_between(tree.leaf_of(running.mean_tokens), last))
        leaves = [next(some, None) for some in found]
        if oldest is not None:
            leaves.append(tree.leaf_of(tree.entry(oldest[1]).tokens))
        return (leaf for leaf in dict.fromkeys(leaves) if leaf is not None and leaf not in taken)

    def _best(self, batches: Sequence[Selection]) -> Selection:
        """The first of the best."""
        lengths = [self._generator.lengths(batch) for batch in batches]
        best: Sequence[int] = range(len(batches))
        if self._objective_s:
            alone_s = [self._iteration_s(of_one) for of_one in lengths]
            best = [i for i in best if alone_s[i] <= self._objective_s] or [alone_s.index(min(alone_s))]
        running = [] if self._instance is None else self._instance.lengths()
        rates = [self._rate(running + lengths[i]) for i in best]
        return batches[best[rates.index(max(rates))]]

    def _rate(self, lengths: Sequence[int]) -> float:
        """Tokens a second; where nothing is known of iterations yet, their number."""
        return len(lengths) / (self._iteration_s(lengths) or 1.0)

    def _iteration_s(self, lengths: Sequence[int]) -> float:
        if self._cost is not None:
            return self._cost.step_s((), lengths)
        return 0.0 if self._instance is None else self._instance.cost.predict_iteration_s(lengths)

    def check_integrity(self) -> None:
        super().check_integrity()
        if len(self._ages) != len(self.tree) or any(key not in self.tree for key in self._ages):
            raise AccountingError("the order of age does not match the requests that wait")
