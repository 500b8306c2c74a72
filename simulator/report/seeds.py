"""Combines the figures of several seeds into a mean with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from alignedserve.simulator.report.summary import Metric

# Student's t, two-sided 95 %, by degrees of freedom from 1. Beyond the table the last value is used: it is wider.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and half the width of its 95 % confidence interval; None for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    t = _T95[min(len(values) - 1, len(_T95)) - 1]
    return mean, t * math.sqrt(variance / len(values))


def over_seeds(runs: Mapping[int, Mapping[str, Metric]]) -> dict[str, object]:
    """Each metric's mean over the seeds; `ci95`: half the width of its interval, if there are several seeds.

    A metric that a seed does not have has no mean.
    """
    rows = list(runs.values())
    means: dict[str, object] = {}
    intervals: dict[str, float | None] = {}
    for name in rows[0]:
        values = [value for row in rows if (value := row[name]) is not None]
        if len(values) < len(rows):
            means[name], intervals[name] = None, None
        elif len(rows) == 1:
            means[name] = values[0]
        else:
            means[name], intervals[name] = mean_and_interval(values)
    if len(rows) > 1:
        means["ci95"] = intervals
        means["by_seed"] = {str(seed): dict(row) for seed, row in runs.items()}
    return means


def in_words(metrics: Mapping[str, Any], metric: str) -> str:
    """A figure with its interval, if any; a dash if there is no figure."""
    value, interval = metrics.get(metric), metrics.get("ci95", {}).get(metric)
    return "–" if value is None else f"{value:.4g}" + ("" if interval is None else f" ± {interval:.2g}")
