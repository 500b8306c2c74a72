"""What sharing lengths out among decode instances gains, and what the order of batches gains: each alone, and both.

    python benchmarks/paper/sharing.py --scale 3.4 --data DIR --out results/paper --csv FILE

`fcfs` and `aligned` under two waiting rules, each without sharing, with the nearest mean, and with ranges of equal cost
(`scheduler.sharing`), against `fcfs` without. Loads are shares of what `fcfs` serves without sharing on the same
instances with all requests at time zero. --csv writes every figure. With --out an interrupted run goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from evaluation.options import A100, Evaluation, head, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import Variant
from evaluation.workloads import AZURE_CONVERSATION
from load_sweep import Sweep

SHARINGS = ("none", "nearest", "quantiles")
ORDERS = {
    "fcfs": ("fcfs", ()),
    "overdue": ("aligned", (("scheduler.waiting_rule", "overdue"),)),
    "rounds": ("aligned", (("scheduler.waiting_rule", "rounds"),)),
}
VARIANTS = tuple(
    Variant(f"{order}, {sharing}", policy, (*settings, ("scheduler.sharing", sharing)))
    for order, (policy, settings) in ORDERS.items()
    for sharing in SHARINGS
)
SHARES = (0.95, 0.8, 0.7)
LOADS = "0.8,0.9,1,1.1,1.2"


def make(options: Evaluation, runner: Runner) -> str:
    sweep = Sweep(options, runner, VARIANTS, SHARES, (AZURE_CONVERSATION,))
    if options.given.csv:
        sweep.write_figures(options.given.csv)
    notes = [workloads_of(sweep.sources), *sweep.left_out]
    return "\n\n".join([head("Lengths shared out among decode instances", options, runner, notes), sweep.tables()])


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "", kernel_modes="split_kv", cost_model=A100, topology="8:4", loads=LOADS)
    found.add_argument("--csv", type=Path, metavar="FILE", help="write every figure there, as CSV")
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
