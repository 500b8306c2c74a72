"""Figure 11: the time to schedule an iteration, measured in real time.

    python benchmarks/paper/figure11.py --data DIR --cluster

It has two measurements. The first is the time that `IterationScheduler` takes at each iteration boundary (`advance`
and `plan`) while the simulator replays these workloads: the thread's processor time, or wall time with --wall. With
--cluster it also measures the whole gap between two iterations of a decode worker in a real cluster with a small model
on this machine, including the start of KV copies (benchmarks/iteration_gap.py).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evaluation.figures import Row, Stated, add_csv, place_of, point, write
from evaluation.grid import DECODE_BOUND, Case, Grid, by_condition
from evaluation.options import Evaluation, head, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, FCFS, Variant
from evaluation.tables import NOT_STATED, claims, percent, table, with_interval
from evaluation.workloads import ARXIV, SHAREGPT, Source, mixes, stand_ins

from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import IterationPlan
from alignedserve.simulator.disaggregated import simulate
from alignedserve.simulator.traces import Load

sys.path.insert(0, str(Path(__file__).parents[1]))

TITLE = "Figure 11: time to schedule an iteration"
VARIANTS = (ALIGNED, FCFS)
BOUNDS_MS = (0.1, 0.2, 0.5, 1.0, 5.0, 10.0)
STATED = (
    Stated(0.95, "more than 95 %", "section 4.4", system="aligned", quantity="share of whole gaps", x="5"),
    Stated(0.2, "less than 20 % (DistServe)", "section 4.4", system="fcfs", quantity="share of whole gaps", x="10"),
)
QUANTILES = (0.5, 0.95, 0.99)
LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)  # of the CSV file
Measured = dict[tuple[Case, Variant], list[list[float]]]
"""Milliseconds of every decision, a list for each seed."""


@contextlib.contextmanager
def timed(clock_ns: Callable[[], int]) -> Iterator[list[int]]:
    """Records the time of each `plan` that runs an iteration, plus the `advance` before it. For one decode instance."""
    found: list[int] = []
    spent = 0
    plan, advance = IterationScheduler.plan, IterationScheduler.advance

    def timed_advance(self: IterationScheduler, tokens: Iterable[Any]) -> None:
        nonlocal spent
        listed = list(tokens)
        begun = clock_ns()
        advance(self, listed)
        spent += clock_ns() - begun

    def timed_plan(self: IterationScheduler, now_s: float) -> IterationPlan:
        nonlocal spent
        begun = clock_ns()
        made = plan(self, now_s)
        spent += clock_ns() - begun
        if made.run:
            found.append(spent)
            spent = 0
        return made

    IterationScheduler.plan, IterationScheduler.advance = timed_plan, timed_advance  # type: ignore[method-assign]
    try:
        yield found
    finally:
        IterationScheduler.plan, IterationScheduler.advance = plan, advance  # type: ignore[method-assign]


def decisions_ms(grid: Grid, case: Case, variant: Variant, seed: int, clock_ns: Callable[[], int]) -> list[float]:
    """Milliseconds of each iteration's decision in one run with all requests at time zero."""
    candidate, machine = variant.candidate(), case.machine
    source, topology = case.source, grid.topology(case)
    workload = source.trace(seed, at_once=True).workload(Load(limit=source.requests), seed)
    with timed(clock_ns) as nanoseconds:
        simulate(
            workload,
            candidate.system,
            candidate.config,
            machine.hardware(),
            machine.cost(),
            machine.cost(),
            prefill_instances=topology.prefill,
            decode_instances=topology.decode,
            seed=seed,
            leap=False,
        )
    return [value / 1e6 for value in nanoseconds]


def decisions(options: Evaluation, grid: Grid, cases: Sequence[Case], variants: Sequence[Variant]) -> Measured:
    clock_ns = time.perf_counter_ns if options.given.wall else time.thread_time_ns
    return {
        (case, variant): [decisions_ms(grid, case, variant, seed, clock_ns) for seed in options.seeds]
        for case in cases
        for variant in variants
    }


def quantiles(runs: Sequence[Sequence[float]], level: float) -> list[float]:
    """By seed."""
    return [float(np.quantile(run, level)) for run in runs]


def points(grid: Grid, measured: Measured) -> list[Row]:
    """For the CSV file: quantiles of the decision's time; `x` is the level."""
    return [
        point(place_of(case, grid), variant.label, "decision", quantiles(runs, level), "ms", x=f"{level:g}")
        for (case, variant), runs in measured.items()
        for level in LEVELS
    ]


def decision_table(measured: Measured) -> str:
    rows = []
    for (case, variant), runs in measured.items():
        within = [[float(np.mean(np.array(run) <= bound)) for run in runs] for bound in BOUNDS_MS]
        levels = [with_interval(quantiles(runs, level)) for level in QUANTILES]
        name = f"{case.source.name}, {variant.label}"
        rows.append([name, f"{sum(map(len, runs)):,}", *levels, *map(percent, within)])
    columns = [*(f"P{100 * level:g}, ms" for level in QUANTILES), *(f"within {bound:g} ms" for bound in BOUNDS_MS)]
    return table(["the decision alone", "iterations", *columns], rows)


def cluster(given: argparse.Namespace, policy: str, quick: bool) -> list[str]:
    """Shares of the real gaps within 5 and 10 ms, their number, their mean, and the evictions."""
    from iteration_gap import benchmark

    asked = argparse.Namespace(
        model=given.model,
        policy=policy,
        requests=12 if quick else given.requests,
        cache_blocks=given.cache_blocks,
        seed=0,
        serve=[],
    )
    result = benchmark(asked)
    shares = [percent([result["share_within_s"][bound]]) for bound in ("0.005", "0.01")]
    return [*shares, f"{result['gaps']:,}", f"{result['mean_gap_ms']:g}", str(result["evictions"])]


def whole_gap(options: Evaluation, variants: Sequence[Variant]) -> str:
    columns = ["within 5 ms", "within 10 ms", "gaps", "mean, ms", "evictions"]
    parts = []
    for variant in variants:
        ours: list[tuple[str, list[str]]] = []
        if options.given.cluster:
            ours.append(("a real cluster, this machine", cluster(options.given, variant.policy, options.quick)))
        said = {one.x: one.said for one in STATED if one.system == variant.label}
        stated = [said.get("5", NOT_STATED), said.get("10", NOT_STATED), *[NOT_STATED] * 3]
        parts.append(claims(f"the whole gap between two iterations, {variant.label}", columns, stated, ours))
    if not options.given.cluster:
        parts.append("Ours was not measured in this run: it needs --cluster.")
    return "\n\n".join(parts)


def make(options: Evaluation, runner: Runner) -> str:
    found, left_out = options.applications((SHAREGPT, ARXIV))
    sources: list[Source] = found or options.limited(mixes((0.95,)))
    grid, variants = options.grid(runner), options.variants(VARIANTS)
    cases = by_condition(options.cases(sources))[0]
    clock = "wall clock" if options.given.wall else "processor time of the thread"
    notes = [workloads_of(sources), *left_out, *stand_ins((ARXIV,)), f"times of decisions: {clock}"]
    measured = decisions(options, grid, cases, variants)
    write(options.given.csv, STATED, points(grid, measured))
    parts = [
        head(TITLE, options, runner, notes),
        whole_gap(options, variants),
        decision_table(measured),
    ]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "", kernel_modes="split_kv", topology=DECODE_BOUND, loads="at-once")
    add_csv(found)
    found.add_argument("--wall", action="store_true", help="decisions by the wall clock")
    found.add_argument("--cluster", action="store_true", help="start a real cluster and measure its gaps")
    found.add_argument("--model", default="tiny", help="the cluster's model (%(default)s)")
    found.add_argument("--requests", type=int, default=96, help="to the cluster (%(default)s)")
    found.add_argument("--cache-blocks", type=int, default=64, help="of its decode instance (%(default)s)")
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
