"""Figure 15: what waiting to be batched costs: time to first token with starvation handling disabled.

    python benchmarks/paper/figure15.py --data DIR --out results/paper

The paper's TTFT includes the wait in the pool, which here falls between the first token and the second: so it is the
time to the second token that is compared. The rate is not stated: several shares of the capacity are run. Starvation
handling disabled: a threshold that no request reaches. Compared with the default threshold and with `fcfs`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.grid import DECODE_BOUND, Case, condition
from evaluation.options import Evaluation, head, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, FCFS, Variant
from evaluation.tables import claims, with_interval
from evaluation.workloads import ARXIV, SHAREGPT, stand_ins

TITLE = "Figure 15: time to second token with starvation handling disabled"
NEVER = (("scheduler.starvation_after_s", "1000000000"), ("scheduler.late_share", "1"))
VARIANTS = (Variant("aligned, starvation handling disabled", "aligned", NEVER), ALIGNED, FCFS)
STATED = {SHAREGPT.name: "1.49 s", ARXIV.name: "2.54 s (LongBench)"}
STATED_MOST = "about 30 s"
MEAN, MOST = "second_token_mean_s", "second_token_max_s"


def make(options: Evaluation, runner: Runner) -> str:
    sources, left_out = options.applications((SHAREGPT, ARXIV))
    grid, variants, cases = options.grid(runner), options.variants(VARIANTS), options.cases(sources)
    grid.prepare(cases, variants)

    def figures(case: Case) -> list[str]:
        pairs = [(grid.values(case, variant, MEAN), grid.values(case, variant, MOST)) for variant in variants]
        return [with_interval(values) for pair in pairs for values in pair]

    labels = ["starvation handling disabled", "aligned", "fcfs"]
    columns = [f"{label}: {what}, s" for label in labels for what in ("mean", "largest")]
    parts = [head(TITLE, options, runner, [workloads_of(sources), *left_out, *stand_ins((ARXIV,))])]
    for source in sources:
        rows = [(f"{condition(case)}; {grid.topology(case)}", figures(case)) for case in cases if case.source is source]
        stated = [STATED[source.name], STATED_MOST, *["–"] * 4]
        parts.append(claims(f"time to second token, {source.name}", columns, stated, rows))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser(__doc__ or "", topology=DECODE_BOUND, loads="0.5,0.7,0.9,at-once"), make, argv)


if __name__ == "__main__":
    sys.exit(main())
