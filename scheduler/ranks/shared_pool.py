"""Refills every rank from one pool at each boundary, so that ranks hold equal numbers of requests and equal KV.

The load of a rank is its predicted time, which both determine, in tokens of KV that take as long. The least loaded
rank is served first: with the longest request that keeps it below the most loaded one, so that long requests come to
ranks with large gaps and short ones fill the small ones.
Where room binds, not slots, `full_caches.py` decides.

Before, a rank above the level that a refill can reach gives requests to others, while that is worth the copy.

Fairness: a request is overtaken by fewer than `ranks * WINDOW_OF_A_RANK` later ones. Once half as many have, it goes
first, to the least loaded rank with room for it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.ranks import full_caches
from alignedserve.scheduler.ranks.base import Members, Move, Place, Placement, Rank, Ready
from alignedserve.scheduler.ranks.load import Weights, leave
from alignedserve.scheduler.ranks.window import Window

WINDOW_OF_A_RANK = 4
LATER_SLOT = 0.5  # of a mean request: what is kept of a rank's gap for each slot that it fills afterwards
REQUEST_TOKENS = 256  # a request's load beside its KV, without a cost model
SLACK = 0.01  # share of the mean load by which a rank may exceed it before requests move
LONG = 4  # times the mean: the longest request of the batch from which `Weights.unequal` is taken
COPY_WEIGHT = 0.1  # by how many tokens the higher load must fall for each token that is copied
MOST_MOVES = 4  # from one boundary to the next
MOST_FREE_MOVES = 64  # where ranks share a cache


class SharedPool(Placement):
    """Equal numbers and equal KV, from one pool."""

    STICKY = False
    LOOKS_AT_RANKS = False

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._window = Window(ranks * WINDOW_OF_A_RANK)
        self._cost: StepCost | None = None
        self._weights: Weights | None = None
        self._weighed = 0  # the mean number of requests that `_weights` are of
        self._copy_weight, self._most_moves = COPY_WEIGHT, MOST_MOVES

    def use_cost(self, cost: StepCost) -> None:
        self._cost = cost

    def share_cache(self) -> None:
        self._copy_weight, self._most_moves = 0.0, MOST_FREE_MOVES

    def add(self, request: Ready, ranks: Sequence[Rank]) -> None:
        self._window.add(request)

    def waiting(self) -> int:
        return len(self._window)

    def refill(self, ranks: Sequence[Rank]) -> list[Place]:
        places: list[Place] = []
        window = self._window
        slots = sum(rank.slots for rank in ranks if rank.slots > 0)
        if not len(window) or not slots:
            return places
        weights = self._weigh(ranks)
        loads = [self._load(rank, weights) for rank in ranks]
        requests, level = self._after_refill(ranks, loads, weights)
        if level == math.inf:
            return full_caches.refill(ranks, loads, window, weights)
        ceiling = max(level, *loads)
        # by load, least first
        least = [(loads[rank.number], rank.number) for rank in ranks if rank.slots > 0]
        heapq.heapify(least)
        while len(window) and least:
            load, number = heapq.heappop(least)
            rank = ranks[number]
            request = window.overtaken()
            if request is None or not rank.takes(request):
                later = max(0, round(requests - rank.requests) - 1) * LATER_SLOT
                gap = ceiling - load - weights.request - later * (window.mean_tokens + weights.request)
                request = window.longest(gap, rank.room_blocks)
            if request is None:
                continue  # nothing that waits fits
            window.remove(request)
            rank.take(request)
            places.append(Place(request.key, number))
            if rank.slots > 0:
                heapq.heappush(least, (self._load(rank, weights), number))
        return places

    def moves(self, ranks: Sequence[Rank], members: Members) -> list[Move]:
        found: list[Move] = []
        weights = self._weigh(ranks)
        loads = [self._load(rank, weights) for rank in ranks]
        _, level = self._after_refill(ranks, loads, weights)
        if level == math.inf:
            return full_caches.moves(ranks, loads, members, self._window, weights)
        movable: dict[int, list[Ready]] = {}
        came: dict[int, list[Ready]] = {}
        while len(found) < self._most_moves:
            source = max(range(len(loads)), key=loads.__getitem__)
            targets = [rank.number for rank in ranks if rank.slots > 0 and rank.number != source]
            if loads[source] - level <= SLACK * level or not targets:
                break
            target = min(targets, key=loads.__getitem__)
            if source not in movable:
                movable[source] = sorted(members.of(source), key=lambda one: (one.tokens, one.number))
            best = self._best_move(ranks[source], ranks[target], movable[source], weights, level)
            if best is None:
                break
            movable[source].remove(best)
            leave(ranks[source], best, sorted((*movable[source], *came.get(source, ())), key=lambda one: one.tokens))
            ranks[target].take(best)
            came.setdefault(target, []).append(best)
            for number in (source, target):
                loads[number] = self._load(ranks[number], weights)
            found.append(Move(best.key, source, target))
        return found

    def _after_refill(self, ranks: Sequence[Rank], loads: Sequence[float], weights: Weights) -> tuple[float, float]:
        """A rank's mean number of requests and mean load once every slot is filled; infinite if room binds first."""
        window, joining = self._window, 0
        if len(window):
            open_ranks = [rank for rank in ranks if rank.slots > 0]
            joining = min(sum(rank.slots for rank in open_ranks), len(window))
            if joining * window.mean_blocks > sum(max(0, rank.room_blocks) for rank in open_ranks):
                return math.inf, math.inf
        requests = sum(rank.requests for rank in ranks) + joining
        load = sum(loads) + joining * (window.mean_tokens + weights.request)
        return requests / len(ranks), load / len(ranks)

    def _best_move(self, source: Rank, target: Rank, held: list[Ready], weights: Weights, level: float) -> Ready | None:
        """The request whose move lowers the higher of both loads most for its tokens; None: none is worth it."""
        above = self._load(source, weights)
        wanted = (above - max(level, self._load(target, weights))) - weights.request
        at = bisect_left(held, wanted, key=lambda one: one.tokens)
        best, most = None, 0.0
        for one in {one.key: one for one in (*held[max(0, at - 2) : at + 2], *held[-1:])}.values():
            if not target.takes(one):
                continue
            after_source, after_target = replace(source), replace(target)
            leave(after_source, one, [other for other in held[-2:] if other is not one])
            after_target.take(one)
            gain = above - max(self._load(after_source, weights), self._load(after_target, weights))
            worth = gain - self._copy_weight * one.tokens
            if worth > most:
                best, most = one, worth
        return best

    def _load(self, rank: Rank, weights: Weights) -> float:
        """In tokens of KV that take as long."""
        if self._cost is None or not weights.token_s:
            return rank.tokens + weights.request * rank.requests
        return self._cost.counted_s(rank.requests, rank.tokens, rank.longest, rank.shortest) / weights.token_s

    def _weigh(self, ranks: Sequence[Rank]) -> Weights:
        cost = self._cost
        if cost is None:
            return Weights(0.0, REQUEST_TOKENS, 0.0)
        count = max(4, sum(rank.requests for rank in ranks) // len(ranks))
        tokens = max(4 * count, sum(rank.tokens for rank in ranks) // len(ranks))
        if self._weights is not None and abs(count - self._weighed) <= self._weighed // 8:
            return self._weights
        few, many = count // 2, count * 3 // 2
        by_request = (_equal_s(cost, many, tokens) - _equal_s(cost, few, tokens)) / (many - few)
        token_s = (_equal_s(cost, count, tokens * 3 // 2) - _equal_s(cost, count, tokens // 2)) / tokens
        mean = tokens // count
        longest = LONG * mean
        unequal_s = cost.counted_s(count, mean * count, longest, mean // 2) - _equal_s(cost, count, tokens)
        self._weighed = count
        self._weights = Weights(0.0, REQUEST_TOKENS, 0.0)
        if token_s > 0:
            unequal = unequal_s / token_s / (count * (longest - mean))
            self._weights = Weights(token_s, max(0.0, by_request / token_s), max(0.0, unequal))
        return self._weights


def _equal_s(cost: StepCost, requests: int, tokens: int) -> float:
    mean = tokens // requests
    return cost.counted_s(requests, mean * requests, mean, mean)
