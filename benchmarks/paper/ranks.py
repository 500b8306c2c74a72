"""Ranks in step: decode ranks that wait for each other in every iteration, under each placement.

    python benchmarks/paper/ranks.py --data DIR --cost-model DIR --out results/ranks --csv FILE

Workloads: the mixes with 80 and 95 % short requests, and ShareGPT and Azure conversations where --data has them.
Arrivals: all at time zero, or a share of what round robin decodes while its ranks are kept full. Figures of a run
exclude nothing, but the idle share and the tokens per second are those while requests began to decode: afterwards
ranks only run empty. --csv writes every figure. With --out an interrupted run goes on where it was.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.grid import Case
from evaluation.options import Evaluation, arrivals, count, counts, head, parser, run
from evaluation.runner import Runner
from evaluation.runs import Run, Topology, Variant
from evaluation.tables import gain, in_csv, percent, ratios, table, with_interval
from evaluation.workloads import AZURE_CONVERSATION, SHAREGPT, Source, mixes

from alignedserve.scheduler.cost.load import load_rank_cost
from alignedserve.scheduler.ranks.names import PLACEMENTS
from alignedserve.simulator.replay import ComparedPolicy, Plan

BASE, OURS = "round-robin", "shared-pool"
QUICK_REQUESTS = 5  # for each rank
TOKEN_BUDGET = "2048"  # of a prefill pass, as vLLM's on these devices
METRICS = {
    "idle_share": "idle share of the ranks",
    "idle_share_run": "the same to the last token",
    "filled_tokens_per_s": "decode tokens/s",
    "tpot_p99_s": "P99 TPOT, s",
    "second_token_mean_s": "mean time to second token, s",
    "second_token_p99_s": "P99 time to second token, s",
    "pool_wait_max_s": "longest wait, s",
    "moved_bytes": "moved between ranks, bytes",
    "joined_bytes": "from the pool to ranks, bytes",
    "evicted_bytes": "evicted to the pool, bytes",
}
COLUMNS = ("cost_model", "workload", "ranks", "instances", "load", "metric")


@dataclass(frozen=True, slots=True)
class RankRun(Run):
    """`variant.policy` is a placement."""

    ranks: int = 8

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {Run.__str__(self)}"

    def plan(self) -> Plan:
        machine, settings = self.machine, dict(self.variant.settings)
        name = self.variant.policy
        plan = Run.plan(replace(self, variant=Variant(name, "fcfs")))
        return replace(
            plan,
            candidates=(ComparedPolicy.of_placement(name, self.ranks, settings, None),),
            rank_cost=load_rank_cost(machine.cost_model, self.ranks, machine.kernel_mode),
        )


@dataclass(frozen=True, slots=True)
class RankCase:
    case: Case
    ranks: int


def requests_per_rank(options: Evaluation) -> int:
    return QUICK_REQUESTS if options.quick else options.given.requests_per_rank


class Placements:
    """All runs, executed on creation, and the tables made from them."""

    def __init__(self, options: Evaluation, runner: Runner) -> None:
        given = options.given
        self.options, self.runner = options, runner
        self.names = list(PLACEMENTS)
        found, self.left_out = options.applications((SHAREGPT, AZURE_CONVERSATION))
        self.sources = [*mixes((0.95,) if options.quick else (0.8, 0.95)), *found]
        self.cases = [RankCase(case, ranks) for ranks in given.ranks for case in options.cases(self.sources)]
        self._capacities: dict[RankCase, float] = {}
        full = [run for one in self.cases for run in self._runs(replace(one, case=replace(one.case, load=None)), BASE)]
        runner.outcomes(full)
        runner.outcomes([run for one in self.cases for name in self.names for run in self._runs(one, name)])

    def values(self, one: RankCase, name: str, metric: str) -> list[float]:
        return [outcome.value(metric) for outcome in self.runner.outcomes(self._runs(one, name)).values()]

    def _runs(self, one: RankCase, name: str) -> list[RankRun]:
        case, options = one.case, self.options
        source = self._sized(case.source, one.ranks)
        rate = None if case.load is None else case.load * self._capacity(one)
        variant = Variant(name, name, (("prefill.token_budget", TOKEN_BUDGET),))
        topology = Topology(one.ranks * options.given.prefill_per_rank, 1)
        return [RankRun(source, variant, case.machine, topology, rate, seed, ranks=one.ranks) for seed in options.seeds]

    def _sized(self, source: Source, ranks: int) -> Source:
        wanted = ranks * requests_per_rank(self.options)
        if source.text.startswith("mix:"):
            return replace(source, text=f"{source.text.partition(',requests=')[0]},requests={wanted}", requests=wanted)
        return source.sized(wanted / source.requests, self.options.limit)

    def _capacity(self, one: RankCase) -> float:
        """Requests a second that round robin decodes while its ranks are kept full."""
        full = replace(one, case=replace(one.case, load=None))
        if full in self._capacities:
            return self._capacities[full]
        rates = []
        for planned, outcome in self.runner.outcomes(self._runs(full, BASE)).items():
            requests = planned.plan().workload(None, planned.seed).arrivals
            tokens = statistics.fmean(request.output_tokens - 1 for request in requests)
            rates.append(outcome.value("filled_tokens_per_s") / tokens)
        self._capacities[full] = statistics.fmean(rates)
        return self._capacities[full]

    def tables(self) -> str:
        parts = []
        for _, group in itertools.groupby(self.cases, lambda one: (one.ranks, one.case.load)):
            cases = list(group)
            parts.append(f"## {cases[0].ranks} ranks; {arrivals(cases[0].case.load)}\n\n{self._table(cases)}")
        return "\n\n".join(parts)

    def _table(self, cases: Sequence[RankCase]) -> str:
        rows = []
        for one, name in itertools.product(cases, self.names):
            idle, base = self.values(one, name, "idle_share"), self.values(one, BASE, "idle_share")
            moved = ratios(self.values(one, name, "moved_bytes"), self.values(one, name, "joined_bytes"))
            shown = [
                percent(idle),
                gain(ratios(idle, base)) if all(base) else "-",
                percent(moved),
                *(with_interval(self.values(one, name, metric)) for metric in list(METRICS)[2:7]),
            ]
            rows.append([f"{one.case.source.name}, {name}", *shown])
        columns = ["idle", "/ round robin's", "moved / joined bytes", *list(METRICS.values())[2:7]]
        return table(["workload, placement", *columns], rows)

    def write_figures(self, file: Path) -> None:
        """For each placement the mean and half the interval, in the simulator's units. `load` 0: all at time zero."""
        columns = [name for one in self.names for name in (one, f"{one} ±")]
        with file.open("w", encoding="utf-8", newline="") as to:
            writer = csv.writer(to, lineterminator="\n")
            writer.writerow([*COLUMNS, *columns])
            for one in self.cases:
                case, (planned, *_) = one.case, self._runs(one, BASE)
                model = Path(case.machine.cost_model).name
                place = [model, case.source.name, one.ranks, str(planned.topology), f"{case.load or 0:g}"]
                for metric in METRICS:
                    found = [in_csv(self.values(one, name, metric)) for name in self.names]
                    writer.writerow([*place, metric, *itertools.chain(*found)])


def make(options: Evaluation, runner: Runner) -> str:
    made = Placements(options, runner)
    if options.given.csv:
        made.write_figures(options.given.csv)
    notes = [
        f"requests for each rank: {requests_per_rank(options)}; prefill instances: "
        f"{options.given.prefill_per_rank} for each rank; the KV of an instance above is that of a rank",
        f"workloads: {', '.join(source.name for source in made.sources)}",
        *made.left_out,
    ]
    return "\n\n".join([head("Ranks in step", options, runner, notes), made.tables()])


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "", kernel_modes="split_kv", topology="1:1", loads="at-once,0.95")
    add = found.add_argument
    add("--ranks", type=counts, default="8,32", metavar="A,B,…", help="ranks of the decode instance (%(default)s)")
    add("--requests-per-rank", type=count, default=600, metavar="N", help="of a run (%(default)s)")
    add("--prefill-per-rank", type=count, default=3, metavar="N", help="prefill instances (%(default)s)")
    add("--csv", type=Path, metavar="FILE", help="write every figure there, as CSV")
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
