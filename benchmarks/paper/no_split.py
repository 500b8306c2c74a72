"""`aligned` against `fcfs` with kernels that do not split the KV, over the bandwidth of one thread block.

    python benchmarks/paper/no_split.py --out results/paper --csv FILE

A kernel starts its jobs in the order of the batch (`no_split`); longest first is the best case of any order
(`no_split_longest_first`). Loads are those at which there is a choice: more requests wait than fit. Machines are those
of two cost models that ship, each with its own number of instances.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from evaluation.grid import Case
from evaluation.options import A100, RTX_PRO_6000, Evaluation, head, load_name, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import FCFS, Machine, Variant
from evaluation.tables import in_csv, ratios, table
from evaluation.workloads import mixes
from load_sweep import RULES, sweep_grid

MACHINES = ((A100, "2:1", 1.0), (RTX_PRO_6000, "6:1", 2.0))  # cost model, prefill:decode, scale of the workloads
REQUESTS = 800
MODES = ("no_split", "no_split_longest_first")
BANDWIDTHS_GB_S = (2, 5, 10, 25, 50, 100, 200)
SHARES = (0.80, 0.95)
LOADS = "1.05,1.2,at-once"
WANTED = (FCFS, *(rule for rule in RULES if not rule.label.endswith("paper")))
METRICS = {"decode_throughput_tokens_per_s": "tokens/s", "bubble_share": "bubble", "tpot_p99_s": "P99 TPOT"}
COLUMNS = ("machine", "workload", "instances", "load", "kernel_mode", "block_bandwidth_gb_s", "policy")


class Sweep:
    """All runs, executed on creation. Each machine has `split_kv` first, then every order and bandwidth."""

    def __init__(self, options: Evaluation, runner: Runner) -> None:
        bandwidths = BANDWIDTHS_GB_S[1::4] if options.quick else BANDWIDTHS_GB_S
        modes = ["split_kv", *(f"{mode}:{bandwidth}" for mode in MODES for bandwidth in bandwidths)]
        self.variants = options.variants(WANTED)
        self.grid = sweep_grid(options, runner, options.seeds)
        self.cases = [
            Case(source.sized(scale, options.limit), Machine.parse(cost_model, mode), topology, load)
            for cost_model, topology, scale in MACHINES
            if options.given.machine in (None, cost_model)
            for source in mixes(SHARES, REQUESTS)
            for load in options.loads
            for mode in modes
        ]
        self.grid.prepare(self.cases, self.variants)

    def ratios(self, case: Case, variant: Variant) -> list[float]:
        metric = next(iter(METRICS))
        return ratios(self.grid.values(case, variant, metric), self.grid.values(case, self.variants[0], metric))

    def table(self) -> str:
        """The bubble of `fcfs`, and throughput over its own for each rule; a column for each order and bandwidth."""
        modes = list(dict.fromkeys(case.machine.mode.removesuffix(" a block") for case in self.cases))
        rows: dict[tuple[str, ...], list[str]] = {}
        for case in self.cases:
            of = case.machine.cost_model, case.source.name, load_name(case.load)
            bubble = statistics.fmean(self.grid.values(case, self.variants[0], "bubble_share"))
            rows.setdefault((*of, "bubble of fcfs"), []).append(f"{100 * bubble:.1f} %")
            for variant in self.variants[1:]:
                ratio = statistics.fmean(self.ratios(case, variant))
                rows.setdefault((*of, f"{variant.label} / fcfs"), []).append(f"{ratio:.3f}")
        head_ = ["machine", "workload", "load", "figure", *modes]
        return table(head_, [[*of, *cells] for of, cells in rows.items()])

    def rows(self) -> Iterator[list[str]]:
        for case in self.cases:
            of = case.machine.cost_model, case.source.name, case.topology, load_name(case.load)
            bandwidth = case.machine.bandwidth_gb_s
            for variant in self.variants:
                figures = [*(self.grid.values(case, variant, metric) for metric in METRICS), self.ratios(case, variant)]
                mode = case.machine.kernel_mode, "" if bandwidth is None else f"{bandwidth:g}"
                yield [*of, *mode, variant.label, *chain.from_iterable(in_csv(values) for values in figures)]

    def write_figures(self, file: Path) -> None:
        names = [*METRICS, f"{next(iter(METRICS))} / fcfs"]
        figures = [column for name in names for column in (name, f"{name} ±")]
        with file.open("w", encoding="utf-8", newline="") as to:
            writer = csv.writer(to, lineterminator="\n")
            writer.writerow([*COLUMNS, *figures])
            writer.writerows(self.rows())


def make(options: Evaluation, runner: Runner) -> str:
    sweep = Sweep(options, runner)
    if options.given.csv:
        sweep.write_figures(options.given.csv)
    notes = [workloads_of(case.source for case in sweep.cases), "two machines, whatever the head says of one"]
    title = "Decode throughput over `fcfs` with kernels that do not split the KV"
    return f"{head(title, options, runner, notes)}\n\n{sweep.table()}"


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "", kernel_modes="split_kv", topology="2:1", loads=LOADS, fixed=True)
    names = [name for name, _, _ in MACHINES]
    found.add_argument(
        "--machine", choices=names, help=f"only that of this cost model (default: {' and '.join(names)})"
    )
    found.add_argument("--csv", type=Path, metavar="FILE", help="write every figure there, as CSV")
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
