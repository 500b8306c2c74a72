"""Every waiting rule of `aligned` against `fcfs` over load: around capacity, where a busy service lives.

    python benchmarks/paper/load_sweep.py --data DIR --out results/paper --csv FILE

Workloads: the six mixes, uniform lengths, and the applications whose files are in --data. Loads are shares of what
`fcfs` serves on the same instances with all requests at time zero. For each metric a table has the ratio to `fcfs`
(below 1 is better, but for throughput); --csv writes every figure. With --out an interrupted run goes on where it was.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from evaluation.grid import Case, by_condition
from evaluation.options import A100, Evaluation, arrivals, head, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import FCFS, Variant
from evaluation.tables import gain, in_csv, number, ratios, table
from evaluation.workloads import APPLICATIONS, SHARES, Application, mixes, stand_ins, uniform_lengths

from alignedserve.scheduler.systems import WAITING_RULES

RULES = [Variant(f"aligned, {rule}", "aligned", (("scheduler.waiting_rule", rule),)) for rule in WAITING_RULES]
VARIANTS = (FCFS, *RULES)
LOADS = "0.8,0.9,0.95,1,1.05,1.1,1.2,1.3,at-once"
METRICS = {
    "decode_throughput_tokens_per_s": "decode throughput",
    "bubble_share": "share of the iterations' time that unequal lengths cost",
    "second_token_mean_s": "mean time to second token",
    "second_token_p99_s": "P99 time to second token",
    "tpot_p99_s": "P99 TPOT",
    "pool_wait_max_s": "longest wait in the pool",
}
COLUMNS = ("workload", "instances", "kernel_mode", "load", "metric")


class Sweep:
    """All runs, executed on creation, and the tables made from them."""

    def __init__(
        self,
        options: Evaluation,
        runner: Runner,
        variants: Sequence[Variant] = VARIANTS,
        shares: tuple[float, ...] = SHARES,
        applications: tuple[Application, ...] = APPLICATIONS,
    ) -> None:
        """`variants`: the first one is the base of every ratio."""
        found, self.left_out = options.applications(applications)
        shares = (0.95,) if options.quick else shares
        self.sources = [*options.limited([*mixes(shares), *uniform_lengths()[: 1 if options.quick else None]]), *found]
        self.grid = options.grid(runner)
        self.variants = options.variants(variants)
        self.cases = options.cases(self.sources)
        self.grid.prepare(self.cases, self.variants)

    def tables(self) -> str:
        parts = []
        for cases in by_condition(self.cases):
            first = cases[0]
            parts.append(f"## {first.machine.mode}; {first.topology}; {arrivals(first.load)}")
            parts += [f"{title}\n\n{self._table(cases, metric)}" for metric, title in METRICS.items()]
        return "\n\n".join(parts)

    def _table(self, cases: Sequence[Case], metric: str) -> str:
        first, *others = self.variants
        rows = []
        for case in cases:
            base = self.grid.values(case, first, metric)
            found = [self.grid.values(case, other, metric) for other in others]
            compared = [gain(ratios(values, base)) if all(base) else "-" for values in found]
            rows.append([case.source.name, str(self.grid.topology(case)), number(statistics.fmean(base), 4), *compared])
        return table(
            ["workload", "prefill:decode", first.label, *(f"{other.label} / {first.label}" for other in others)], rows
        )

    def write_figures(self, file: Path) -> None:
        """For each variant the mean and half the interval, in the simulator's units. `load` 0: all at time zero."""
        columns = [name for one in self.variants for name in (one.label, f"{one.label} ±")]
        with file.open("w", encoding="utf-8", newline="") as to:
            writer = csv.writer(to, lineterminator="\n")
            writer.writerow([*COLUMNS, *columns])
            for case in self.cases:
                place = [case.source.name, str(self.grid.topology(case)), case.machine.mode, f"{case.load or 0:g}"]
                for metric in METRICS:
                    found = [in_csv(self.grid.values(case, one, metric)) for one in self.variants]
                    writer.writerow([*place, metric, *itertools.chain(*found)])


def make(options: Evaluation, runner: Runner) -> str:
    sweep = Sweep(options, runner)
    notes = [workloads_of(sweep.sources), *sweep.left_out, *stand_ins()]
    if options.given.csv:
        sweep.write_figures(options.given.csv)
    title = "`aligned` under each waiting rule against `fcfs`, over load"
    return "\n\n".join([head(title, options, runner, notes), sweep.tables()])


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "", kernel_modes="split_kv", cost_model=A100, topology="2:1", loads=LOADS)
    found.add_argument("--csv", type=Path, metavar="FILE", help="write every figure there, as CSV")
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
