"""Is it worth it? `aligned` against `fcfs`, `vllm` and `fastgen`, as tables for docs/results.md.

    python benchmarks/paper/worth_it.py --data DIR --out results/paper

Workloads: the six mixes, ShareGPT and long-document lengths, the Azure and Mooncake traces, uniform lengths. At time
zero for throughput; at 0.9 of capacity for latency and goodput. Every table names the kernel mode and the topology. The
gain is a curve over one thread block's bandwidth, too. With --out an interrupted run goes on where it was. About 3,900
runs of one to two seconds of processor time each: an hour on two cores that others used too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from evaluation.comparison import COLOCATED
from evaluation.grid import DECODE_BOUND, Case, Grid, by_condition, condition
from evaluation.options import Evaluation, arrivals, head, is_colocated, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, ALIGNED_60_S, ALIGNED_COST, BASELINES, Machine, Variant
from evaluation.tables import NOTHING, gain, percent, ratios, table, with_interval
from evaluation.workloads import APPLICATIONS, SHARES, Source, mixes, stand_ins, uniform_lengths

VARIANTS = (ALIGNED, ALIGNED_60_S, ALIGNED_COST, *BASELINES)
CURVE_VARIANTS = (ALIGNED, *BASELINES)
BANDWIDTHS_GB_S = (5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
QUICK_BANDWIDTHS_GB_S = (5.0, 200.0)
CURVE_OF = ("95 % short", "ShareGPT-8k")
THROUGHPUT = "decode_throughput_tokens_per_s"
MOST_LOST = 0.01

Cell = Callable[[Case, Variant], str]


class Results:
    """All runs, made at once; the tables read them."""

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
        """`aligned`'s decode throughput over this one's, by seed."""
        ours = self.grid.values(case, self.variants[0], THROUGHPUT)
        return ratios(ours, self.grid.values(case, variant, THROUGHPUT))

    def tables(self) -> str:
        parts = []
        for cases in by_condition(self.cases):
            first = cases[0]
            parts.append(f"## {first.machine.mode}; {first.topology}; {arrivals(first.load)}")
            parts += self._of(cases, at_once=first.load is None)
        return "\n\n".join(parts)

    def _of(self, cases: Sequence[Case], at_once: bool) -> Iterable[str]:
        grid, metric = self.grid, self._metric
        if at_once:
            yield self._table("decode tokens/s", cases, metric(THROUGHPUT, 4))
            others = self.variants[1:]
            yield self._table("aligned's decode throughput over …", cases, lambda c, v: gain(self.gains(c, v)), others)
        else:
            yield self._table("goodput, requests/s within the objectives", cases, metric("goodput_requests_per_s"))
            yield self._table("TTFT mean, s", cases, metric("ttft_mean_s"))
            yield self._table("TTFT P99, s", cases, metric("ttft_p99_s"))
            yield self._table("time to second token, mean, s", cases, metric("second_token_mean_s"))
            yield self._table("P99 TPOT over requests, ms", cases, metric("tpot_p99_s", scale=1e3))
        yield self._table("P99 TPOT over iterations, ms", cases, metric("charged_p99_s", scale=1e3))
        yield self._table("bubble share of the iterations' time", cases, self._bubble)

        def switches(case: Case, variant: Variant) -> str:
            return NOTHING if is_colocated(variant) else percent(grid.values(case, variant, "switch_iteration_share"))

        yield self._table("share of switch iterations", cases, switches)
        if any(sum(grid.values(case, variant, "refused")) for case in cases for variant in self.variants):
            yield self._table("requests refused: too long for a store", cases, metric("refused"))

    def _bubble(self, case: Case, variant: Variant) -> str:
        return percent(self.grid.values(case, variant, "bubble_share"))

    def _metric(self, name: str, digits: int = 3, scale: float = 1.0) -> Cell:
        return lambda case, variant: with_interval(self.grid.values(case, variant, name), digits, scale)

    def _table(self, what: str, cases: Sequence[Case], cell: Cell, variants: Sequence[Variant] = ()) -> str:
        """A row a workload, a column a policy: all, unless `variants` names some."""
        shown = variants or self.variants
        rows = [
            [case.source.name, str(self.grid.topology(case)), *(cell(case, variant) for variant in shown)]
            for case in cases
        ]
        return table([what, "prefill:decode", *(variant.label for variant in shown)], rows)

    def curve_tables(self) -> str:
        others = self.of(CURVE_VARIANTS)[1:]
        parts = []
        for name, cases in itertools.groupby(self.curve, key=lambda case: case.source.name):
            rows = [[case.machine.mode, *(gain(self.gains(case, other)) for other in others)] for case in cases]
            parts.append(table([f"{name}: aligned over …", *(other.label for other in others)], rows))
        return "\n\n".join(parts)

    def uniform_table(self) -> str:
        """What alignment costs where there is nothing to align."""
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


def capacities(results: Results, grid: Grid) -> str:
    rows = [
        [case.source.name, condition(case), str(grid.topology(case)), with_interval([grid.capacity(case)])]
        for case in results.cases
        if case.load is not None
    ]
    return table(["workload", "condition", "prefill:decode", "capacity, requests/s"], rows)


def make(options: Evaluation, runner: Runner) -> str:
    results = Results(options, runner)
    notes = [
        workloads_of(results.sources),
        *results.left_out,
        *stand_ins(),
        results.objectives(),
        COLOCATED,
        "aligned, 60 s: nobody goes before density in the first minute (scheduler.starvation_after_s; 5 s by default)",
        "fcfs + 10 ms: DistServe's time between two iterations, charged before each decode pass",
    ]
    sections = [
        head("Is it worth it?", options, runner, notes),
        "## The gain over one thread block's bandwidth: decode throughput, decode-bound, all at time zero",
        results.curve_tables(),
        "## Uniform lengths: what is lost",
        results.uniform_table(),
        results.tables(),
        "## Capacities",
        capacities(results, results.grid),
    ]
    return "\n\n".join(sections)


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser(__doc__ or ""), make, argv)


if __name__ == "__main__":
    sys.exit(main())
