"""Any policy with priorities: requests of each rank wait in a policy of their own, and the least rank goes first.

A batch is led by one rank. If it has fewer than N requests, requests of the next ranks whose lengths match it follow. A
rank that waits leads the next batch once MOST_OVERTAKES requests of lower ranks were taken since it last led one. A
policy knows nothing of ranks, so that what it promises (rounds, say) holds within each.

Without priorities all requests have rank 0, and its policy alone decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.length_ranges import join_range
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry, InstanceState
from alignedserve.scheduler.priorities import Turns

logger = logging.getLogger(__name__)
MOST_OVERTAKES = 4096  # requests of lower ranks that are taken before a rank leads a batch


class ByPriority:
    """`new_policy`: makes an empty policy for a rank. What is not documented here is as in `BatchPolicy`."""

    def __init__(self, config: SchedulerConfig, new_policy: Callable[[], BatchPolicy]) -> None:
        self._window = config.join_window
        self._new_policy = new_policy
        self._plain = new_policy()  # of rank 0
        self._of = {0: self._plain}  # by rank, ascending
        self._ranks: dict[RequestKey, int] = {}  # of waiting requests whose rank is not 0
        self._turns = Turns(MOST_OVERTAKES)
        self._led: tuple[RequestKey, int] | None = None  # the first request of the last batch, and the rank that led it
        self._prepare: list[Callable[[BatchPolicy], None]] = []
        self._divisible = True  # the policy can be created for each rank

    def insert(self, entry: Entry) -> None:
        if not entry.rank or not self._divisible:
            self._plain.insert(entry)
            return
        policy = self._of.get(entry.rank) or self._new(entry.rank)
        policy.insert(entry)
        if policy is not self._plain:
            self._ranks[entry.key] = entry.rank

    def remove(self, key: RequestKey) -> None:
        if not self._ranks:
            self._plain.remove(key)
            return
        rank = self._ranks.pop(key, 0)
        self._of[rank].remove(key)
        self._turns.served(rank, self._waiting())
        if self._led is not None and self._led[0] == key:
            self._turns.had(self._led[1])
            self._led = None

    def totals(self) -> tuple[int, int]:
        if not self._ranks:
            return self._plain.totals()
        found = [policy.totals() for policy in self._of.values()]
        return sum(requests for requests, _ in found), sum(blocks for _, blocks in found)

    def first_rank(self) -> int | None:
        """The least rank that waits; None if no request does."""
        return next(iter(self._waiting()), None)

    def totals_of(self, rank: int) -> tuple[int, int]:
        return self._of[rank].totals()

    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        if not self._ranks:
            return self._plain.form(limits, seed, now_s)
        waiting = self._waiting()
        rank = self._turns.next(waiting) if seed is None else self._ranks.get(seed, 0)
        batch = self._of[rank].form(limits, seed, now_s)
        self._led = (batch[0].key, rank) if batch else None
        return self._filled(batch, [other for other in waiting if other != rank], limits)

    def form_of(self, rank: int, limits: BatchLimits, now_s: float) -> list[Entry]:
        """A batch of one rank that waits."""
        return self._of[rank].form(limits, None, now_s)

    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        if not self._ranks:
            return self._plain.matches(tokens, shortest_tokens, longest_tokens)
        return any(self._of[rank].matches(tokens, shortest_tokens, longest_tokens) for rank in self._waiting())

    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        """Those of the least rank first."""
        if not self._ranks:
            return self._plain.matching(shortest_tokens, longest_tokens, limits)
        return self._matching(self._waiting(), shortest_tokens, longest_tokens, limits)

    def overtakes(self) -> bool:
        return all(self._of[rank].overtakes() for rank in self._waiting() or (0,))

    def look_at(self, instance: InstanceState) -> None:
        for policy in self._of.values():
            policy.look_at(instance)

    def prepare(self, prepare: Callable[[BatchPolicy], None]) -> None:
        """Call this with the policy of each rank, now and when more are created."""
        self._prepare.append(prepare)
        for policy in self._of.values():
            prepare(policy)

    def policies(self) -> Iterable[BatchPolicy]:
        """The policies of all ranks; that of rank 0, which exists for good, is the first."""
        return (self._plain, *(policy for rank, policy in self._of.items() if rank))

    def check_integrity(self) -> None:
        for policy in self._of.values():
            policy.check_integrity()
        others = sum(policy.totals()[0] for rank, policy in self._of.items() if rank)
        if others != len(self._ranks) or list(self._of) != sorted(self._of):
            raise AccountingError("the policies of the ranks do not hold the requests with priorities, each once")

    def _waiting(self) -> list[int]:
        return [rank for rank, policy in self._of.items() if policy.totals()[0]]

    def _new(self, rank: int) -> BatchPolicy:
        """The new policy of a rank; that of rank 0 if a user's policy cannot be created again."""
        try:
            policy = self._new_policy()
        except ConfigError as error:
            logger.error("priorities are not honoured: %s", error)
            self._divisible = False
            return self._plain
        for prepare in self._prepare:
            prepare(policy)
        self._of[rank] = policy
        self._of = dict(sorted(self._of.items()))
        return policy

    def _filled(self, batch: list[Entry], ranks: Iterable[int], limits: BatchLimits) -> list[Entry]:
        """The batch, followed by matching requests of other ranks up to N."""
        blocks = sum(entry.blocks for entry in batch)
        requests = min(limits.min_requests, limits.max_requests) - len(batch)
        if not batch or requests <= 0 or blocks >= limits.max_blocks:
            return batch
        lengths = [entry.tokens for entry in batch]
        room = BatchLimits(limits.max_blocks - blocks, 1, requests)
        return batch + self._matching(ranks, *join_range(min(lengths), max(lengths), self._window), room)

    def _matching(
        self, ranks: Iterable[int], shortest_tokens: int, longest_tokens: int, limits: BatchLimits
    ) -> list[Entry]:
        found: list[Entry] = []
        for rank in ranks:
            more = self._of[rank].matching(shortest_tokens, longest_tokens, limits)
            found += more
            blocks = limits.max_blocks - sum(entry.blocks for entry in more)
            limits = replace(limits, max_blocks=blocks, max_requests=limits.max_requests - len(more))
            if limits.max_requests <= 0 or blocks <= 0:
                break
        return found
