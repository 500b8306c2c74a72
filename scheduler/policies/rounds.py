"""Rounds over prefix lengths: batches go upward from the shortest waiting requests to the longest, then begin again.

A round serves the requests that waited when it began, each batch the contiguous range that begins where the last one
ended. So consecutive batches hold adjacent lengths, running requests grow in the direction of the round, and a request
sees at most one turn: it is served in the rest of the round or in the next one. (Where lengths are shared out, that is
so in each range that it waits in.) A request with its own wait objective that is overdue is the seed of a batch of its
neighbours, in between.

Late joins keep to the round, too: requests that arrived more than LATE_S after it began wait for the next one. A late
join overtakes older requests, so there are none unless unequal lengths cost much. An evicted request whose length is
still ahead stays in the round.

Where unequal lengths cost little, a round in order of length only delays the long requests. If the cost model knows
that, or the instance has learned it from its iterations, the round goes in order of arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, takewhile

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.age_order import AgeOrder
from alignedserve.scheduler.batch_generator import Selection
from alignedserve.scheduler.cost.makespan import typical_order
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.policies.aligned import AlignedPolicy
from alignedserve.scheduler.policies.base import BatchLimits, Entry, InstanceState, as_many_as_fit

LATE_S = 20.0  # requests that arrived so soon after a round began may join its batches late
# Shares of an iteration's time that unequal lengths must cost
LEAST_FOR_ROUND = 0.07  # for a round in order of length
LEAST_FOR_LATE = 0.12  # for late joins by length


class RoundsPolicy(AlignedPolicy):
    """Between turns the position only moves upward. A batch that was not sent is formed again."""

    OVERDUE = False

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._ages: AgeOrder[Entry] = AgeOrder()
        self._begun_s = -math.inf  # when the round began
        self._leaf = 0  # no member of the round that still waits is in a leaf before it, except returned ones
        self._members = 0  # of the round that still wait
        self._in_order_of_age = False
        self._late_joins = True
        self._instance: InstanceState | None = None
        self._cost: StepCost | None = None
        if config.cost_model:
            from alignedserve.scheduler.cost.load import shared_cost

            self._cost = shared_cost(config)

    def use_cost(self, cost: StepCost) -> None:
        self._cost = cost

    def look_at(self, instance: InstanceState) -> None:
        self._instance = instance

    def insert(self, entry: Entry) -> None:
        ahead = not self._in_order_of_age and self.tree.leaf_of(entry.tokens) >= self._leaf
        if entry.evicted and self._members and ahead:
            entry = replace(entry, since_s=min(entry.since_s, self._begun_s))
        super().insert(entry)
        self._ages.add(entry, entry.since_s)
        self._members += self._is_member(entry)

    def remove(self, key: RequestKey) -> None:
        entry = self.tree.remove(key)
        self._ages.remove(entry, entry.since_s)
        self._members -= self._is_member(entry)

    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        if self._in_order_of_age:
            return as_many_as_fit(self._ages, limits)
        return super().matching(shortest_tokens, longest_tokens, limits) if self._late_joins else []

    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        fits = self._late_joins and super().matches(tokens, shortest_tokens, longest_tokens)
        return self._in_order_of_age or fits

    def overtakes(self) -> bool:
        return not self._in_order_of_age

    def check_integrity(self) -> None:
        super().check_integrity()
        members = sum(map(self._is_member, self._ages))
        if members != self._members or len(self._ages) != len(self.tree):
            raise AccountingError(f"the round counts {self._members} waiting members; a recount gives {members}")

    # internal

    def _select(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> Selection:
        if seed is not None:
            return super()._select(limits, seed, now_s)
        selection = self._next(limits)
        if not selection.requests and len(self.tree):
            self._begun_s, self._leaf, self._members = now_s, 0, len(self.tree)
            loss = self._loss(limits)
            self._in_order_of_age, self._late_joins = loss < LEAST_FOR_ROUND, loss >= LEAST_FOR_LATE
            selection = self._next(limits)
        return selection

    def _next(self, limits: BatchLimits) -> Selection:
        """The next batch of the round; empty if no member waits from the position on."""
        selection = Selection(limits)
        if not self._members:
            return selection
        if self._in_order_of_age:
            for entry in takewhile(self._is_member, self._ages):
                if not self._take(selection, entry, self.tree.leaf_of(entry.tokens)):
                    break
            return selection
        tree = self.tree
        for leaf in tree.leaves_between(self._leaf, tree.leaf_of(tree.max_tokens)):
            each = tree.blocks_each[leaf]
            entries = tree.take(leaf, selection.room(each) + 1, self._begun_s)
            if entries and not selection.requests:
                self._leaf = leaf
            if not selection.add_part(entries, leaf, each) or selection.requests >= limits.max_requests:
                break
        return selection

    def _take(self, selection: Selection, entry: Entry, leaf: int) -> bool:
        """Whether the entry fits. The first may be larger than K."""
        if selection.requests and not selection.fits(1, entry.blocks):
            return False
        selection.add((), 1, entry.blocks)
        selection.parts.append(entry)
        if selection.cut[-1:] != [leaf]:
            selection.cut.append(leaf)
            selection.runs += 1
        return True

    def _latest_s(self) -> float:
        return self._begun_s + LATE_S

    def _is_member(self, entry: Entry) -> bool:
        return entry.since_s <= self._begun_s

    def _loss(self, limits: BatchLimits) -> float:
        """What a round in order of length can save, as a share of an iteration's time; 1 if that is not known.

        It is what requests of all waiting lengths, as many as fill the cache, lose to unequal lengths. A learned loss
        is believed to be small if its error is, or by one standard error; afterwards to be large by two. So noise makes
        no bubble out of nothing.
        """
        if self._cost is None and self._instance is None:
            return 1.0
        lengths = self._sample(limits.max_requests)
        if self._cost is not None:
            step_s = self._cost.step_s((), typical_order(lengths))
            return 1.0 - self._cost.balanced_step_s((), lengths) / step_s
        assert self._instance is not None
        learned = self._instance.cost.unequal_lengths_share(lengths)
        if learned is None:
            return 1.0
        if self._in_order_of_age:
            return learned.value - 2.0 * learned.error
        return learned.value + (0.0 if learned.useful else learned.error)

    def _sample(self, most: int) -> list[int]:
        """Quantiles of the waiting lengths (middles of leaves), as many as the cache holds, at most `most`."""
        tree = self.tree
        counts, width = tree.requests[tree.depth], tree.leaf_tokens
        waiting = [(counts[leaf], leaf * width + (width + 1) // 2) for leaf in tree.leaves_below((0, 0))]
        mean_tokens = sum(count * tokens for count, tokens in waiting) / len(tree)
        room = self._instance.cache_tokens if self._instance is not None else 0
        fit = max(1, min(most, len(tree), int(room / mean_tokens) if room else most))
        ends = list(accumulate(count for count, _ in waiting))
        return [waiting[bisect_right(ends, (2 * place + 1) * len(tree) // (2 * fit))][1] for place in range(fit)]
