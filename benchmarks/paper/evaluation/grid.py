"""Runs workloads × policies × machines × topologies × arrivals with several seeds, and finds topologies and capacity.

Named topologies (prefill:decode instances) are found with `fcfs`, all requests at time zero and `split_kv` mode:
    balanced      the most requests a second for each instance, prefill and decode instances counted alike
    decode-bound  twice the fewest prefill instances (1, 2, 4, …) whose doubling serves less than 3 % more. Prompts
                  are done in about half of the time, so that many requests wait in the pool
Capacity is the throughput of `fcfs` on the same machine and topology with all requests at time zero, in requests a
second over the whole run including its start and end, averaged over the seeds.

A closed loop has twice as many clients as requests run at once on all decode instances of `fcfs` at capacity.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from evaluation.runner import Runner
from evaluation.runs import FCFS, Machine, Outcome, Run, Topology, Variant
from evaluation.workloads import Source

DECODE_BOUND, BALANCED = "decode-bound", "balanced"
ENOUGH = 0.03
MOST_PREFILL = 32
AT_ONCE: float | None = None
CLOSED = math.inf


@dataclass(frozen=True, slots=True)
class Case:
    """`load`: arrival rate as a share of the capacity; None: all requests at time zero; `CLOSED`: a closed loop."""

    source: Source
    machine: Machine
    topology: str
    load: float | None


def by_condition(cases: Iterable[Case]) -> list[list[Case]]:
    """The cases grouped by kernel mode, topology and arrival process, in their order."""
    groups: dict[tuple[Machine, str, float | None], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.machine, case.topology, case.load), []).append(case)
    return list(groups.values())


def condition(case: Case) -> str:
    """A short description of everything but the workload."""
    load = "all at time zero" if case.load is None else f"{case.load:g} of capacity"
    return f"{case.machine.mode}; {case.topology}; {'a closed loop' if case.load == CLOSED else load}"


class Grid:
    """`decode`: decode instances of the named topologies. `most_prefill`: limit of the search for them.

    `own`: policies whose loads are shares of their own capacity instead of that of `fcfs`. `capacity`: the metric.
    """

    def __init__(
        self,
        runner: Runner,
        seeds: Sequence[int],
        decode: int = 1,
        most_prefill: int = MOST_PREFILL,
        own: Container[str] = (),
        capacity: str = "throughput_requests_per_s",
    ) -> None:
        self.runner = runner
        self.seeds = tuple(seeds)
        self._own = own
        self._capacity = capacity
        self._decode = decode
        self._most_prefill = most_prefill
        self._found: dict[tuple[Source, str], dict[str, Topology]] = {}

    def prepare(self, cases: Iterable[Case], variants: Iterable[Variant]) -> None:
        """Execute all runs of these cases, as many in parallel as possible."""
        cases, variants = list(cases), list(variants)
        self._probe([case for case in cases if case.topology in (DECODE_BOUND, BALANCED)])
        at_once = [case for case in cases if case.load is None]
        self.runner.outcomes([*self.capacity_runs(cases, variants), *self.runs(at_once, variants)])
        self.runner.outcomes(self.runs(cases, variants))

    def outcomes(self, case: Case, variant: Variant) -> list[Outcome]:
        """One for each seed."""
        return list(self.runner.outcomes(self._runs(case, variant)).values())

    def values(self, case: Case, variant: Variant, metric: str) -> list[float]:
        return [outcome.value(metric) for outcome in self.outcomes(case, variant)]

    def capacity(self, case: Case, variant: Variant = FCFS) -> float:
        """Requests a second."""
        outcomes = self.runner.outcomes(self._capacity_runs(case, variant)).values()
        return statistics.fmean(outcome.value(self._capacity) for outcome in outcomes)

    def clients(self, case: Case) -> int:
        """Of a closed loop."""
        outcomes = self.runner.outcomes(self._capacity_runs(case, FCFS)).values()
        running = statistics.fmean(outcome.value("batch_mean_requests") for outcome in outcomes)
        return max(1, round(2 * running * self.topology(case).decode))

    def topology(self, case: Case) -> Topology:
        if case.topology in (DECODE_BOUND, BALANCED):
            self._probe([case])
            return self._found[case.source, case.machine.cost_model][case.topology]
        prefill, _, decode = case.topology.partition(":")
        return Topology(int(prefill), int(decode))

    def runs(self, cases: Iterable[Case], variants: Sequence[Variant]) -> list[Run]:
        """All runs of these cases; executes those that capacities are found by."""
        return [run for case in cases for variant in variants for run in self._runs(case, variant)]

    def capacity_runs(self, cases: Iterable[Case], variants: Sequence[Variant]) -> list[Run]:
        """The runs that capacities are found by."""
        loaded = [case for case in cases if case.load is not None]
        return [run for case in loaded for variant in variants for run in self._capacity_runs(case, variant)]

    def _runs(self, case: Case, variant: Variant) -> list[Run]:
        topology = self.topology(case)
        closed = case.load == CLOSED
        rate = None if case.load is None or closed else case.load * self.capacity(case, variant)
        clients = self.clients(case) if closed else 0
        return [Run(case.source, variant, case.machine, topology, rate, seed, clients) for seed in self.seeds]

    def _capacity_runs(self, case: Case, variant: Variant) -> list[Run]:
        topology, by = self.topology(case), variant if variant.policy in self._own else FCFS
        return [Run(case.source, by, case.machine, topology, None, seed) for seed in self.seeds]

    def _probe(self, cases: Iterable[Case]) -> None:
        """Find both named topologies of each workload, probing all workloads in parallel."""
        open_ = {(case.source, case.machine.cost_model) for case in cases} - self._found.keys()
        served: dict[tuple[Source, str], dict[int, float]] = {key: {} for key in sorted(open_, key=str)}
        prefill = 1
        while open_:
            runs = {key: self._probe_run(*key, prefill) for key in served if key in open_}
            outcomes = self.runner.outcomes(runs.values())
            for key, run in runs.items():
                rates = served[key]
                rates[prefill] = outcomes[run].value("throughput_requests_per_s")
                if prefill >= self._most_prefill or rates[prefill] < (1 + ENOUGH) * rates.get(prefill // 2, 0.0):
                    open_.discard(key)
                    self._found[key] = self._choose(rates)
            prefill *= 2

    def _probe_run(self, source: Source, cost_model: str, prefill: int) -> Run:
        topology = Topology(prefill * self._decode, self._decode)
        return Run(source, FCFS, Machine(cost_model), topology, None, self.seeds[0])

    def _choose(self, rates: dict[int, float]) -> dict[str, Topology]:
        """`rates`: requests a second by the number of prefill instances for each decode instance."""
        enough = next(p for p in rates if rates.get(2 * p, 0.0) < (1 + ENOUGH) * rates[p])
        balanced = max(rates, key=lambda p: (rates[p] / (p + 1), -p))
        return {
            name: Topology(prefill * self._decode, self._decode)
            for name, prefill in ((DECODE_BOUND, 2 * enough), (BALANCED, balanced))
        }
