"""Sensitivity of `aligned` to defaults that the paper does not state: one value is changed at a time.

    python benchmarks/paper/defaults.py --data DIR --out results/paper

Every figure is a ratio to the default configuration on the same requests: decode throughput and time to second token
with all requests at time zero, P99 TPOT over requests and time to second token at 0.9 of capacity.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from evaluation.grid import Case, Grid
from evaluation.options import A100, LOAD, RTX_PRO_6000, Evaluation, head, parser, run
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, Machine, Run
from evaluation.tables import ratios, table
from evaluation.workloads import APPLICATIONS, mixes

CASES = ((A100, "4:2", 0.95), (RTX_PRO_6000, "4:4", 0.80))  # cost model, prefill:decode, share of short requests
CHANGES = {
    "scheduler.max_batch_share": ("0.2", "0.4", "0.6", "0.8"),
    "scheduler.min_batch_requests": ("16", "36", "64", "128"),
    "scheduler.leaf_tokens": ("1", "16", "64", "256"),
    "scheduler.cut_sibling": ("true", "false"),
    "scheduler.flush_after_s": ("0", "0.5", "2"),
    "scheduler.join_window": ("0.05", "0.1", "0.25", "0.5", "1"),
    "scheduler.balance_slack": ("0", "0.1", "0.25", "0.5", "1"),
    "decode.join_iterations": ("2", "8", "16", "32"),
    "decode.watermark_blocks": ("0", "128", "512"),
}
BUFFERS = {"batch_buffer_share": (0.2, 0.4, 0.6), "requests_buffer_share": (0.05, 0.1, 0.2)}
COLUMNS = (
    ("decode tokens/s", "decode_throughput_tokens_per_s", False),
    ("second token, mean", "second_token_mean_s", False),
    ("P99 TPOT", "tpot_p99_s", True),
    ("second token, mean", "second_token_mean_s", True),
)


def _pairs(options: Evaluation) -> list[tuple[Case, Case]]:
    """Two cases for each workload: all requests at time zero, and Poisson arrivals."""
    found, _ = options.applications(APPLICATIONS)
    chat = [(Machine(RTX_PRO_6000), "4:4", source) for source in found if source.name.startswith("ShareGPT")]
    mixed = [
        (Machine(cost_model), topology, source)
        for cost_model, topology, share in CASES
        for source in options.limited(mixes((share,)))
    ]
    return [
        (Case(source, machine, topology, None), Case(source, machine, topology, LOAD))
        for machine, topology, source in [*mixed, *chat]
    ]


@dataclass(frozen=True, slots=True)
class Change:
    """A key with another value. `share`: share of a buffer, which `Hardware` sets instead of the configuration."""

    key: str
    value: str
    share: float | None = None

    def runs(self, case: Case, grid: Grid, rate_per_s: float | None) -> list[Run]:
        settings = () if self.share is not None else ((self.key, self.value),)
        variant = replace(ALIGNED, label=f"{self.key}={self.value}", settings=settings)
        machine = case.machine
        if self.share is not None:
            machine = replace(machine, hardware_changes=((self.key, self.share),))
        topology = grid.topology(case)
        return [Run(case.source, variant, machine, topology, rate_per_s, seed) for seed in grid.seeds]


def changes(quick: bool) -> list[Change]:
    found = [[Change(key, value) for value in values] for key, values in CHANGES.items()]
    found += [[Change(key, f"{share:g}", share) for share in shares] for key, shares in BUFFERS.items()]
    return [change for values in found for change in (values[:1] if quick else values)]


class Sweep:
    """Runs the defaults and every change on every workload."""

    def __init__(self, options: Evaluation, runner: Runner) -> None:
        self.pairs = _pairs(options)
        self._runner = runner
        self._grid = options.grid(runner)
        self._rates = [LOAD * self._grid.capacity(loaded) for _, loaded in self.pairs]

    def runs(self, change: Change | None) -> list[list[Run]]:
        """Runs of each workload at time zero, then of each at `LOAD` of capacity. None: with the defaults."""
        at_once = [self._of(change, zero, None) for zero, _ in self.pairs]
        return at_once + [
            self._of(change, loaded, rate) for (_, loaded), rate in zip(self.pairs, self._rates, strict=True)
        ]

    def _of(self, change: Change | None, case: Case, rate_per_s: float | None) -> list[Run]:
        if change is not None:
            return change.runs(case, self._grid, rate_per_s)
        topology = self._grid.topology(case)
        return [Run(case.source, ALIGNED, case.machine, topology, rate_per_s, seed) for seed in self._grid.seeds]

    def cells(self, change: Change) -> list[str]:
        """The geometric mean over workloads and seeds, for each column."""
        found = []
        count = len(self.pairs)
        for _, metric, loaded in COLUMNS:
            own, default = (self.runs(one)[count:] if loaded else self.runs(one)[:count] for one in (change, None))
            found.append(statistics.geometric_mean(ratios(self._values(own, metric), self._values(default, metric))))
        return [f"{ratio:.3f}" for ratio in found]

    def _values(self, runs: list[list[Run]], metric: str) -> list[float]:
        flat = list(chain(*runs))
        outcomes = self._runner.outcomes(flat)
        return [outcomes[run].value(metric) for run in flat]


def report(options: Evaluation, runner: Runner) -> str:
    """One table of ratios; a default itself would be 1."""
    sweep = Sweep(options, runner)
    wanted = changes(options.quick)
    runner.outcomes(run for change in [None, *wanted] for run in chain(*sweep.runs(change)))
    rows = [[change.key, change.value, *sweep.cells(change)] for change in wanted]
    names = [f"{label}, {'at 0.9' if loaded else 'at once'}" for label, _, loaded in COLUMNS]
    workloads = (f"{zero.source.name} ({zero.machine.cost_model}, {zero.topology})" for zero, _ in sweep.pairs)
    notes = [f"workloads: {', '.join(workloads)}"]
    return head("What the paper leaves open", options, runner, notes) + "\n\n" + table(["key", "value", *names], rows)


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser(__doc__ or "", "split_kv"), report, argv)


if __name__ == "__main__":
    sys.exit(main())
