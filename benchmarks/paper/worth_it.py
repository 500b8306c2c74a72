"""Is it worth it? `aligned` against `fcfs`, `vllm` and `fastgen`, as tables for docs/measurements/.

    python benchmarks/paper/worth_it.py --data DIR --out results/paper --csv FILE

Workloads: the six mixes, ShareGPT and long-document lengths, the Azure and Mooncake traces, uniform lengths. At time
zero for throughput; at 0.9 of capacity for latency and goodput. The report has the main figures of each kernel mode and
topology, and the gain over one thread block's bandwidth; --csv writes every figure. With --out an interrupted run goes
on where it was. About 3,900 runs of one to two seconds of processor time each: an hour on two busy cores.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from evaluation.comparison import COLOCATED
from evaluation.grid import DECODE_BOUND, Case, by_condition, condition
from evaluation.options import Evaluation, arrivals, head, is_colocated, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, ALIGNED_60_S, ALIGNED_COST, BASELINES, FASTGEN, FCFS, VLLM, Machine, Variant
from evaluation.tables import gain, in_csv, number, percent, ratios, table
from evaluation.workloads import APPLICATIONS, SHARES, Source, mixes, stand_ins, uniform_lengths

VARIANTS = (ALIGNED, ALIGNED_60_S, ALIGNED_COST, *BASELINES)
CURVE_VARIANTS = (ALIGNED, *BASELINES)
BANDWIDTHS_GB_S = (5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
QUICK_BANDWIDTHS_GB_S = (5.0, 200.0)
CURVE_OF = ("95 % short", "ShareGPT-8k")
THROUGHPUT = "decode_throughput_tokens_per_s"
MOST_LOST = 0.01
LATENCY_VARIANTS = (ALIGNED, FCFS, VLLM, FASTGEN)
LATENCY = {
    "goodput, requests/s": ("goodput_requests_per_s", 1.0),
    "P99 TTFT, s": ("ttft_p99_s", 1.0),
    "P99 TPOT, ms": ("tpot_p99_s", 1e3),
}
# The CSV file: `load` 0 is all at time zero; GAIN is aligned's decode throughput over that of each policy.
CONDITION = ("kernel_mode", "topology", "load", "metric", "workload", "instances")
GAIN, CAPACITY, SWITCHES = "aligned_over", "capacity_requests_per_s", "switch_iteration_share"
BOTH = ("charged_p99_s", "bubble_share", SWITCHES, "refused")
AT_ONCE = (THROUGHPUT, GAIN, *BOTH)
AT_A_LOAD = ("goodput_requests_per_s", "ttft_mean_s", "ttft_p99_s", "second_token_mean_s", "tpot_p99_s", *BOTH)


class Results:
    """All runs, executed on creation, and the tables made from them."""

    def __init__(self, options: Evaluation, runner: Runner) -> None:
        found, self.left_out = options.applications(APPLICATIONS)
        shares = (0.95,) if options.quick else SHARES
        uniform = uniform_lengths()[:1] if options.quick else uniform_lengths()
        self.uniform = options.limited(uniform)
        self.sources = [*options.limited(mixes(shares)), *found, *self.uniform]
        self.options = options
        self.grid = options.grid(runner)
        self.variants = options.variants(VARIANTS)
        self.cases = options.cases(self.sources)
        self.curve = curve_cases(options, self.sources)
        self.grid.prepare(self.cases, self.variants)
        self.grid.prepare(self.curve, self.of(CURVE_VARIANTS))

    def of(self, wanted: Iterable[Variant]) -> list[Variant]:
        """With what `--set` says."""
        labels = {variant.label for variant in wanted}
        return [variant for variant in self.variants if variant.label in labels]

    def gains(self, case: Case, variant: Variant) -> list[float]:
        """Decode throughput of `aligned` over that of `variant`, by seed."""
        ours = self.grid.values(case, self.variants[0], THROUGHPUT)
        return ratios(ours, self.grid.values(case, variant, THROUGHPUT))

    def tables(self) -> str:
        """One for each condition, with the main figures only: `figures` has all."""
        parts = []
        for cases in by_condition(self.cases):
            first = cases[0]
            parts.append(f"## {first.machine.mode}; {first.topology}; {arrivals(first.load)}")
            parts.append(self._throughput(cases) if first.load is None else self._latency(cases))
        return "\n\n".join(parts)

    def _throughput(self, cases: Sequence[Case]) -> str:
        others = self.of(BASELINES)
        rows = [
            [*self._named(case), number(self._mean(case, self.variants[0], THROUGHPUT), 4)]
            + [gain(self.gains(case, other)) for other in others]
            for case in cases
        ]
        gains = (f"aligned / {other.label}" for other in others)
        return table(["workload", "prefill:decode", "aligned, tokens/s", *gains], rows)

    def _latency(self, cases: Sequence[Case]) -> str:
        """Means: the policies of `LATENCY_VARIANTS` share a cell."""
        shown = self.of(LATENCY_VARIANTS)
        rows = []
        for case in cases:
            cells = (
                ", ".join(number(self._mean(case, variant, metric) * scale) for variant in shown)
                for metric, scale in LATENCY.values()
            )
            rows.append([*self._named(case), number(self.grid.capacity(case)), *cells])
        labels = ", ".join(variant.label for variant in shown)
        metrics = (f"{name}: {labels}" for name in LATENCY)
        return table(["workload", "prefill:decode", "capacity, requests/s", *metrics], rows)

    def _named(self, case: Case) -> list[str]:
        return [case.source.name, str(self.grid.topology(case))]

    def _mean(self, case: Case, variant: Variant, metric: str) -> float:
        return statistics.fmean(self.grid.values(case, variant, metric))

    def write_figures(self, file: Path) -> None:
        """Every figure as CSV: for each policy the mean and half the interval, in the simulator's units."""
        columns = [name for one in self.variants for name in (one.label, f"{one.label} ±")]
        with file.open("w", encoding="utf-8", newline="") as to:
            writer = csv.DictWriter(to, [*CONDITION, *columns], lineterminator="\n")
            writer.writeheader()
            for case in self.cases:
                for metric in AT_ONCE if case.load is None else AT_A_LOAD:
                    writer.writerow(self._figures(case, metric, self.variants))
            for case in self.cases:
                if case.load is not None:
                    writer.writerow(self._condition(case, CAPACITY) | {"fcfs": f"{self.grid.capacity(case):.5g}"})
            for case in self.curve:
                if case not in self.cases:
                    writer.writerow(self._figures(case, GAIN, self.of(CURVE_VARIANTS)))

    def _condition(self, case: Case, metric: str) -> dict[str, str]:
        name, topology = self._named(case)
        values = (case.machine.mode, case.topology, f"{case.load or 0:g}", metric, name, topology)
        return dict(zip(CONDITION, values, strict=True))

    def _figures(self, case: Case, metric: str, variants: Iterable[Variant]) -> dict[str, str]:
        row = self._condition(case, metric)
        for one in variants:
            values = self.gains(case, one) if metric == GAIN else self.grid.values(case, one, metric)
            if not (metric == SWITCHES and is_colocated(one)):
                row[one.label], row[f"{one.label} ±"] = in_csv(values)
        return row

    def curve_tables(self) -> str:
        others = self.of(CURVE_VARIANTS)[1:]
        parts = []
        for name, cases in itertools.groupby(self.curve, key=lambda case: case.source.name):
            rows = [[case.machine.mode, *(gain(self.gains(case, other)) for other in others)] for case in cases]
            parts.append(table([f"{name}: aligned over …", *(other.label for other in others)], rows))
        return "\n\n".join(parts)

    def uniform_table(self) -> str:
        """The cost of alignment on prompts of nearly equal length."""
        fcfs = next(variant for variant in self.variants if variant.label == "fcfs")
        rows = []
        for case in self.cases:
            if case.source in self.uniform and case.load is None and case.machine.kernel_mode == "split_kv":
                lost = [1 - value for value in self.gains(case, fcfs)]
                met = "yes" if sum(lost) / len(lost) <= MOST_LOST else "no"
                rows.append([case.source.name, condition(case), percent(lost), met])
        return table(["workload", "condition", "decode throughput lost against fcfs", "at most 1 %"], rows)

    def objectives(self) -> str:
        by_objective: dict[str, list[str]] = {}
        for source in self.sources:
            text = f"TTFT {source.objectives.ttft_s:g} s, TPOT {source.objectives.tpot_s:g} s"
            by_objective.setdefault(text, []).append(source.name)
        listed = (f"{text} ({', '.join(names)})" for text, names in by_objective.items())
        return f"objectives, for goodput and aligned-cost: {'; '.join(listed)}"


def curve_cases(options: Evaluation, sources: Sequence[Source]) -> list[Case]:
    bandwidths = QUICK_BANDWIDTHS_GB_S if options.quick else BANDWIDTHS_GB_S
    split = replace(options.machines[0], kernel_mode="split_kv", bandwidth_gb_s=None)
    machines = [*(Machine(split.cost_model, "no_split", bandwidth) for bandwidth in bandwidths), split]
    wanted = [source for source in sources if source.name in CURVE_OF]
    return [Case(source, machine, DECODE_BOUND, None) for source in wanted for machine in machines]


def make(options: Evaluation, runner: Runner) -> str:
    results = Results(options, runner)
    notes = [
        workloads_of(results.sources),
        *results.left_out,
        *stand_ins(),
        results.objectives(),
        COLOCATED,
        "aligned, 60 s: scheduler.waiting_rule overdue, with a threshold of 60 s (5 s by default)",
        "fcfs + 10 ms: DistServe's time between two iterations, charged before each decode pass",
    ]
    sections = [
        head("`aligned` against `fcfs`, `vllm` and `fastgen`", options, runner, notes),
        "## Gain over one thread block's bandwidth: decode throughput, decode-bound, all at time zero",
        results.curve_tables(),
        "## Uniform lengths: decode throughput lost",
        results.uniform_table(),
        results.tables(),
    ]
    if options.given.csv:
        results.write_figures(options.given.csv)
    return "\n\n".join(sections)


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "")
    found.add_argument("--csv", type=Path, metavar="FILE", help="write every figure there, as CSV")
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
