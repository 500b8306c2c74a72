"""Fits a function on a coarse grid to measurements: least squares of relative errors, all values at least 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alignedserve.scheduler.cost.grid import Axis, Floats

SWEEPS = 400
RIDGE = 1e-9  # of the largest diagonal element: values without measurements stay where they were


def hats(axes: Sequence[Sequence[float]], points: Floats) -> Floats:
    """The weight of every grid point in the value at each of `points` `[rows, axes]`: `[rows, grid points]`."""
    weights: Floats = np.ones((len(points), 1))
    for number, knots in enumerate(axes):
        axis = Axis(knots)
        along = np.zeros((len(points), len(knots)))
        for row, x in enumerate(points[:, number]):
            low, high, w = axis.place(float(x))
            along[row, low] += 1.0 - w
            along[row, high] += w
        weights = (weights[:, :, None] * along[:, None, :]).reshape(len(points), -1)
    return weights


def fit_bounded(features: Floats, times: Floats) -> Floats:
    """The x >= 0 that minimises the sum of squared relative errors of `features @ x` against `times`.

    Coordinate descent from the unbounded solution cut at 0. It converges to the optimum, since the problem is convex.
    """
    a = features / times[:, None]
    gram = a.T @ a
    gram[np.diag_indices_from(gram)] += RIDGE * max(1e-300, float(gram.diagonal().max()))
    wanted = a.sum(axis=0)
    x: Floats = np.maximum(0.0, np.linalg.solve(gram, wanted))
    for _ in range(SWEEPS):
        moved = 0.0
        for i in range(len(x)):
            value = max(0.0, x[i] + (wanted[i] - float(gram[i] @ x)) / gram[i, i])
            moved = max(moved, abs(value - x[i]) / (value + 1e-9))
            x[i] = value
        if moved < 1e-9:
            break
    return x


def fit_grid(axes: Sequence[Sequence[float]], points: Floats, times: Floats, rising: bool = True) -> Floats:
    """Values at the points of the grid `axes` that fit `times` at `points`.

    `rising`: non-decreasing along every axis.
    """
    values = fit_bounded(hats(axes, points), times).reshape([len(knots) for knots in axes])
    if rising:
        for axis in range(values.ndim):
            values = np.maximum.accumulate(values, axis=axis)
    return values


def relative_errors(predicted: Floats, measured: Floats) -> dict[str, Any]:
    """Mean and quantiles of |predicted / measured - 1|."""
    errors = np.abs(predicted / measured - 1.0)
    return {
        "rows": len(errors),
        "mean": round(float(errors.mean()), 4),
        "p50": round(float(np.quantile(errors, 0.5)), 4),
        "p90": round(float(np.quantile(errors, 0.9)), 4),
        "p99": round(float(np.quantile(errors, 0.99)), 4),
    }
