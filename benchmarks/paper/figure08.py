"""Figure 8: decode throughput on application workloads.

    python benchmarks/paper/figure08.py --data DIR --out results/paper

The workloads are ShareGPT-8k lengths, arXiv summarization lengths (in place of LongBench), Azure's code trace (whose
lengths the paper gives) and conversation trace, and Mooncake's trace, which the paper does not use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.comparison import Comparison, report
from evaluation.figures import Stated, add_csv, write
from evaluation.options import Evaluation, parser, run
from evaluation.runner import Runner
from evaluation.tables import NOT_STATED
from evaluation.workloads import APPLICATIONS, ARXIV, AZURE_CODE, SHAREGPT, stand_ins

TITLE = "Figure 8: decode throughput on application workloads"
STATED = tuple(
    Stated(value, said, "section 4.2", quantity="largest gain", workload=workload.name)
    for workload, value, said in (
        (SHAREGPT, 1.35, "1.35"),
        (ARXIV, 1.98, "1.98 (LongBench)"),
        (AZURE_CODE, 1.98, "1.98"),
    )
)


def make(options: Evaluation, runner: Runner) -> str:
    sources, left_out = options.applications(APPLICATIONS)
    comparison = Comparison(options, runner, sources, "decode_throughput_tokens_per_s", unit="decode tokens/s")
    stated = {one.name: NOT_STATED for one in APPLICATIONS} | {one.workload: one.said for one in STATED}
    said = comparison.largest("aligned over any other, at most (all OPT models in the paper)", stated)
    write(options.given.csv, STATED, comparison.points())
    return report(TITLE, comparison, runner, [said], [*left_out, *stand_ins()])


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "")
    add_csv(found)
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
