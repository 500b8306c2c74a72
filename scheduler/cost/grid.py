"""Functions known at the points of a grid: linear between them, and beyond along the secant of the last octave.

Only comparisons and + - * / are used, in one order, so that a number and an array of it give the same bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from alignedserve.errors import ConfigError

Floats = npt.NDArray[np.float64]


def octave_start(knots: Sequence[float]) -> int:
    """Index of the last knot at or below half of the last one: differences of the last neighbours are mostly noise."""
    return max(0, min(bisect_right(knots, knots[-1] / 2) - 1, len(knots) - 2))


def check_knots(what: str, knots: Sequence[float]) -> None:
    if not knots or any(after <= before for before, after in pairwise(knots)):
        raise ConfigError(f"{what}: a grid needs at least one point, and points must rise; got {list(knots)}")


class Curve:
    """y(x), x rising. Constant below the first x; never falling past the last."""

    __slots__ = ("_arrays", "slopes", "values", "xs")

    def __init__(self, xs: Sequence[float], values: Sequence[float]) -> None:
        self.xs = [float(x) for x in xs]
        self.values = [float(value) for value in values]
        self.slopes = [
            (self.values[i + 1] - self.values[i]) / (self.xs[i + 1] - self.xs[i]) for i in range(len(self.xs) - 1)
        ]
        start = octave_start(self.xs)
        rise = self.values[-1] - self.values[start]
        self.slopes.append(max(0.0, rise) / (self.xs[-1] - self.xs[start]) if len(self.xs) > 1 else 0.0)
        self._arrays: tuple[Floats, Floats, Floats] | None = None

    def at(self, x: float) -> float:
        if x < self.xs[0]:
            x = self.xs[0]
        i = bisect_right(self.xs, x) - 1
        return self.values[i] + (x - self.xs[i]) * self.slopes[i]

    def at_each(self, x: Floats) -> Floats:
        """`at` of every element, bit for bit."""
        if self._arrays is None:
            self._arrays = (np.array(self.xs), np.array(self.values), np.array(self.slopes))
        xs, values, slopes = self._arrays
        x = np.maximum(x, xs[0])
        i = np.searchsorted(xs, x, side="right") - 1
        result: Floats = values[i] + (x - xs[i]) * slopes[i]
        return result


class Axis:
    """One axis of a grid: finds the two points that enclose a value."""

    __slots__ = ("_start", "points")

    def __init__(self, points: Sequence[float]) -> None:
        self.points = [float(point) for point in points]
        self._start = octave_start(self.points)

    def place(self, x: float) -> tuple[int, int, float]:
        """`(i, j, w)`: the value at x is `(1 - w) v[i] + w v[j]`.

        Past the end w is above 1, before the start it is 0.
        """
        points = self.points
        if x <= points[0] or len(points) == 1:
            return 0, 0, 0.0
        if x >= points[-1]:
            last, start = len(points) - 1, self._start
            return start, last, (x - points[start]) / (points[last] - points[start])
        i = bisect_right(points, x) - 1
        return i, i + 1, (x - points[i]) / (points[i + 1] - points[i])


class Surface:
    """z(x, y) as one `Curve` over y for each x. The curve of each requested x is cached."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], values: Sequence[Sequence[float]]) -> None:
        self.x = Axis(xs)
        self.y = [float(y) for y in ys]
        self.values = [[float(value) for value in row] for row in values]
        self._curves: dict[float, Curve] = {}

    def curve(self, x: float) -> Curve:
        """z(x, .). Between grid points it is the weighted mean of their curves."""
        found = self._curves.get(x)
        if found is None:
            i, j, w = self.x.place(x)
            row = [max(0.0, (1.0 - w) * a + w * b) for a, b in zip(self.values[i], self.values[j], strict=True)]
            found = self._curves[x] = Curve(self.y, row)
            if len(self._curves) > 4096:
                self._curves = {x: found}
        return found

    def at(self, x: float, y: float) -> float:
        return self.curve(x).at(y)

    @property
    def least(self) -> float:
        """The value at the grid's origin: the time of a launch with almost no work."""
        return self.values[0][0]


class Grid4:
    """A function of four arguments, evaluated at several values of the last at once."""

    def __init__(self, axes: Sequence[Sequence[float]], values: Any) -> None:
        """`values`: nested sequences or an array, shaped as `axes`."""
        self.axes = tuple(Axis(points) for points in axes)
        self.values: list[list[list[list[float]]]] = np.asarray(values, dtype=np.float64).tolist()

    def at(self, a: float, b: float, c: float, ds: Sequence[float]) -> list[float]:
        """The values at `(a, b, c, d)` for each d."""
        (a0, a1, wa), (b0, b1, wb), (c0, c1, wc) = (
            axis.place(x) for axis, x in zip(self.axes, (a, b, c), strict=False)
        )
        places = [self.axes[3].place(d) for d in ds]
        result = [0.0] * len(places)
        for i, wi in ((a0, 1.0 - wa), (a1, wa)):
            for j, wj in ((b0, wi * (1.0 - wb)), (b1, wi * wb)):
                for k, wk in ((c0, wj * (1.0 - wc)), (c1, wj * wc)):
                    if wk == 0.0:
                        continue
                    row = self.values[i][j][k]
                    for number, (low, high, w) in enumerate(places):
                        result[number] += wk * ((1.0 - w) * row[low] + w * row[high])
        return result
