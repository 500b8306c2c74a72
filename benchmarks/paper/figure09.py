"""Figure 9: P99 TPOT over iterations, as in the paper, on the six mixes.

    python benchmarks/paper/figure09.py --out results/paper

The P99 is over all passes with decodes, each with the gap before it. A colocated system's passes also contain chunks
of prompts. With the same --out folder it reuses the runs of figure 7.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.comparison import Comparison, report
from evaluation.figures import Stated, add_csv, write
from evaluation.options import Evaluation, parser, run
from evaluation.runner import Runner
from evaluation.workloads import mixes

TITLE = "Figure 9: P99 TPOT over iterations on six mixes"
STATED = (
    Stated(1.74, "1.74", "section 4.3", quantity="least gain"),
    Stated(3.05, "3.05", "section 4.3", quantity="largest gain"),
)


def make(options: Evaluation, runner: Runner) -> str:
    sources = options.limited(mixes())
    comparison = Comparison(
        options, runner, sources, "charged_p99_s", unit="P99 TPOT over iterations, ms", scale=1e3, lower=True
    )
    least, largest = (one.said for one in STATED)
    said = comparison.extent("times lower than any other (all mixes; all OPT models in the paper)", (least, largest))
    write(options.given.csv, STATED, comparison.points())
    return report(TITLE, comparison, runner, [said])


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "")
    add_csv(found)
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
