"""Placements that choose a rank as soon as a request can decode, as routers do; it then waits and runs there."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.scheduler.ranks.base import Placement, Rank, Ready


class RoundRobin(Placement):
    """Each rank in turn."""

    LOOKS_AT_RANKS = False

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._next = 0

    def add(self, request: Ready, ranks: Sequence[Rank]) -> int:
        rank = min((rank.number for rank in ranks), key=lambda number: (number - self._next) % self.ranks)
        self._next = (rank + 1) % self.ranks
        return rank


class LeastRequests(Placement):
    """The rank with the fewest requests, those that wait there included (join the shortest queue)."""

    def add(self, request: Ready, ranks: Sequence[Rank]) -> int:
        return min(ranks, key=lambda rank: (rank.requests + rank.queued, rank.number)).number


class LeastTokens(Placement):
    """The rank with the fewest tokens of KV, those of requests that wait there included."""

    def add(self, request: Ready, ranks: Sequence[Rank]) -> int:
        return min(ranks, key=lambda rank: (rank.tokens + rank.queued_tokens, rank.number)).number
