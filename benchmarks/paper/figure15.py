"""Figure 15: what waiting to be batched costs: time to first token with starvation handling disabled.

    python benchmarks/paper/figure15.py --data DIR --out results/paper

The paper's TTFT includes the wait in the pool, which here falls between the first token and the second: so it is the
time to the second token that is compared. The rate is not stated: several shares of the capacity are run. Starvation
handling disabled: the paper's rule with a threshold that no subtree reaches. Compared with the defaults and `fcfs`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.figures import Stated, add_csv, metric_point, write
from evaluation.grid import DECODE_BOUND, Case, condition
from evaluation.options import Evaluation, head, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, FCFS, Variant
from evaluation.tables import claims, with_interval
from evaluation.workloads import ARXIV, SHAREGPT, stand_ins

TITLE = "Figure 15: time to second token with starvation handling disabled"
NEVER = (
    ("scheduler.waiting_rule", "paper"),
    ("scheduler.starvation_after_s", "1000000000"),
    ("scheduler.late_share", "1"),
)
VARIANTS = (Variant("aligned, starvation handling disabled", "aligned", NEVER), ALIGNED, FCFS)
MEAN, MOST = "second_token_mean_s", "second_token_max_s"
METRICS = {"mean": MEAN, "largest": MOST}
STATED = tuple(
    Stated(value, said, "section 4.4", system=VARIANTS[0].label, quantity=quantity, unit="s", workload=workload)
    for workload, quantity, value, said in (
        (SHAREGPT.name, "mean", 1.49, "1.49 s"),
        (SHAREGPT.name, "largest", 30, "about 30 s"),
        (ARXIV.name, "mean", 2.54, "2.54 s (LongBench)"),
        (ARXIV.name, "largest", 30, "about 30 s"),
    )
)


def make(options: Evaluation, runner: Runner) -> str:
    sources, left_out = options.applications((SHAREGPT, ARXIV))
    grid, variants, cases = options.grid(runner), options.variants(VARIANTS), options.cases(sources)
    grid.prepare(cases, variants)
    write(options.given.csv, STATED, (
        metric_point(grid, case, variant, metric, name, "s")
        for case in cases
        for variant in variants
        for name, metric in METRICS.items()
    ))  # fmt: skip

    def figures(case: Case) -> list[str]:
        pairs = [(grid.values(case, variant, MEAN), grid.values(case, variant, MOST)) for variant in variants]
        return [with_interval(values) for pair in pairs for values in pair]

    labels = ["starvation handling disabled", "aligned", "fcfs"]
    columns = [f"{label}: {what}, s" for label in labels for what in ("mean", "largest")]
    parts = [head(TITLE, options, runner, [workloads_of(sources), *left_out, *stand_ins((ARXIV,))])]
    for source in sources:
        rows = [(f"{condition(case)}; {grid.topology(case)}", figures(case)) for case in cases if case.source is source]
        stated = [*(one.said for one in STATED if one.workload == source.name), *["–"] * 4]
        parts.append(claims(f"time to second token, {source.name}", columns, stated, rows))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "", topology=DECODE_BOUND, loads="0.5,0.7,0.9,at-once")
    add_csv(found)
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
