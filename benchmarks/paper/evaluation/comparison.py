"""Compares one metric of `aligned` and other policies on several workloads (figures 7 to 10)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from evaluation.figures import Row, metric_point, place_of, point
from evaluation.grid import Case, by_condition, condition
from evaluation.options import Evaluation, arrivals, head, workloads_of
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, BASELINES, Variant
from evaluation.tables import NOT_STATED, claims, gain, ratios, table, with_interval
from evaluation.workloads import Source

COLOCATED = "colocated policies (vllm, fastgen) get as many instances as prefill and decode together"
VARIANTS = (ALIGNED, *BASELINES)


class Comparison:
    """Ratios of `metric` between the first variant and each other one, inverted if `lower` values are better."""

    def __init__(
        self,
        options: Evaluation,
        runner: Runner,
        sources: Iterable[Source],
        metric: str,
        *,
        unit: str,
        scale: float = 1.0,
        lower: bool = False,
        variants: Iterable[Variant] = VARIANTS,
    ) -> None:
        self.options = options
        self.grid = options.grid(runner)
        self.variants = options.variants(variants)
        self.cases = options.cases(sources)
        self._metric, self._unit, self._scale, self._lower = metric, unit, scale, lower
        self.grid.prepare(self.cases, self.variants)

    def gain(self, case: Case, other: str) -> list[float]:
        """How many times better the first variant is than the variant with the label `other`, by seed."""
        named = {variant.label: variant for variant in self.variants}
        ours = self.grid.values(case, self.variants[0], self._metric)
        theirs = self.grid.values(case, named[other], self._metric)
        return ratios(theirs, ours) if self._lower else ratios(ours, theirs)

    def tables(self) -> str:
        """A table for each kernel mode, topology and arrival process."""
        parts = []
        for cases in by_condition(self.cases):
            first = cases[0]
            title = f"{self._unit}: {first.machine.mode}; {first.topology}; {arrivals(first.load)}"
            parts.append(f"### {title}\n\n{self._table(cases)}")
        return "\n\n".join(parts)

    def points(self) -> list[Row]:
        """For the CSV file: the metric of every variant, and the gain over each other one."""
        found = []
        for case in self.cases:
            place = place_of(case, self.grid)
            found += [
                metric_point(self.grid, case, variant, self._metric, self._unit, scale=self._scale)
                for variant in self.variants
            ]
            found += [point(place, other.label, "gain", self.gain(case, other.label)) for other in self.variants[1:]]
        return found

    def beside(self, what: str, source: str, stated: Mapping[str, str]) -> str:
        """The paper's gains over each other variant on the workload `source`, and ours under every condition."""
        others = [variant.label for variant in self.variants[1:]]
        ours = [
            (condition(case), [gain(self.gain(case, other)) for other in others])
            for case in self.cases
            if case.source.name == source
        ]
        return claims(what, others, [stated.get(other, NOT_STATED) for other in others], ours)

    def largest(self, what: str, stated: Mapping[str, str]) -> str:
        """The paper's largest gain over any other system on each workload, and ours."""
        ours = []
        for cases in by_condition(self.cases):
            found = {case.source.name: self._largest(case) for case in cases}
            ours.append((condition(cases[0]), [found.get(name, "not run") for name in stated]))
        return claims(what, list(stated), list(stated.values()), ours)

    def extent(self, what: str, stated: tuple[str, str]) -> str:
        """The paper's least and largest gain, and our least and largest mean over workloads and other systems."""
        ours = []
        for cases in by_condition(self.cases):
            means = [statistics.fmean(self.gain(case, other.label)) for case in cases for other in self.variants[1:]]
            ours.append((condition(cases[0]), [f"{min(means):.3f}", f"{max(means):.3f}"]))
        return claims(what, ["least", "largest"], stated, ours)

    def refused(self) -> list[str]:
        """A note if any system refused requests: the systems then served different requests."""
        counts = {
            variant.label: sum(sum(self.grid.values(case, variant, "refused")) for case in self.cases)
            for variant in self.variants
        }
        listed = ", ".join(f"{label} {count:.0f}" for label, count in counts.items())
        return [f"requests refused over all runs, too long for a store: {listed}"] if any(counts.values()) else []

    def _largest(self, case: Case) -> str:
        gains = {other.label: self.gain(case, other.label) for other in self.variants[1:]}
        label = max(gains, key=lambda other: statistics.fmean(gains[other]))
        return f"{gain(gains[label])} ({label})"

    def _table(self, cases: Sequence[Case]) -> str:
        others = [variant.label for variant in self.variants[1:]]
        first = self.variants[0].label
        gains = [f"{other} / {first}" if self._lower else f"{first} / {other}" for other in others]
        head_ = ["workload", "prefill:decode", *(variant.label for variant in self.variants), *gains]
        return table(head_, [self._row(case, others) for case in cases])

    def _row(self, case: Case, others: Sequence[str]) -> list[str]:
        figures = [
            with_interval(self.grid.values(case, variant, self._metric), 4, self._scale) for variant in self.variants
        ]
        gains = [gain(self.gain(case, other)) for other in others]
        return [case.source.name, str(self.grid.topology(case)), *figures, *gains]


def report(
    title: str,
    comparison: Comparison,
    runner: Runner,
    said: Iterable[str],
    notes: Iterable[str] = (),
) -> str:
    workloads = workloads_of(case.source for case in comparison.cases)
    charged = "fcfs + 10 ms: DistServe's time between two iterations, charged before each decode pass"
    top = head(title, comparison.options, runner, [workloads, COLOCATED, charged, *notes, *comparison.refused()])
    return "\n\n".join([top, *said, comparison.tables()])
