"""Of several candidate batches, chooses the one with the most predicted tokens a second.

`aligned` takes the densest range of at least N requests. While no request is overdue, that batch is compared with
others: wider and narrower ranges around it, its neighbours, the range nearest to the running batch, the shortest
requests, and the range of the oldest request. Each is a contiguous range within K. The criterion is the predicted time
of an iteration of the running batch and the new batch together.

With an overdue request the pool is in arrears: all of it must be served, so the criterion is the work done a second
(`TokenWorth`). The batch contains the overdue request and the addition that yields the most: its neighbours, a range
near the running batch or elsewhere, or the oldest requests.

With an objective for TPOT every request within it counts alike, so the criterion is tokens a second, in arrears too. A
batch whose own iterations would miss the objective is taken only if all do; then the fastest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.age_order import AgeOrder
from alignedserve.scheduler.batch_generator import Selection
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.cost.worth import FULL, TokenWorth
from alignedserve.scheduler.policies.aligned import AlignedPolicy
from alignedserve.scheduler.policies.base import BatchLimits, Entry, InstanceState

logger = logging.getLogger(__name__)


class AlignedCostPolicy(AlignedPolicy):
    """The cost model is `scheduler.cost_model`. Without one it is the instance's own linear model, learned online.

    The linear model knows bytes, but not the cost of unequal lengths, so that the running batch does not affect the
    choice.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._objective_s = config.tpot_objective_s
        self._ages = AgeOrder[Entry]()
        self._instance: InstanceState | None = None
        self._cost: StepCost | None = None
        self._learns = True  # whether instances learn by how much their iterations differ from `_cost`
        self._worths: dict[tuple[int, int], TokenWorth] = {}  # of `_cost`, by cache tokens and maximum requests
        if config.cost_model:
            from alignedserve.scheduler.cost.load import shared_cost

            self._cost = shared_cost(config)

    def use_cost(self, cost: StepCost) -> None:
        self._cost = cost
        self._learns = False
        self._worths.clear()

    def look_at(self, instance: InstanceState) -> None:
        if self._instance is None and self._cost is None:
            logger.warning(
                "policy aligned-cost has no scheduler.cost_model: the linear model, which is learned online, does not "
                "know the cost of unequal lengths"
            )
        self._instance = instance

    def insert(self, entry: Entry) -> None:
        super().insert(entry)
        self._ages.add(entry, entry.since_s)

    def remove(self, key: RequestKey) -> None:
        entry = self.tree.remove(key)
        self._ages.remove(entry, entry.since_s)

    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        first = self._generator.select(limits, seed)
        if first.requests == len(self.tree):
            batch = self._generator.entries(first)
        elif seed is not None:
            batch = self._form_in_arrears(first, limits, seed)
        else:
            batches = [first, *self._others(first, limits)] if first.enough else [first]
            best = self._best([self._generator.lengths(one) for one in batches], self._rate)
            batch = self._generator.entries(batches[best])
        self._yielded({self.tree.leaf_of(entry.tokens) for entry in batch}, now_s)
        return batch

    # while no request is overdue

    def _others(self, first: Selection, limits: BatchLimits) -> Iterator[Selection]:
        """Alternatives to `first` with enough requests."""
        select, tree = self._generator.select, self.tree
        taken = self._leaves_of(first)
        about = next(tree.oldest(min(taken))).key
        found = [select(replace(limits, min_requests=limits.max_requests), about)]
        if limits.max_blocks > 1:
            found.append(select(replace(limits, max_blocks=limits.max_blocks // 2), about))
        found += [select(limits, next(tree.oldest(leaf)).key) for leaf in self._elsewhere(taken)]
        return (other for other in found if other.requests >= limits.min_requests)

    def _elsewhere(self, taken: Collection[int]) -> Iterator[int]:
        """Leaves to form a batch around: beside those `taken`, the shortest, near the running batch, the oldest."""
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
            leaves.append(tree.leaf_of(oldest[1].tokens))
        return (leaf for leaf in dict.fromkeys(leaves) if leaf is not None and leaf not in taken)

    # in arrears

    def _form_in_arrears(self, first: Selection, limits: BatchLimits, seed: RequestKey) -> list[Entry]:
        """The best of `first`, a wider range around the seed, and the seed with the best other requests."""
        entry = self.tree.entry(seed)
        around = [first, self._generator.select(replace(limits, min_requests=limits.max_requests), seed)]
        beside = list(self._beside(entry, limits))
        lengths = [self._generator.lengths(batch) for batch in around]
        lengths += [[entry.tokens, *self._generator.lengths(batch)] for batch in beside]
        best = self._best(lengths, self._work_rate(limits.max_requests))
        if best < len(around):
            return self._generator.entries(around[best])
        others = self._generator.entries(beside[best - len(around)])
        return [entry, *(other for other in others if other is not entry)]

    def _beside(self, seed: Entry, limits: BatchLimits) -> Iterator[Selection]:
        """The oldest requests, and ranges as wide as fit with the seed, some of which may contain it."""
        most_blocks, most_requests = limits.max_blocks - seed.blocks, limits.max_requests - 1
        if most_blocks <= 0 or most_requests <= 0:
            return
        rest = BatchLimits(most_blocks, most_requests, most_requests)
        yield self._oldest(seed, rest)
        oldest = self.tree.oldest
        for leaf in self._all_over(limits):
            found = self._generator.select(rest, next(oldest(leaf)).key)
            if found.blocks <= most_blocks:  # a single request may be larger
                yield found

    def _all_over(self, limits: BatchLimits) -> Iterator[int]:
        """Leaves to form a range around: the shortest, the longest, on both sides of the running batch, the densest."""
        tree = self.tree
        last = tree.leaf_of(tree.max_tokens)
        found = [tree.leaves_between(0, last), tree.leaves_between(0, last, leftwards=True)]
        running = self._instance
        if running is not None and running.requests:
            for tokens in running.mean_tokens, running.longest_tokens:
                leaf = tree.leaf_of(tokens)
                found += [tree.leaves_between(0, leaf, leftwards=True), tree.leaves_between(leaf, last)]
        leaves = [next(some, None) for some in found]
        leaves.append(min(self._leaves_of(self._generator.select(limits))))
        return (leaf for leaf in dict.fromkeys(leaves) if leaf is not None)

    def _oldest(self, seed: Entry, limits: BatchLimits) -> Selection:
        """The oldest requests in order of arrival, up to the first that does not fit."""
        found = Selection(limits)
        for entry in self._ages:
            if entry is seed:
                continue
            if not found.fits(1, entry.blocks):
                break
            found.add_part((entry,), self.tree.leaf_of(entry.tokens))
        return found

    # both

    def _leaves_of(self, batch: Selection) -> set[int]:
        return {*batch.leaves, *batch.cut}

    def _best(self, lengths: Sequence[Sequence[int]], rate: Callable[[Sequence[int]], float]) -> int:
        """The index of the batch with the highest rate that meets the objective; of equals the first."""
        best: Sequence[int] = range(len(lengths))
        if self._objective_s:
            alone_s = [self._corrected_s(of_one) for of_one in lengths]
            best = [i for i in best if alone_s[i] <= self._objective_s] or [alone_s.index(min(alone_s))]
        rates = [rate(lengths[i]) for i in best]
        return best[rates.index(max(rates))]

    def _rate(self, lengths: Sequence[int]) -> float:
        """Tokens a second together with the running batch.

        While iteration times are unknown: the number of requests.
        """
        running = [] if self._instance is None else self._instance.lengths()
        together = [*running, *lengths]
        return len(together) / (self._iteration_s(together) or 1.0)

    def _work_rate(self, max_requests: int) -> Callable[[Sequence[int]], float]:
        """Work (with an objective: tokens) a second of the batch and of as many running requests as fit beside it.

        The longest running requests are counted first, because they determine the cost of stragglers.
        """
        worth = None if self._objective_s else self._worth(max_requests)
        running = [] if self._instance is None else sorted(self._instance.lengths(), reverse=True)
        cache_tokens = 0 if self._instance is None else self._instance.cache_tokens

        def rate(lengths: Sequence[int]) -> float:
            room = max(0, max_requests - len(lengths))
            if cache_tokens and running:
                spare = max(0.0, FULL * cache_tokens - sum(lengths))
                room = min(room, int(spare * len(running)) // max(1, sum(running)))
            together = [*running[:room], *lengths]
            gain = len(together) if worth is None else sum(map(worth.of, together))
            return gain / (self._iteration_s(together) or 1.0)

        return rate

    def _worth(self, max_requests: int) -> TokenWorth:
        """The worths; cached if the cost never changes."""
        cache_tokens = 0 if self._instance is None else self._instance.cache_tokens
        if self._cost is None:
            return TokenWorth(self._iteration_s, cache_tokens, max_requests, self.tree.max_tokens)
        place = cache_tokens, max_requests
        if place not in self._worths:
            self._worths[place] = TokenWorth(self._iteration_s, cache_tokens, max_requests, self.tree.max_tokens)
        return self._worths[place]

    def _iteration_s(self, lengths: Sequence[int]) -> float:
        if self._cost is not None:
            return self._cost.step_s((), lengths)
        return 0.0 if self._instance is None else self._instance.cost.predict_iteration_s(lengths)

    def _corrected_s(self, lengths: Sequence[int]) -> float:
        """The predicted time, corrected by the instance's measured iterations.

        An objective is in seconds of this machine. For batches of one instance the correction does not change the
        order, so rates are computed without it.
        """
        if self._learns and self._instance is not None:
            return self._instance.cost.predict_iteration_s(lengths)
        return self._iteration_s(lengths)

    def check_integrity(self) -> None:
        super().check_integrity()
        if len(self._ages) != len(self.tree) or any(entry.key not in self.tree for entry in self._ages):
            raise AccountingError("the order of age does not match the waiting requests")
