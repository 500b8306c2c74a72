"""Figure 7: decode throughput on six mixes of short and long requests.

    python benchmarks/paper/figure07.py --out results/paper

Short prompts have 32 to 999 tokens, long ones 1,000 to 8,000, answers 64 to 512, all uniform. `fcfs + 10 ms` adds
DistServe's time between iterations. Colocated systems get as many instances as prefill and decode together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.comparison import Comparison, report
from evaluation.figures import Stated, add_csv, write
from evaluation.options import Evaluation, parser, run
from evaluation.runner import Runner
from evaluation.tables import PAPER
from evaluation.workloads import mixes

TITLE = "Figure 7: decode throughput on six mixes"
STATED = tuple(
    Stated(value, said, "section 4.2", system=system, quantity="gain", workload="95 % short")
    for system, value, said in (
        ("vllm", 1.32, "1.32"),
        ("fcfs + 10 ms", 1.35, "1.35 (DistServe)"),
        ("fcfs", 1.35, "1.35 (DistServe)"),
        ("fastgen", 1.85, "1.85"),
    )
)


def make(options: Evaluation, runner: Runner) -> str:
    metric = "decode_throughput_tokens_per_s"
    sources = options.limited(mixes())
    comparison = Comparison(options, runner, sources, metric, unit="decode tokens/s")
    last = sources[-1].name
    beside = comparison.beside(
        f"aligned over …, {last} (OPT-2.7B in the paper)", last, {one.system: one.said for one in STATED}
    )
    charged = [one.system for one in STATED if one.system != "fcfs"]
    ahead = sum(all(min(comparison.gain(case, other)) > 1 for other in charged) for case in comparison.cases)
    said = (
        f"Aligned ahead of all others: on all workloads, says {PAPER}; ours, with every seed and `fcfs` charged: "
        f"{ahead} of {len(comparison.cases)} pairs of a workload and a condition."
    )
    write(options.given.csv, STATED, comparison.points())
    return report(TITLE, comparison, runner, [beside, said])


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "")
    add_csv(found)
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
