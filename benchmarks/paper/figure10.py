"""Figure 10: P99 TPOT over iterations, as in the paper, on application workloads.

    python benchmarks/paper/figure10.py --data DIR --out results/paper

As figure 9. The text's three figures ("by a maximum of …") are missing in the available copy of the paper.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.comparison import Comparison, report
from evaluation.figures import add_csv, write
from evaluation.options import Evaluation, parser, run
from evaluation.runner import Runner
from evaluation.tables import NOT_STATED
from evaluation.workloads import APPLICATIONS, stand_ins

TITLE = "Figure 10: P99 TPOT over iterations on application workloads"


def make(options: Evaluation, runner: Runner) -> str:
    sources, left_out = options.applications(APPLICATIONS)
    comparison = Comparison(
        options, runner, sources, "charged_p99_s", unit="P99 TPOT over iterations, ms", scale=1e3, lower=True
    )
    stated = {one.name: NOT_STATED for one in APPLICATIONS}
    said = comparison.largest("times lower than any other, at most", stated)
    write(options.given.csv, (), comparison.points())
    return report(TITLE, comparison, runner, [said], [*left_out, *stand_ins()])


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "")
    add_csv(found)
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
