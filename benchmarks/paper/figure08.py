"""Figure 8: decode throughput on application workloads.

    python benchmarks/paper/figure08.py --data DIR --out results/paper

The workloads are ShareGPT-8k lengths, arXiv summarization lengths (in place of LongBench), Azure's code trace (whose
lengths the paper gives) and conversation trace, and Mooncake's trace, which the paper does not use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.comparison import Comparison, report
from evaluation.options import Evaluation, parser, run
from evaluation.runner import Runner
from evaluation.tables import NOT_STATED
from evaluation.workloads import APPLICATIONS, stand_ins

TITLE = "Figure 8: decode throughput on application workloads"
STATED = {
    "ShareGPT-8k": "1.35",
    "arXiv summarization": "1.98 (LongBench)",
    "Azure code": "1.98",
    "Azure conversation": NOT_STATED,
    "Mooncake": NOT_STATED,
}


def make(options: Evaluation, runner: Runner) -> str:
    sources, left_out = options.applications(APPLICATIONS)
    comparison = Comparison(options, runner, sources, "decode_throughput_tokens_per_s", unit="decode tokens/s")
    said = comparison.largest("aligned over any other, at most (all OPT models in the paper)", STATED)
    return report(TITLE, comparison, runner, [said], [*left_out, *stand_ins()])


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser(__doc__ or ""), make, argv)


if __name__ == "__main__":
    sys.exit(main())
