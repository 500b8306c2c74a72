"""alpha, by bucket: where a split kernel's time is between equal lengths (0) and the longest for all (1)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from alignedserve.errors import ConfigError

AXES = ("chunk_tokens", "requests", "long_share", "longest", "cached_tokens")
Bucket = tuple[int, int, int, int, int]


class SkewTable:
    """`t = t_mean + alpha (t_max - t_mean)`: alpha by chunk in the pass, requests, share of long ones, and the longest.

    `bounds[axis]`: inclusive upper bounds of all buckets but the last, which has none. `alphas`: by bucket numbers; a
    bucket that was not measured takes the nearest measured one. Alpha is between 0 (the kernel hides the difference)
    and 1 (it is as slow as if all requests were the longest).
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]], alphas: Mapping[Bucket, float]) -> None:
        if not alphas:
            raise ConfigError("the skew table has no buckets")
        self.bounds = {axis: [float(bound) for bound in bounds[axis]] for axis in AXES}
        self._shape = tuple(len(self.bounds[axis]) + 1 for axis in AXES)
        table = np.full(self._shape, np.nan)
        for bucket, alpha in alphas.items():
            table[bucket] = min(1.0, max(0.0, alpha))
        # The chunk affects the kernel's schedule most, then the number of requests: the search changes those axes last.
        for axis in (4, 2, 3, 1, 0):
            _fill_from_nearest(table, axis)
        self._values: list[float] = table.ravel().tolist()
        self._chunk, self._requests, self._share, self._longest, self._cached = (self.bounds[axis] for axis in AXES)

    def by_longest(
        self, requests: int, share: float, chunk_tokens: float = 0.0, cached_tokens: float = 0.0
    ) -> list[float]:
        """Alpha for each bucket of the longest, whose bounds are `longest_bounds`."""
        _, n_requests, n_share, n_longest, n_cached = self._shape
        place = bisect_left(self._chunk, chunk_tokens)
        place = place * n_requests + bisect_left(self._requests, requests)
        place = place * n_share + bisect_left(self._share, share)
        place *= n_longest
        cached = bisect_left(self._cached, cached_tokens)
        return [self._values[(place + number) * n_cached + cached] for number in range(n_longest)]

    def at(
        self, requests: int, share: float, longest: float, chunk_tokens: float = 0.0, cached_tokens: float = 0.0
    ) -> float:
        values = self.by_longest(requests, share, chunk_tokens, cached_tokens)
        return values[bisect_left(self._longest, longest)]

    @property
    def longest_bounds(self) -> list[float]:
        return self._longest


def _fill_from_nearest(table: npt.NDArray[np.float64], axis: int) -> None:
    """Fill unknown values with the nearest known value along `axis`; of two equally near ones, the lower."""
    moved = np.moveaxis(table, axis, 0)
    known = moved.copy()
    for distance in range(1, len(moved)):
        for shift in (-distance, distance):
            source = np.full_like(known, np.nan)
            if shift < 0:
                source[distance:] = known[:-distance]
            else:
                source[:-distance] = known[distance:]
            np.copyto(moved, source, where=np.isnan(moved))


def long_share(requests: int, total: int, longest: int, shortest: int) -> float:
    """Share of long requests if all are either the longest or the shortest; 0 for equal lengths."""
    return (total / requests - shortest) / (longest - shortest) if longest > shortest else 0.0
