"""Every waiting rule of `aligned` against `fcfs` over load: around capacity, where a busy service lives.

    python benchmarks/paper/load_sweep.py --data DIR --out results/paper --csv FILE

Workloads: the six mixes, uniform lengths, and the applications whose files are in --data. Capacity is the rate at which
requests end with all of them at time zero, without the first and the last tenth. `aligned` and `fcfs` get the same
arrivals, by the capacity of `fcfs`; every other system by its own. --workloads, --variants, --cost-model, --topology
and --loads run a part; with --out parts share runs, and an interrupted one goes on. --estimate says how long it takes.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path

from evaluation.grid import Case, Grid, by_condition
from evaluation.options import A100, Evaluation, arrivals, head, load_name, loads_of, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import FASTGEN, FCFS, VLLM, Machine, Variant
from evaluation.tables import gain, in_csv, number, ratios, table, with_interval
from evaluation.workloads import AZURE_CONVERSATION, MOONCAKE, SHAREGPT, SHARES, Source, mixes, uniform_lengths

from alignedserve.config import Config
from alignedserve.errors import ConfigError
from alignedserve.scheduler.systems import WAITING_RULES
from alignedserve.simulator.sizes import Sizes
from alignedserve.simulator.traces import Load

RULES = tuple(Variant(f"aligned, {rule}", "aligned", (("scheduler.waiting_rule", rule),)) for rule in WAITING_RULES)
# Sharing among decode instances without order of length, and order of length without sharing: run if named
ABLATIONS = tuple(
    Variant(f"{one.label}, {sharing}", one.policy, (*one.settings, ("scheduler.sharing", sharing)))
    for one in (FCFS, *RULES)
    for sharing in ("none", "nearest", "quantiles")
)
# vLLM's defaults for its server on a GPU of 70 GiB or more that is no A100 (`EngineArgs.get_batch_defaults`)
VLLM_LARGE = Variant("vllm, 1024", "vllm", (("max_num_seqs", "1024"), ("max_num_batched_tokens", "8192")))
OTHERS = (VLLM, VLLM_LARGE, FASTGEN, *(Variant(name, name) for name in ("sarathi", "orca", "static")))
LOADS = "0.8,0.9,0.95,1,1.05,1.1,1.2,1.3,closed,at-once"
OTHER_LOADS, OTHER_SEEDS = "0.9,1.05,1.2", 2
APPLICATIONS = (SHAREGPT, AZURE_CONVERSATION, MOONCAKE)
CONTEXTS = {"meta-llama/Llama-3.1-8B": 131_072, "Qwen/Qwen3-30B-A3B-Instruct-2507": 262_144}  # tokens
MOST_TOO_LONG = 0.01  # share of a workload's requests
METRICS = {
    "decode_throughput_tokens_per_s": "decode throughput",
    "bubble_share": "share of the iterations' time that unequal lengths cost",
    "second_token_mean_s": "mean time to second token",
    "second_token_p99_s": "P99 time to second token",
    "tpot_p99_s": "P99 TPOT",
    "pool_wait_max_s": "longest wait in the pool",
}
# Ratios to `fcfs` past which a figure is listed as worse
WORSE = {
    "decode_throughput_tokens_per_s": 0.98,
    "second_token_mean_s": 1.02,
    "tpot_p99_s": 1.02,
    "second_token_p99_s": 1.02,
    "pool_wait_max_s": 1.1,
}
COLUMNS = ("machine", "workload", "instances", "kernel_mode", "load", "policy", "seeds")


class Part:
    """Cases of some policies. `compared`: they are given beside `fcfs`, the first, on the same arrivals."""

    def __init__(self, grid: Grid, cases: Sequence[Case], variants: Sequence[Variant], *, compared: bool) -> None:
        self.grid, self.cases, self.variants, self.compared = grid, cases, variants, compared

    def tables(self) -> Iterator[str]:
        for cases in by_condition(self.cases):
            first = cases[0]
            of = "" if self.compared else "; capacity: each system's own"
            yield f"## {first.machine.mode}; {first.topology}; {arrivals(first.load)}{of}"
            for metric, title in METRICS.items():
                yield f"{title}\n\n{self._table(cases, metric)}"

    def rows(self) -> Iterator[list[str]]:
        """For the CSV file: `COLUMNS`, each metric with half its interval, and its ratio to `fcfs` likewise."""
        for case in self.cases:
            place = [Path(case.machine.cost_model).name, case.source.name, str(self.grid.topology(case))]
            for variant in self.variants:
                found = [self.grid.values(case, variant, metric) for metric in METRICS]
                own = [case.machine.mode, load_name(case.load), variant.label, str(len(self.grid.seeds))]
                bases = [self.grid.values(case, self.variants[0], metric) for metric in METRICS]
                beside = [self._ratios(*pair) for pair in zip(found, bases, strict=True)]
                yield [*place, *own, *chain.from_iterable(in_csv(values) for values in (*found, *beside))]

    def _ratios(self, values: Sequence[float], base: Sequence[float]) -> list[float]:
        return ratios(values, base) if self.compared and all(base) else [math.nan]

    def _table(self, cases: Sequence[Case], metric: str) -> str:
        first, *others = self.variants
        rows, ceiling = [], self.compared and metric == "decode_throughput_tokens_per_s"
        for case in cases:
            base = self.grid.values(case, first, metric)
            found = [self.grid.values(case, other, metric) for other in others]
            shown = [gain(self._ratios(one, base)) if self.compared else with_interval(one) for one in found]
            if ceiling:  # with no bubble
                shown.append(gain([1 / (1 - share) for share in self.grid.values(case, first, "bubble_share")]))
            rows.append([case.source.name, str(self.grid.topology(case)), number(statistics.fmean(base), 4), *shown])
        names = [f"{other.label} / {first.label}" if self.compared else other.label for other in others]
        return table(["workload", "prefill:decode", first.label, *names, *["ceiling"] * ceiling], rows)

    def worse(self) -> Iterator[list[str]]:
        """Where a figure is worse than that of `fcfs` by more than `WORSE` allows: the cells of a table."""
        for case in self.cases if self.compared else ():
            for variant, metric in product(self.variants[1:], WORSE):
                base = self.grid.values(case, self.variants[0], metric)
                found = self._ratios(self.grid.values(case, variant, metric), base)
                mean = statistics.fmean(found)
                if mean < WORSE[metric] if WORSE[metric] < 1 else mean > WORSE[metric]:
                    where = case.source.name, str(self.grid.topology(case)), load_name(case.load)
                    yield [variant.label, *where, METRICS[metric], gain(found)]


class Sweep:
    """The parts of the sweep that the options ask for."""

    def __init__(self, options: Evaluation, runner: Runner) -> None:
        self.runner = runner
        sources, self.notes = self._sources(options)
        self.sources, left_out = _fitting(sources, options)
        self.notes += left_out
        wanted = _wanted(options.given.variants)
        ours, others = (
            [one for one in options.variants(listed) if not wanted or one.label in wanted]
            for listed in ((FCFS, *RULES, *(ABLATIONS if wanted else ())), OTHERS)
        )
        self.parts = []
        if len(ours) > 1 or not others:
            ours = ours if FCFS.label in (one.label for one in ours) else [*options.variants([FCFS]), *ours]
            self.parts.append(
                Part(sweep_grid(options, runner, options.seeds), options.cases(self.sources), ours, compared=True)
            )
        if others:
            loads = [load for load in options.loads if load in loads_of(OTHER_LOADS)]
            cases = [case for case in options.cases(self.sources) if case.load in loads]
            grid = sweep_grid(options, runner, options.seeds[:OTHER_SEEDS])
            self.parts.append(Part(grid, cases, others, compared=False))

    def _sources(self, options: Evaluation) -> tuple[list[Source], list[str]]:
        shares = (0.95,) if options.quick else SHARES
        made = options.limited([*mixes(shares), *uniform_lengths()[: 1 if options.quick else None]])
        found, left_out = options.applications(APPLICATIONS)
        wanted = [text.lower() for text in (options.given.workloads or "").split(",")]
        listed = [one for one in (*made, *found) if any(text in one.name.lower() for text in wanted)]
        if not listed:
            raise ConfigError(f"--workloads {options.given.workloads}: no workload has such a name")
        return listed, left_out

    def estimate(self) -> str:
        """Executes the runs that capacities are found by, and one of each other workload, to see what a run takes."""
        capacities = [run for part in self.parts for run in part.grid.capacity_runs(part.cases, part.variants)]
        runs = [run for part in self.parts for run in part.grid.runs(part.cases, part.variants)]
        timed = {run.source for run in capacities}
        first = {run.source: run for run in reversed(runs) if run.source not in timed}
        self.runner.outcomes([*capacities, *first.values()])
        missing, seconds = self.runner.estimate(runs)
        return f"{missing:,} of {len(set(runs)):,} runs are left{f', about {in_words(seconds)}' if missing else ''}"

    def run(self) -> None:
        for part in self.parts:
            part.grid.prepare(part.cases, part.variants)

    def write_figures(self, file: Path) -> None:
        figures = [f"{metric}{of}" for of in ("", " / fcfs") for metric in METRICS]
        columns = [column for figure in figures for column in (figure, f"{figure} ±")]
        with file.open("w", encoding="utf-8", newline="") as to:
            writer = csv.writer(to, lineterminator="\n")
            writer.writerow([*COLUMNS, *columns])
            writer.writerows(row for part in self.parts for row in part.rows())


def _wanted(text: str | None) -> list[str]:
    """Parse `--variants`; empty: the default ones. Raises ConfigError for a label that no variant has."""
    wanted = [] if text is None else [label.strip() for label in text.split(";")]
    known = [one.label for one in (FCFS, *RULES, *ABLATIONS, *OTHERS)]
    if unknown := [label for label in wanted if label not in known]:
        listed = "; ".join(known)
        raise ConfigError(
            f"--variants {text}: there is no {unknown[0]!r}; choose, separated by semicolons, of: {listed}"
        )
    return wanted


def sweep_grid(options: Evaluation, runner: Runner, seeds: Sequence[int]) -> Grid:
    """With the capacities of this sweep."""
    own, capacity = {one.policy for one in OTHERS}, "sustained_requests_per_s"
    return Grid(runner, seeds, options.decode, options.most_prefill, own=own, capacity=capacity)


def in_words(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{math.ceil(seconds)} s"


def _fitting(sources: Iterable[Source], options: Evaluation) -> tuple[list[Source], list[str]]:
    """The workloads that fit the model, and a note for each that does not, or not with every request."""
    machine, found, notes = options.machines[0], [], []
    name = Path(machine.cost_model).name
    for source in sources:
        share, most = too_long(source, machine, options.seeds)
        if share <= MOST_TOO_LONG:
            found.append(source)
        if share:
            verb = "does not fit" if share > MOST_TOO_LONG else "runs without them, or past the context, on"
            notes.append(f"{source.name} {verb} {name}: {share:.1%} of its requests are longer than {most:,} tokens")
    return found, notes


def too_long(source: Source, machine: Machine, seeds: Iterable[int]) -> tuple[float, int]:
    """Share of requests that are longer than what the model and its instances take, and that length in tokens.

    OPT's 2,048 positions do not count: its times stand for a model of its size, with the paper's lengths.
    """
    hardware = machine.hardware()
    sizes = Sizes.plan(Config(), hardware)
    most = min(sizes.decode_cache, sizes.prefill_cache, sizes.pool) * hardware.block_size
    most = min(most, CONTEXTS.get(str(machine.cost().describe()["source"].get("model")), most))
    load = Load(limit=source.requests)
    workloads = [source.trace(seed, at_once=True).workload(load, seed) for seed in seeds]
    lengths = [one.input_tokens + one.output_tokens for workload in workloads for one in workload.arrivals]
    return sum(tokens > most for tokens in lengths) / len(lengths), most


def make(options: Evaluation, runner: Runner) -> str:
    sweep = Sweep(options, runner)
    print(sweep.estimate(), file=sys.stderr)
    if options.given.estimate:
        return "\n".join(sweep.notes)
    sweep.run()
    if options.given.csv:
        sweep.write_figures(options.given.csv)
    title = "`aligned` under each waiting rule against `fcfs`, over load"
    said = head(title, options, runner, [workloads_of(sweep.sources), *sweep.notes])
    worse = table(
        ["policy", "workload", "prefill:decode", "load", "figure", "/ fcfs"],
        (row for part in sweep.parts for row in part.worse()),
    )
    return "\n\n".join(
        [said, f"## Worse than fcfs\n\n{worse}", *(text for part in sweep.parts for text in part.tables())]
    )


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "", kernel_modes="split_kv", cost_model=A100, topology="2:1", loads=LOADS)
    add = found.add_argument
    add("--workloads", metavar="A,B,…", help="those with such a text in their names: short, uniform, azure, …")
    listed = ", ".join(f"{one.label!r}" for one in (FCFS, *RULES, *OTHERS))
    add("--variants", metavar="A;B;…", help=(
        f"of {listed}; systems other than ours run at {OTHER_LOADS}, 2 seeds. Only if named: {ABLATIONS[0].label!r} "
        "and the like, with each sharing"
    ))  # fmt: skip
    add("--estimate", action="store_true", help="find the capacities, say how long the rest takes, and end")
    add("--csv", type=Path, metavar="FILE", help="write every figure there, as CSV")
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
