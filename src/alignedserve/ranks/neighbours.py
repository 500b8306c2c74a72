"""Which of an instance's GPUs the ranks of one tensor parallel group get: those with the best links to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from math import inf

NVLINK = 0
"""The distance of two GPUs that NVLink connects, directly or by switches. Others are farther."""
MOST_TRIED = 20_000  # groups; all of them on nodes of eight GPUs

Distance = Callable[[str, str], int]
"""Of two GPUs: NVLINK, or more the farther the path between them is."""
Group = tuple[str, ...]
_Cost = tuple[float, float]  # the worst distances of all groups, and all distances, each summed


def neighbours_together(gpus: Sequence[str], size: int, distance: Distance) -> list[str]:
    """The GPUs in an order in which each `size` in a row are as near to each other as can be.

    Of equal orders it is the one that is nearest to the given one. If the GPUs do not make groups of `size`, the order
    stays.
    """
    if size < 2 or len(gpus) <= size or len(gpus) % size:
        return list(gpus)
    search = _Search(gpus, size, distance)
    search.extend((), tuple(gpus), (0.0, 0.0))
    return [gpu for group in sorted(search.best, key=lambda group: gpus.index(group[0])) for gpu in group]


def cost_of(group: Sequence[str], distance: Distance) -> _Cost:
    """The worst distance within a group, and the sum of all."""
    found = [distance(*pair) for pair in combinations(group, 2)]
    return float(max(found)), float(sum(found))


class _Search:
    """Tries groups of the first GPU that is left, the best first, and leaves out what cannot become better."""

    def __init__(self, gpus: Sequence[str], size: int, distance: Distance) -> None:
        self._size, self._distance = size, distance
        self._least = min(distance(*pair) for pair in combinations(gpus, 2))
        self._left = MOST_TRIED
        self._cost: _Cost = (inf, inf)  # of `best`
        self.best: tuple[Group, ...] = ()

    def extend(self, groups: tuple[Group, ...], free: Group, cost: _Cost) -> None:
        """`free`: GPUs that are in no group yet. `cost`: of the groups."""
        if not free:
            self.best, self._cost = groups, cost
            return
        first, *others = free
        tried = [(first, *rest) for rest in combinations(others, self._size - 1)]
        costs = {group: cost_of(group, self._distance) for group in tried}
        for group in sorted(tried, key=costs.__getitem__):
            rest = tuple(gpu for gpu in free if gpu not in group)
            found = cost[0] + costs[group][0], cost[1] + costs[group][1]
            more, links = len(rest) // self._size, self._size * (self._size - 1) // 2
            if (found[0] + more * self._least, found[1] + more * links * self._least) >= self._cost:
                continue
            if self._left <= 0 and self.best:
                return
            self._left -= 1
            self.extend((*groups, group), rest, found)


def apart(gpus: Sequence[str], size: int, distance: Distance) -> list[tuple[str, str]]:
    """Pairs of one group of `size` GPUs in a row that NVLink does not connect."""
    bounds = pairwise([*range(0, len(gpus), max(1, size)), len(gpus)])
    groups = [gpus[begin:end] for begin, end in bounds]
    return [pair for group in groups for pair in combinations(group, 2) if distance(*pair) != NVLINK]
