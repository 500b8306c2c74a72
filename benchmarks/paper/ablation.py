"""What each part of `rounds` gains: `rounds` without it, against `fcfs` on the same arrivals.

    python benchmarks/paper/ablation.py --out results/paper --seeds 3

The share of lengths among instances is an ablation of `load_sweep.py` (`--topology 8:4`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from evaluation import parts_of_rounds as parts
from evaluation.options import A100, Evaluation, head, load_name, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import FCFS, Variant
from evaluation.tables import ratios, table
from evaluation.workloads import AZURE_CONVERSATION, mixes
from load_sweep import METRICS, RULES, sweep_grid

SHARES = (0.80, 0.95)
LOADS = "0.9,1,1.2,closed,at-once"


def _without(label: str, policy: type) -> Variant:
    return Variant(label, f"{policy.__module__}:{policy.__name__}")


VARIANTS = (
    next(rule for rule in RULES if rule.label.endswith("rounds")),
    _without("no late joins", parts.NoLateJoins),
    _without("late joins in every round by length", parts.AlwaysLateJoins),
    _without("late joins at any time", parts.AnyLateJoins),
    _without("evicted requests wait for the next round", parts.EvictedWait),
    _without("always by length", parts.AlwaysByLength),
)


def make(options: Evaluation, runner: Runner) -> str:
    sources = [*options.limited(mixes(SHARES)), *options.applications([AZURE_CONVERSATION])[0]]
    grid, cases = sweep_grid(options, runner, options.seeds), options.cases(sources)
    grid.prepare(cases, (FCFS, *VARIANTS))
    rows = []
    for case in cases:
        for variant in VARIANTS:
            pairs = ((grid.values(case, variant, metric), grid.values(case, FCFS, metric)) for metric in METRICS)
            cells = [f"{statistics.fmean(ratios(*pair)):.2f}" for pair in pairs]
            rows.append([case.source.name, load_name(case.load), variant.label, *cells])
    said = head("Parts of `rounds`, over `fcfs`", options, runner, [workloads_of(sources)])
    return f"{said}\n\n{table(['workload', 'load', 'policy', *METRICS.values()], rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser(__doc__ or "", kernel_modes="split_kv", cost_model=A100, topology="2:1", loads=LOADS), make, argv)


if __name__ == "__main__":
    sys.exit(main())
