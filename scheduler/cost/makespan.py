"""How long (request, head) jobs take on SMs that each run one at a time: list scheduling, longest first.

A kernel starts its jobs in the order of the batch. Longest first is the best order for uneven ones, so what is lost to
a straggler is never overstated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def makespan(lengths: Sequence[int], heads: int, workers: int) -> int:
    """When the last of `heads` jobs for each length has ended on `workers` workers, in tokens. Exact; nothing: 0.

    Each job goes to the worker that is free first. Equal jobs and workers free at the same time are taken as groups.
    """
    free: list[tuple[int, int]] = [(0, workers)]  # a heap of (free at, how many)
    end = 0
    ordered = sorted(lengths, reverse=True)
    number = 0
    while number < len(ordered):
        length = ordered[number]
        first = number
        while number < len(ordered) and ordered[number] == length:
            number += 1
        jobs = (number - first) * heads
        while jobs:
            at, count = free[0]
            taken = min(count, jobs)
            jobs -= taken
            end = max(end, at + length)
            if taken == count:
                heapq.heapreplace(free, (at + length, taken))
            else:
                heapq.heapreplace(free, (at, count - taken))
                heapq.heappush(free, (at + length, taken))
    return end


def makespan_bound(total: float, longest: float, heads: int, workers: int) -> float:
    """No list schedule takes longer (Graham 1966): the shortest possible mean, and the longest job on top."""
    return total * heads / workers + longest
