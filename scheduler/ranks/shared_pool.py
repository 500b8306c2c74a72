"""Refills every rank from one pool at each boundary, so that ranks hold equal numbers of requests and equal KV.

The load of a rank is its predicted time, which both determine, in tokens of KV that take as long. The least loaded
rank is served first: with the longest request that keeps it below the most loaded one, so that long requests come to
ranks with large gaps and short ones fill the small ones.

Where room binds, not slots, full caches have equal KV, and what differs is what unequal lengths cost: each request of a
rank counts for a share of its longest. So the longest request is placed first, each on the rank to which it adds least
load, which is one with requests of its length. No rank is filled beyond the level that the first full cache reaches.

A rank above the level gives requests to other ranks, while that is worth the copy: a long one goes to longer ones, short
ones leave a rank of long ones.

Fairness: a request is overtaken by fewer than `ranks * WINDOW_OF_A_RANK` later ones. Once half as many have, it goes
first, to the least loaded rank with room for it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.ranks.base import Members, Move, Place, Placement, Rank, Ready
from alignedserve.scheduler.ranks.window import Window

WINDOW_OF_A_RANK = 4
LATER_SLOT = 0.5  # of a mean request: what is kept of a rank's gap for each slot that it fills afterwards
REQUEST_TOKENS = 256  # a request's load beside its KV, without a cost model
SLACK = 0.005  # share of the level by which a rank may exceed it before requests move
ABOVE_WEIGHT = 3.0  # of load above the level, which every rank waits for, beside the sum of all loads
LONG = 4  # times the mean: the longest request of the batch from which `Weights.unequal` is taken
COPY_WEIGHT = 0.1  # by how many tokens loads must fall, so weighed, for each token that is copied


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

    def use_cost(self, cost: StepCost) -> None:
        self._cost = cost

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
            return self._refill_room(ranks, loads, weights)
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

    def _refill_room(self, ranks: Sequence[Rank], loads: list[float], weights: Weights) -> list[Place]:
        """Where room binds. Loads are compared by what fills room, without the weight of a request itself."""
        window, places = self._window, []
        level = self._full_level(ranks, loads)

        def place(request: Ready, most: float) -> bool:
            fitting = [rank for rank in ranks if rank.takes(request)]
            added = [_added(rank, request.tokens, weights) - weights.request for rank in fitting]
            # an empty rank takes any request: what it holds decides alone how long it takes
            possible = [
                (more, loads[rank.number], rank.number)
                for rank, more in zip(fitting, added, strict=True)
                if not rank.requests or loads[rank.number] + more <= most
            ]
            if not possible:
                return False
            more, _, number = min(possible)
            window.remove(request)
            ranks[number].take(request)
            loads[number] += more
            places.append(Place(request.key, number))
            return True

        while (oldest := window.overtaken()) is not None and place(oldest, math.inf):
            pass
        placed = -1
        while placed < len(places):  # the window has moved on
            placed = len(places)
            for request in window.longest_first():
                place(request, level)
        return places

    def moves(self, ranks: Sequence[Rank], members: Members) -> list[Move]:
        found: list[Move] = []
        weights = self._weigh(ranks)
        loads = [self._load(rank, weights) for rank in ranks]
        _, level = self._after_refill(ranks, loads, weights)
        if level == math.inf:
            level = self._full_level(ranks, loads)
        movable: dict[int, list[Ready]] = {}
        above = {number for number, load in enumerate(loads) if load - level > SLACK * level}
        while above and len(found) < len(ranks):
            source = max(above, key=lambda number: (loads[number], number))
            if not any(rank.slots > 0 and rank.number != source and rank.room_blocks > 0 for rank in ranks):
                break
            if source not in movable:
                movable[source] = sorted(members.of(source), key=lambda one: (one.tokens, one.number))
            best = _best_move(ranks, source, movable[source], loads, level, weights)
            if best is None:
                above.remove(source)
                continue
            request, target = best
            movable[source].remove(request)
            _leave(ranks[source], request, movable[source])
            ranks[target].take(request)
            for number in (source, target):
                loads[number] = self._load(ranks[number], weights)
            if loads[source] - level <= SLACK * level:
                above.remove(source)
            found.append(Move(request.key, source, target))
        return found

    def _full_level(self, ranks: Sequence[Rank], loads: Sequence[float]) -> float:
        """The least load of a rank whose room is filled; infinite without any."""
        window = self._window
        of_block = window.mean_tokens / window.mean_blocks if len(window) else 0.0
        rooms = [max(0, rank.room_blocks) * of_block if rank.slots > 0 else 0.0 for rank in ranks]
        return min((loads[rank.number] + rooms[rank.number] for rank in ranks if rank.requests), default=math.inf)

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


@dataclass(frozen=True, slots=True)
class Weights:
    """Seconds of a token of KV; how many tokens take as long as one more request beside its KV, and as a token by which
    a request is shorter than the longest.
    """

    token_s: float
    request: float
    unequal: float


def _equal_s(cost: StepCost, requests: int, tokens: int) -> float:
    mean = tokens // requests
    return cost.counted_s(requests, mean * requests, mean, mean)


def _added(rank: Rank, tokens: int, weights: Weights) -> float:
    """The load that a request of so many tokens adds to the rank."""
    count, longest = rank.requests, rank.longest if rank.requests else 0
    shorter = (count + 1) * max(longest, tokens) - count * longest - tokens
    return tokens + weights.request + weights.unequal * shorter


def _freed(rank: Rank, tokens: int, longest: int, weights: Weights) -> float:
    """The load that the rank loses with a request of so many tokens. `longest`: of those that stay."""
    shorter = rank.requests * rank.longest - (rank.requests - 1) * longest - tokens
    return tokens + weights.request + weights.unequal * shorter


def _best_move(
    ranks: Sequence[Rank], source: int, held: list[Ready], loads: Sequence[float], level: float, weights: Weights
) -> tuple[Ready, int] | None:
    """The request of `source`, and the rank to go to, that lower the loads most for its tokens; None: none is worth it.

    `held`: those that may move, in order of length.
    """
    rank, load = ranks[source], loads[source]
    at = bisect_left(held, load - level - weights.request, key=lambda one: one.tokens)
    best, most = None, 0.0
    for one in {one.key: one for one in (*held[:1], *held[max(0, at - 2) : at + 2], *held[-1:])}.values():
        longest = rank.longest
        if one.tokens >= longest:
            longest = held[-2].tokens if len(held) > 1 else rank.shortest
        left = load - _freed(rank, one.tokens, longest, weights)
        for target in ranks:
            if target is rank or not target.takes(one):
                continue
            before = loads[target.number]
            after = before + _added(target, one.tokens, weights)
            if after > max(level, left):
                continue
            above = max(0.0, load - level) - max(0.0, left - level) + max(0.0, before - level) - max(0.0, after - level)
            worth = load + before - left - after + ABOVE_WEIGHT * above - COPY_WEIGHT * one.tokens
            if worth > most:
                best, most = (one, target.number), worth
    return best


def _leave(rank: Rank, request: Ready, others: Sequence[Ready]) -> None:
    """The request is about to leave. `others`: of those that stay, in order of length."""
    rank.requests -= 1
    rank.tokens -= request.tokens
    rank.slots += 1
    if request.tokens >= rank.longest:
        rank.longest = others[-1].tokens if others else rank.shortest
    if request.tokens <= rank.shortest:
        rank.shortest = others[0].tokens if others else rank.longest
