"""BalanceRoute's BR-0 (Bu et al., "Tackling the Data-Parallel Load Balancing Bottleneck in LLM Serving", 2605.06113).

Implemented from its abstract and a detailed review of version 2; the text itself was not at hand. Known from these:

- Requests that can decode wait in a pool, and each stays on the rank (DP worker) that it was given.
- The load of a rank is the KV of its active requests, L. With the greatest load M of all G ranks, a rank's safe margin
  is m = M - L. Giving it requests with s tokens scores F = s - G (s - m)+: what fills the margin is a gain, what
  exceeds it makes every rank wait.
- Stage 1, while slots are plenty: the rank with the most free slots gets the request with the highest score.
- Stage 2, while slots are scarce: the ranks in a priority queue by free slots and margin; each gets the subset of a
  window of the waiting requests with the highest score, or the best single request if no score is above 0.
- The subsets had at most R_max = 4 requests in its measurements.

Assumed: slots are plenty while there are more than R_max for each rank; the window is the oldest `WINDOW` requests;
margins are computed anew after each choice; a request that a rank's cache has no room for is not a choice; an evicted
request waits at its rank. BR-H, which needs a predictor of ends, is not implemented.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import combinations, islice

from alignedserve.request import RequestKey
from alignedserve.scheduler.ranks.base import Place, Placement, Rank, Ready

MOST_AT_ONCE = 4  # R_max
WINDOW = 16


class BalanceRoute(Placement):
    """BR-0 of arXiv 2605.06113."""

    LOOKS_AT_RANKS = False

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._waiting: dict[RequestKey, Ready] = {}  # in order of arrival
        self._by_tokens: list[tuple[int, int, RequestKey]] = []

    def add(self, request: Ready, ranks: Sequence[Rank]) -> None:
        self._waiting[request.key] = request
        insort(self._by_tokens, (request.tokens, request.number, request.key))

    def waiting(self) -> int:
        return len(self._waiting)

    def refill(self, ranks: Sequence[Rank]) -> list[Place]:
        places: list[Place] = []
        usable = {rank.number: rank for rank in ranks if rank.slots > 0}
        slots = sum(rank.slots for rank in usable.values())
        while self._waiting and usable:
            greatest = max(rank.tokens for rank in ranks)
            plenty = slots > MOST_AT_ONCE * self.ranks
            rank = max(usable.values(), key=lambda one: (one.slots, greatest - one.tokens, -one.number))
            margin = greatest - rank.tokens
            chosen = self._best_single(rank, margin) if plenty else self._best_subset(rank, margin)
            for request in chosen:
                self._take(request)
                rank.take(request)
                places.append(Place(request.key, rank.number))
            slots -= len(chosen)
            if not chosen or rank.slots <= 0:
                slots -= rank.slots
                del usable[rank.number]
        return places

    def _take(self, request: Ready) -> None:
        del self._waiting[request.key]
        del self._by_tokens[bisect_left(self._by_tokens, (request.tokens, request.number))]

    def _score(self, tokens: int, margin: int) -> int:
        return tokens - self.ranks * max(0, tokens - margin)

    def _best_single(self, rank: Rank, margin: int) -> list[Ready]:
        """The longest request within the margin, or the shortest beyond it, whichever scores higher."""
        at = bisect_right(self._by_tokens, (margin + 1,))
        near = [self._waiting[key] for _, _, key in self._by_tokens[max(0, at - 1) : at + 1]]
        fitting = [one for one in near if rank.takes(one)]
        if not fitting:  # the longest that the cache has room for
            shorter = (self._waiting[key] for _, _, key in reversed(self._by_tokens[:at]))
            fitting = list(islice((one for one in shorter if rank.takes(one)), 1))
        return sorted(fitting, key=lambda one: -self._score(one.tokens, margin))[:1]

    def _best_subset(self, rank: Rank, margin: int) -> list[Ready]:
        window = [one for one in islice(self._waiting.values(), WINDOW) if rank.takes(one)]
        best: tuple[Ready, ...] = ()
        most = 0
        for count in range(1, min(MOST_AT_ONCE, rank.slots) + 1):
            for subset in combinations(window, count):
                score = self._score(sum(one.tokens for one in subset), margin)
                if score > most and sum(one.blocks for one in subset) <= rank.room_blocks:
                    best, most = subset, score
        if best:
            return list(best)
        return sorted(window, key=lambda one: -self._score(one.tokens, margin))[:1]
