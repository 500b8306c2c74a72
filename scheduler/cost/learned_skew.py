"""What unequal lengths cost, learned from measured iterations: `alpha` of `skew.py`, as one number of an instance.

An iteration of `n` requests with `total` tokens of KV is fitted as `a + b n + c total + d n longest`. At equal lengths
`n longest = total`, so `d (n longest - total)` is the bubble, and `d / (c + d)` alpha. Each tile of requests (of 8, 16,
32, 64, then every 64) has an `a` of its own: the time of a GPU's matrix products rises in steps as large as a bubble.

The sums of observations are kept in blocks of consecutive ones. The error of a result is how much it depends on single
blocks (delete-one jackknife): this includes noise that lasts for several observations, and what the form misses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log2, sqrt
from operator import add, sub

from alignedserve.scheduler.cost.least_squares import RIDGE, solve, solve_nonnegative

FEWEST_BLOCKS = 16  # with fewer nothing is known; twice as many are merged in pairs
FIRST_BLOCK, LARGEST_BLOCK = 4, 64  # observations: the last 1,000 to 2,000 are remembered
LEAST_TIME = 0.1  # of the mean time, for lengths far from those observed
TILE = 64.0  # requests
LEAST_TILE = -2
USEFUL_ERROR = 0.03  # of a share
# The sums of a tile: of 1, x = (n, total, padded) and y; then of x x' (at PLACES) and of x y.
PLACES = ((5, 6, 7), (6, 8, 9), (7, 9, 10))

Tiles = dict[int, list[float]]  # sums by tile


@dataclass(frozen=True, slots=True)
class Share:
    """A share of time, from 0 to 1, and its standard error."""

    value: float
    error: float

    @property
    def useful(self) -> bool:
        return self.error <= USEFUL_ERROR


class LearnedSkew:
    """Memory is bounded: by blocks times tiles that they have."""

    def __init__(self) -> None:
        self._blocks: list[Tiles] = []
        self._size = FIRST_BLOCK  # observations in a block
        self._latest: Tiles = {}  # not full yet
        self._count = 0  # of its observations
        self._fits: list[_Fit] = []  # of all blocks, then without each of them; empty: to be computed

    def observe(self, n: float, t: float, p: float, y: float) -> None:
        """An iteration, or the means of several: requests, total, requests times longest, and seconds."""
        products = 1.0, n, t, p, y, n * n, n * t, n * p, t * t, t * p, p * p, n * y, t * y, p * y
        tile = _tile(n)
        sums = self._latest.get(tile)
        self._latest[tile] = list(products) if sums is None else list(map(add, sums, products))
        self._count += 1
        if self._count < self._size:
            return
        if len(self._blocks) == 2 * FEWEST_BLOCKS:
            if self._size < LARGEST_BLOCK:
                self._size *= 2
                self._blocks = [_sum(self._blocks[i : i + 2]) for i in range(0, len(self._blocks), 2)]
                return  # the latest block is half full now
            del self._blocks[0]
        self._blocks.append(self._latest)
        self._latest, self._count, self._fits = {}, 0, []

    def share(self, lengths: Sequence[int] | None = None) -> Share | None:
        """What unequal lengths cost of the time of an iteration of these prefix lengths; None: not known yet.

        Without `lengths`: of the mean of all observed iterations.
        """
        if len(self._blocks) < FEWEST_BLOCKS:
            return None
        if not self._fits:
            whole = _sum(self._blocks)
            self._fits = [_Fit(whole), *(_Fit(_without(whole, block)) for block in self._blocks)]
        fit = self._fits[0]
        x = fit.mean
        if lengths is not None:
            x = [float(len(lengths)), float(sum(lengths)), float(len(lengths) * max(lengths))]
        value, *others = (fit.share(x) for fit in self._fits)
        mean = sum(others) / len(others)
        variance = sum((other - mean) ** 2 for other in others) * (len(others) - 1) / len(others)
        return Share(max(0.0, value), sqrt(variance) + fit.unobserved() * fit.most(x))


class _Fit:
    """`mean`: of x. The bubble may be negative here, or errors of a bubble of 0 would seem to be 0."""

    def __init__(self, tiles: Tiles) -> None:
        count, *sums_of_all = [sum(column) for column in zip(*tiles.values(), strict=True)]
        means = [value / count for value in sums_of_all]
        self.mean: list[float] = means[:3]
        self._mean_s: float = means[3]
        scale = [sqrt(means[PLACES[i][i] - 1]) for i in range(3)]  # typical values
        self._a, b = [[0.0] * 3 for _ in range(3)], [0.0] * 3
        for sums in tiles.values():
            for i in range(3):
                mean = sums[1 + i] / sums[0]
                b[i] += (sums[11 + i] - mean * sums[4]) / scale[i]
                for j in range(3):
                    self._a[i][j] += (sums[PLACES[i][j]] - mean * sums[1 + j]) / (scale[i] * scale[j])
        weights = solve_nonnegative(self._a, b, (0.0, 0.0, 0.0), free=(2,))
        self._weights = [weight / typical for weight, typical in zip(weights, scale, strict=True)]
        self._starts = {
            tile: (sums[4] - sum(w * x for w, x in zip(self._weights, sums[1:4], strict=True))) / sums[0]
            for tile, sums in tiles.items()
        }

    def share(self, x: Sequence[float]) -> float:
        b, c, d = self._weights
        return self._share(x, b, c, d)

    def most(self, x: Sequence[float]) -> float:
        """The share if iterations took as long as if all requests were the longest (alpha 1)."""
        b, c, d = self._weights
        return self._share(x, b, 0.0, c + max(0.0, d))

    def unobserved(self) -> float:
        """How much of d is the prior's: 1 if all iterations had equal lengths, near 0 once they varied."""
        a = [[value + (RIDGE if i == j else 0.0) for j, value in enumerate(row)] for i, row in enumerate(self._a)]
        return RIDGE * solve(a, [0.0, 0.0, 1.0])[2]

    def _share(self, x: Sequence[float], b: float, c: float, d: float) -> float:
        n, total, padded = x
        tile = _tile(n)
        start_s = self._starts[min(self._starts, key=lambda other: abs(other - tile))]
        equal_s: float = max(start_s + b * n + (c + d) * total, LEAST_TIME * self._mean_s)
        bubble_s = d * (padded - total)
        return bubble_s / (equal_s + max(0.0, bubble_s))


def _tile(requests: float) -> int:
    """The number of the tile: 1 for 33 to 64 requests, 2 to 128, 3 to 192; 0 to 32, -1 to 16, -2 to 8."""
    tiles = requests / TILE
    return ceil(tiles) if tiles > 1.0 else max(LEAST_TILE, 1 + ceil(log2(tiles)))


def _sum(blocks: Iterable[Tiles]) -> Tiles:
    found: Tiles = {}
    for block in blocks:
        for tile, sums in block.items():
            found[tile] = list(map(add, found[tile], sums)) if tile in found else sums
    return found


def _without(whole: Tiles, block: Tiles) -> Tiles:
    left = {tile: list(map(sub, sums, block[tile])) if tile in block else sums for tile, sums in whole.items()}
    return {tile: sums for tile, sums in left.items() if sums[0] >= 0.5}
