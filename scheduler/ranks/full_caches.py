"""The shared pool where room binds: full caches have equal KV, and what differs is what unequal lengths cost.

Each request of a rank takes as long as a share of the rank's longest. So requests join ranks of their own length: the
longest first, each where it adds least load. No rank is filled beyond the level that the first full cache reaches,
since all would wait for it. A rank above the level gives requests to others, while that is worth the copy: its longest
to a rank of long ones, or short ones to ranks of short ones, as those get room.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from alignedserve.scheduler.ranks.base import Members, Move, Place, Rank, Ready
from alignedserve.scheduler.ranks.load import Weights, added, freed, leave
from alignedserve.scheduler.ranks.window import Window

SLACK = 0.005  # share of the level by which a rank may exceed it before requests move
ABOVE_WEIGHT = 3.0  # of load above the level, which every rank waits for, beside the sum of all loads
HEAVY = 0.7  # of a mean request's KV: one whose own time takes longer counts with it
COPY_WEIGHT = 0.1  # by how many tokens loads must fall, so weighed, for each token that is copied


def refill(ranks: Sequence[Rank], loads: list[float], window: Window, weights: Weights) -> list[Place]:
    """Which waiting requests join which rank. Changes `loads` and the counters accordingly.

    Loads are compared by what fills room, without the weight of each request that joins, unless that is heavy.
    """
    places: list[Place] = []
    counted = _counted(window, weights)
    level = full_level(ranks, loads, window, counted)

    def place(request: Ready, most: float) -> bool:
        fitting = [rank for rank in ranks if rank.takes(request)]
        extra = [added(rank, request.tokens, weights) - weights.request + counted for rank in fitting]
        # an empty rank takes any request: otherwise a long one could wait without end
        possible = [
            (more, loads[rank.number], rank.number)
            for rank, more in zip(fitting, extra, strict=True)
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


def moves(ranks: Sequence[Rank], loads: list[float], members: Members, window: Window, weights: Weights) -> list[Move]:
    """At most as many as there are ranks. Changes `loads` and the counters accordingly."""
    found: list[Move] = []
    level = full_level(ranks, loads, window, _counted(window, weights))
    most = level * (1 + SLACK)
    movable: dict[int, list[Ready]] = {}
    above = {number for number, load in enumerate(loads) if load > most}
    while above and len(found) < len(ranks):
        source = max(above, key=lambda number: (loads[number], number))
        if not any(rank.slots > 0 and rank.room_blocks > 0 and rank.number != source for rank in ranks):
            break
        if source not in movable:
            movable[source] = sorted(members.of(source), key=lambda one: (one.tokens, one.number))
        held = movable[source]
        best = _best_move(ranks, source, held, loads, level, weights)
        if best is None:
            above.remove(source)
            continue
        request, target = best
        held.remove(request)
        longest = held[-1].tokens if held else ranks[source].shortest
        loads[source] -= freed(ranks[source], request.tokens, longest, weights)
        loads[target] += added(ranks[target], request.tokens, weights)
        leave(ranks[source], request, held)
        ranks[target].take(request)
        if loads[source] <= most:
            above.remove(source)
        found.append(Move(request.key, source, target))
    return found


def _counted(window: Window, weights: Weights) -> float:
    """The load of a request that joins, beside its KV. Where ranks share experts, each has its rows exchanged.

    Without a cost model its weight is a guess, and does not count.
    """
    heavy = bool(weights.token_s and len(window)) and weights.request > HEAVY * window.mean_tokens
    return weights.request if heavy else 0.0


def full_level(ranks: Sequence[Rank], loads: Sequence[float], window: Window, counted: float) -> float:
    """The least load of a rank whose room is filled; infinite without any. `counted`: of a request beside its KV."""
    of_block = (window.mean_tokens + counted) / window.mean_blocks if len(window) else 0.0
    rooms = [max(0, rank.room_blocks) * of_block if rank.slots > 0 else 0.0 for rank in ranks]
    return min((loads[rank.number] + rooms[rank.number] for rank in ranks if rank.requests), default=math.inf)


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
        left = load - freed(rank, one.tokens, longest, weights)
        for target in ranks:
            if target is rank or not target.takes(one):
                continue
            before = loads[target.number]
            after = before + added(target, one.tokens, weights)
            if after > max(level, left):
                continue
            above = max(0.0, load - level) - max(0.0, left - level) + max(0.0, before - level) - max(0.0, after - level)
            worth = load + before - left - after + ABOVE_WEIGHT * above - COPY_WEIGHT * one.tokens
            if worth > most:
                best, most = (one, target.number), worth
    return best
