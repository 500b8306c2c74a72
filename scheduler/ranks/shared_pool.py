"""Refills every rank from one pool at each boundary, so that ranks hold equal numbers of requests and equal KV.

The load of a rank is its tokens of KV plus a number of tokens for each request, which the cost model tells: what a
request costs beside the KV that it reads. A rank below the target gets the waiting request whose length fills its gap
best. Where nobody waits, running requests move from the most to the least loaded rank while that is worth their copy.

Fairness: a request is overtaken by fewer than `ranks * WINDOW_OF_A_RANK` later ones. Once half as many have, it is
placed first, at the least loaded rank that has room.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from alignedserve.request import RequestKey
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.ranks.base import Members, Move, Place, Placement, Rank, Ready

WINDOW_OF_A_RANK = 32
SLACK = 0.01  # share of the mean load by which a rank may exceed it before requests move
MOST_MOVES = 4  # from one boundary to the next


class SharedPool(Placement):
    """Equal numbers and equal KV, from one pool."""

    STICKY = False

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._window = Window(ranks * WINDOW_OF_A_RANK)
        self._cost: StepCost | None = None
        self._request_tokens = 0.0

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
        self._weigh(ranks)
        expected = min(slots, len(window))
        requests = (sum(rank.requests for rank in ranks) + expected) / len(ranks)
        tokens = (sum(rank.tokens for rank in ranks) + expected * window.mean_tokens) / len(ranks)
        least = [(self._load(rank), rank.number) for rank in ranks if rank.slots > 0]
        heapq.heapify(least)
        while len(window) and least:
            _, number = heapq.heappop(least)
            rank = ranks[number]
            request = window.overtaken()
            if request is None or not rank.takes(request):
                missing = max(1, round(requests - rank.requests))
                request = window.nearest((tokens - rank.tokens) / missing, rank.room_blocks)
            if request is None:
                continue  # nothing that waits fits
            window.remove(request)
            rank.take(request)
            places.append(Place(request.key, number))
            if rank.slots > 0:
                heapq.heappush(least, (self._load(rank), number))
        return places

    def moves(self, ranks: Sequence[Rank], members: Members) -> list[Move]:
        found: list[Move] = []
        self._weigh(ranks)
        loads = [self._load(rank) for rank in ranks]
        mean = sum(loads) / len(loads)
        movable: dict[int, list[Ready]] = {}
        while len(found) < MOST_MOVES:
            source = max(range(len(loads)), key=loads.__getitem__)
            excess = loads[source] - mean
            targets = [rank.number for rank in ranks if rank.slots > 0 and rank.number != source]
            if excess <= SLACK * mean or not targets:
                break
            target = min(targets, key=loads.__getitem__)
            wanted = min(excess, (loads[source] - loads[target]) / 2) - self._request_tokens
            held = movable.get(source)
            if held is None:
                held = movable[source] = sorted(members.of(source), key=lambda one: one.tokens)
            fitting = [one for one in held if ranks[target].takes(one) and one.tokens <= 1.5 * wanted]
            if not fitting:
                break
            best = min(fitting, key=lambda one: (abs(one.tokens - wanted), one.number))
            held.remove(best)
            ranks[target].take(best)
            ranks[source].requests -= 1
            ranks[source].tokens -= best.tokens
            for number in (source, target):
                loads[number] = self._load(ranks[number])
            found.append(Move(best.key, source, target))
        return found

    def _load(self, rank: Rank) -> float:
        return rank.tokens + self._request_tokens * rank.requests

    def _weigh(self, ranks: Sequence[Rank]) -> None:
        """How many tokens of KV take as long as one more request beside them, around the mean rank."""
        if self._cost is None or self._request_tokens:
            return
        count = max(8, sum(rank.requests for rank in ranks) // len(ranks))
        tokens = max(8 * count, sum(rank.tokens for rank in ranks) // len(ranks))
        if count < 32:
            return
        few, many = count // 2, count * 3 // 2
        of = self._cost.balanced_step_s
        by_request = (of((), [tokens // many] * many) - of((), [tokens // few] * few)) / (many - few)
        by_token = (of((), [tokens * 3 // 2 // count] * count) - of((), [tokens // 2 // count] * count)) / tokens
        self._request_tokens = max(0.0, by_request / by_token) if by_token > 0 else 0.0


class Window:
    """Waiting requests: the oldest, and those that came within `size` of it, by length; the others later."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_tokens: list[tuple[int, int]] = []  # tokens, number of the requests in the window
        self._oldest: list[int] = []  # heap of the numbers in the window, and of removed ones
        self._later: list[int] = []  # heap
        self._requests: dict[int, Ready] = {}
        self._tokens = 0  # of the window
        self._furthest = -1  # the greatest number that was removed

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def mean_tokens(self) -> float:
        return self._tokens / len(self._by_tokens) if self._by_tokens else 0.0

    def add(self, request: Ready) -> None:
        self._requests[request.number] = request
        heapq.heappush(self._later, request.number)
        self._extend()

    def remove(self, request: Ready) -> None:
        del self._requests[request.number]
        del self._by_tokens[bisect_left(self._by_tokens, (request.tokens, request.number))]
        self._tokens -= request.tokens
        self._furthest = max(self._furthest, request.number)
        self._extend()

    def overtaken(self) -> Ready | None:
        """The oldest request, if half as many as may have overtaken it; else None."""
        oldest = self._first()
        return self._requests[oldest] if oldest is not None and self._furthest - oldest > self._size // 2 else None

    def nearest(self, tokens: float, most_blocks: int) -> Ready | None:
        """The request whose length is nearest to `tokens`, of those of at most `most_blocks`. Of equals the oldest."""
        by_tokens, requests = self._by_tokens, self._requests
        at = bisect_left(by_tokens, (tokens, 0))
        below = at - 1
        while below >= 0 and requests[by_tokens[below][1]].blocks > most_blocks:
            below -= 1
        if at < len(by_tokens):
            above = requests[by_tokens[at][1]]
            if above.blocks <= most_blocks and (below < 0 or above.tokens - tokens <= tokens - by_tokens[below][0]):
                return above
        return requests[by_tokens[below][1]] if below >= 0 else None

    def _first(self) -> int | None:
        while self._oldest and self._oldest[0] not in self._requests:
            heapq.heappop(self._oldest)
        return self._oldest[0] if self._oldest else None

    def _extend(self) -> None:
        """Take from the later ones those that now belong to the window."""
        later = self._later
        while later:
            first = self._first()
            if first is not None and later[0] >= first + self._size:
                return
            number = heapq.heappop(later)
            request = self._requests[number]
            heapq.heappush(self._oldest, number)
            insort(self._by_tokens, (request.tokens, number))
            self._tokens += request.tokens
