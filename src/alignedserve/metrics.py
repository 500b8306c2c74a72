"""Metrics of a process in prometheus_client's terms. A metric is declared where its value is, with its help."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

PREFIX = "alignedserve_"


class Histogram:
    """Counts by upper bound, and the sum. One thread observes; any may read.

    prometheus_client's own takes two locks an observation, which is too much for each iteration of a batch.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """`(upper bound, observations up to it)`, the last without a bound."""
        found, below = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), list(self._counts), strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class Page:
    """What a process tells of itself at one moment: a collector of prometheus_client.

    `labels` are on every sample. Names are given without their prefix, those of counters with `_total`. A metric that
    is given several times has a sample each, and the same names of labels.
    """

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._families: dict[str, Any] = {}

    def gauge(self, name: str, meaning: str, value: float, **labels: str) -> None:
        self._family(GaugeMetricFamily, name, meaning, labels).add_metric(self._values(labels), value)

    def counter(self, name: str, meaning: str, value: float, **labels: str) -> None:
        self._family(CounterMetricFamily, name, meaning, labels).add_metric(self._values(labels), value)

    def histogram(self, name: str, meaning: str, found: Histogram, **labels: str) -> None:
        family = self._family(HistogramMetricFamily, name, meaning, labels)
        family.add_metric(self._values(labels), found.buckets(), found.sum)

    def collect(self) -> Iterable[Metric]:
        return self._families.values()

    def text(self) -> str:
        """Prometheus text, with HELP and TYPE of every metric."""
        return generate_latest(self).decode()

    def _family(self, kind: Any, name: str, meaning: str, labels: dict[str, str]) -> Any:
        if (family := self._families.get(name)) is None:
            family = self._families[name] = kind(PREFIX + name, meaning, labels=(*labels, *self._labels))
        return family

    def _values(self, labels: dict[str, str]) -> list[str]:
        return [*labels.values(), *self._labels.values()]
