"""How long (request, head) jobs take on SMs that each run one at a time: list scheduling in the order of the batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import groupby

GOLDEN = (5**0.5 - 1) / 2
LONGEST_AT = 0.65  # place of the longest in its batch; from 0 to 0.8 this came closest to shuffled batches


def makespan(lengths: Sequence[int], heads: int, workers: int) -> int:
    """When the last of `heads` jobs for each length has ended on `workers` workers, in tokens. Exact; no jobs: 0.

    Jobs begin in the order of `lengths`, each on the worker that is free first. Equal jobs, and workers that become
    free together, are handled as groups.
    """
    shift = workers.bit_length()
    several = (1 << shift) - 1
    free = [workers]  # a heap of (time free << shift | count): one number compares in half the time of a pair
    replace, push = heapq.heapreplace, heapq.heappush
    end = 0
    for length, equal in groupby(lengths):
        jobs = sum(1 for _ in equal) * heads
        busy = length << shift
        soonest = free[0]
        count = soonest & several
        while count < jobs:
            replace(free, soonest + busy)
            jobs -= count
            soonest = free[0]
            count = soonest & several
        if count == jobs:
            replace(free, soonest + busy)
        else:
            free[0] = soonest - jobs  # the minimum stays the minimum
            push(free, soonest - count + jobs + busy)
        end = max(end, (soonest >> shift) + length)
    return end


def makespan_bound(total: float, longest: float, heads: int, workers: int) -> float:
    """No list schedule takes longer (Graham 1966): the shortest possible mean plus the longest job."""
    return total * heads / workers + longest


def typical_order(lengths: Sequence[int]) -> list[int]:
    """The lengths in a fixed order that stands for a batch in order of arrival, whatever order they are given in.

    The golden ratio spreads long ones over the batch. In ascending order they begin last, which takes nearly as long as
    any order.
    """
    longest_first = sorted(lengths, reverse=True)
    return [longest_first[i] for i in sorted(range(len(lengths)), key=lambda i: (LONGEST_AT + i * GOLDEN) % 1.0)]
