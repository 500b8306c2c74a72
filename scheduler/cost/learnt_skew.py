"""What unequal lengths cost, learned from measured iterations: `alpha` of `skew.py`, as one number of an instance.

An iteration of `n` requests with `total` tokens of KV is fitted as `a + b n + c total + d n longest`. At equal lengths
`n longest = total`, so `d (n longest - total)` is the bubble, and `d / (c + d)` alpha.

The sums of observations are kept in blocks of consecutive ones. The error of a result is how much it depends on single
blocks (delete-one jackknife): this includes noise that lasts for several observations, and what the form misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from operator import add, sub

from alignedserve.scheduler.cost.least_squares import RIDGE, solve, solve_nonnegative

FEWEST_BLOCKS = 16  # with fewer nothing is known; twice as many are merged in pairs
FIRST_BLOCK, LARGEST_BLOCK = 4, 64  # observations: the last 1,000 to 2,000 are remembered
REQUESTS, TOKENS = 64.0, 65536.0  # typical values
SUMS = 14
# Where the sums of u u' are in a block, for u = (1, requests, total, padded). After them come those of u y.
PLACES = ((0, 1, 2, 3), (1, 4, 5, 6), (2, 5, 7, 8), (3, 6, 8, 9))

Block = list[float]


@dataclass(frozen=True, slots=True)
class Share:
    """A share of time, from 0 to 1, and its standard error."""

    value: float
    error: float


class LearntSkew:
    """`prior_s`: the time of an iteration before the first observation. Memory is bounded."""

    def __init__(self, prior_s: float = 1e-2) -> None:
        self._prior = prior_s, 0.0, 0.0, 0.0
        self._blocks: list[Block] = []
        self._size = FIRST_BLOCK  # observations in a block
        self._latest: Block = [0.0] * SUMS  # not full yet
        self._fits: list[list[float]] = []  # of all blocks, then without each of them; empty: to be computed

    def observe(self, requests: float, total: float, padded: float, seconds: float) -> None:
        """An iteration, or the means of several. `padded`: requests times longest."""
        n, t, p, y = requests / REQUESTS, total / TOKENS, padded / TOKENS, seconds
        products = 1.0, n, t, p, n * n, n * t, n * p, t * t, t * p, p * p, y, n * y, t * y, p * y
        self._latest = list(map(add, self._latest, products))
        if self._latest[0] < self._size:
            return
        if len(self._blocks) == 2 * FEWEST_BLOCKS:
            if self._size < LARGEST_BLOCK:
                self._size *= 2
                pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
                self._blocks = [list(map(add, *pair)) for pair in pairs]
                return  # the latest block is half full now
            del self._blocks[0]
        self._blocks.append(self._latest)
        self._latest, self._fits = [0.0] * SUMS, []

    def share(self, lengths: Sequence[int] | None = None) -> Share | None:
        """What unequal lengths cost of the time of an iteration of these prefix lengths; None: not known yet.

        Without `lengths`: of the mean of all observed iterations.
        """
        if len(self._blocks) < FEWEST_BLOCKS:
            return None
        whole = [sum(column) for column in zip(*self._blocks, strict=True)]
        if not self._fits:
            without = [list(map(sub, whole, block)) for block in self._blocks]
            self._fits = [self._fit(block) for block in (whole, *without)]
        u = whole[:4]
        if lengths is not None:
            total = sum(lengths) / TOKENS
            u = [1.0, len(lengths) / REQUESTS, total, len(lengths) * max(lengths) / TOKENS]
        value, *others = (_share(weights, u) for weights in self._fits)
        mean = sum(others) / len(others)
        variance = sum((other - mean) ** 2 for other in others) * (len(others) - 1) / len(others)
        return Share(max(0.0, value), sqrt(variance) + self._unobserved(whole) * self._most(u))

    def _fit(self, block: Block) -> list[float]:
        """The bubble may be negative here, or errors of a bubble of 0 would seem to be 0."""
        return solve_nonnegative(_matrix(block), block[-4:], self._prior, free=(3,))

    def _unobserved(self, whole: Block) -> float:
        """How much of d is the prior's: 1 if all iterations had equal lengths, near 0 once they varied."""
        a = [
            [value + (RIDGE if i == j else 0.0) for j, value in enumerate(row)] for i, row in enumerate(_matrix(whole))
        ]
        return RIDGE * solve(a, [0.0, 0.0, 0.0, 1.0])[3]

    def _most(self, u: Sequence[float]) -> float:
        """The share if iterations took as long as if all requests were the longest (alpha 1)."""
        a, b, c, d = self._fits[0]
        return _share([a, b, 0.0, c + max(0.0, d)], u)


def _matrix(block: Block) -> list[list[float]]:
    return [[block[place] for place in row] for row in PLACES]


def _share(weights: Sequence[float], u: Sequence[float]) -> float:
    """The bubble's share of the time; at most 1."""
    a, b, c, d = weights
    equal_s = a * u[0] + b * u[1] + (c + d) * u[2]
    bubble_s = d * (u[3] - u[2])
    return min(1.0, bubble_s / max(equal_s + bubble_s, abs(bubble_s), 1e-9))
