"""Samples of the cluster's metrics at one moment, and what changed between two moments."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r"^alignedserve_([a-z0-9_]+)\{([^}]*)\} ([^ \n]+)$", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')

Labels = dict[str, str]


class Samples:
    """The samples of a page of metrics, by name without the common prefix. Those without labels are left out.

    A parser for our own pages, which have no time stamps: prometheus_client's takes nine times as long, each second.
    """

    def __init__(self, page: str, at_s: float) -> None:
        self.at_s = at_s
        self._found: dict[str, list[tuple[Labels, float]]] = {}
        for name, labels, value in _SAMPLE.findall(page):
            self._found.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))
        self.instances = {its.get("instance", "") for found in self._found.values() for its, _ in found}

    def has(self, name: str) -> bool:
        return name in self._found

    def each(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """The samples of a metric that have these labels."""
        for its_labels, value in self._found.get(name, ()):
            if labels.items() <= its_labels.items():
                yield its_labels, value

    def sum(self, name: str, **labels: str) -> float:
        """The sum of these samples; 0 if there are none."""
        return sum(value for _, value in self.each(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """These samples, summed by the value of a label."""
        found: dict[str, float] = {}
        for its_labels, value in self.each(name, **labels):
            found[its_labels.get(label, "")] = found.get(its_labels.get(label, ""), 0.0) + value
        return found


@dataclass(frozen=True, slots=True)
class Change:
    """From an earlier moment to a later one. A counter that is lower now is of a new process: it began at 0."""

    before: Samples
    now: Samples

    @property
    def seconds(self) -> float:
        return max(1e-3, self.now.at_s - self.before.at_s)

    def each(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """By how much each of these counters has grown. One that was not there before counts from its first sight."""
        before = {tuple(its.items()): value for its, value in self.before.each(name, **labels)}
        for its, value in self.now.each(name, **labels):
            was = before.get(tuple(its.items()), 0.0 if self.begun(its) else value)
            yield its, value - was if value >= was else value

    def begun(self, labels: Labels) -> bool:
        """Whether the process of a counter was there before, so that a new counter of it began at 0 meanwhile."""
        return labels.get("instance", "") in self.before.instances

    def grown(self, by: str, name: str, **labels: str) -> dict[str, float]:
        """By how much these counters have grown, summed by the value of a label."""
        found: dict[str, float] = {}
        for its, grown in self.each(name, **labels):
            found[its.get(by, "")] = found.get(its.get(by, ""), 0.0) + grown
        return found

    def rate(self, name: str, **labels: str) -> float:
        """The growth of these counters in a second."""
        return sum(grown for _, grown in self.each(name, **labels)) / self.seconds

    def share(self, part: str, whole: str, **labels: str) -> float | None:
        """The growth of one counter over that of another; None if the other has not grown."""
        grown = self.rate(whole, **labels)
        return self.rate(part, **labels) / grown if grown > 0 else None

    def quantiles(self, name: str, *wanted: float) -> list[float | None]:
        """Quantiles of what a histogram of all processes has observed, linear within a bucket; None: nothing."""
        counts = {
            math.inf if bound == "+Inf" else float(bound): grown
            for bound, grown in self.grown("le", f"{name}_bucket").items()
        }
        return [_quantile(sorted(counts.items()), share) for share in wanted]


def _quantile(counts: list[tuple[float, float]], share: float) -> float | None:
    """`counts`: observations up to each bound, bounds ascending. Above the last finite bound: that bound."""
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, up_to in counts:
        if up_to >= rank and up_to > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (up_to - below)
        low, below = (low if math.isinf(bound) else bound), up_to
    return low


class Window:
    """Samples of the last `seconds`, without those that lack the metric `needed`: growth since them is not known."""

    def __init__(self, seconds: float, needed: str = "") -> None:
        self._seconds = seconds
        self._needed = needed
        self._kept: deque[Samples] = deque()

    def add(self, samples: Samples) -> Change:
        """The change since the oldest samples that are in the window."""
        while len(self._kept) > 1 and samples.at_s - self._kept[1].at_s >= self._seconds:
            self._kept.popleft()
        if self._kept and samples.at_s - self._kept[-1].at_s > 3 * self._seconds:  # there were no viewers meanwhile
            self._kept.clear()
        if not self._needed or samples.has(self._needed):
            self._kept.append(samples)
        return Change(self._kept[0] if self._kept else samples, samples)
