"""Figure 14 (ablation), and other figures of section 4.4: the share of batch switches and the pool's occupancy.

    python benchmarks/paper/figure14.py --data DIR --out results/paper

The ablation uses Azure's code trace: without prefetching, then also without prefix-aware batching.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.grid import Case, Grid, condition
from evaluation.options import Evaluation, head, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, Variant
from evaluation.tables import NOT_STATED, claims, percent, ratios, table, with_interval
from evaluation.workloads import ARXIV, AZURE_CODE, SHAREGPT, stand_ins

TITLE = "Figure 14: ablation; batch switches; the pool"
ABLATED = (
    ALIGNED,
    Variant("aligned-no-prefetch", "aligned-no-prefetch"),
    Variant("aligned-no-prefetch-fcfs", "aligned-no-prefetch-fcfs"),
)
THROUGHPUT = "decode_throughput_tokens_per_s"
SWITCHES = {SHAREGPT.name: "at most 8.61 %", ARXIV.name: "at most 12.37 % (LongBench)"}


def lost(grid: Grid, case: Case, variants: Sequence[Variant]) -> list[str]:
    """Throughput lost without prefetching, by then dropping alignment too, and by both."""
    whole, no_prefetch, neither = (grid.values(case, variant, THROUGHPUT) for variant in variants)
    pairs = ((no_prefetch, whole), (neither, no_prefetch), (neither, whole))
    return [percent([1 - value for value in ratios(*pair)]) for pair in pairs]


def throughputs(grid: Grid, cases: Sequence[Case], variants: Sequence[Variant]) -> str:
    rows = [
        [
            f"{case.source.name}; {condition(case)}",
            str(grid.topology(case)),
            *(with_interval(grid.values(case, variant, THROUGHPUT), 4) for variant in variants),
        ]
        for case in cases
    ]
    return table(["decode tokens/s", "prefill:decode", *(variant.label for variant in variants)], rows)


def of_aligned(grid: Grid, case: Case, variant: Variant) -> tuple[str, list[str]]:
    switching = percent(grid.values(case, variant, "switch_iteration_share"))
    pool = with_interval(grid.values(case, variant, "pool_peak_gib"))
    return f"{case.source.name}; {condition(case)}", [switching, pool]


def make(options: Evaluation, runner: Runner) -> str:
    sources, left_out = options.applications((AZURE_CODE, SHAREGPT, ARXIV))
    grid, variants = options.grid(runner), options.variants(ABLATED)
    ablated = options.cases(source for source in sources if source.name == AZURE_CODE.name)
    others = options.cases(source for source in sources if source.name != AZURE_CODE.name)
    grid.prepare(ablated, variants)
    grid.prepare(others, variants[:1])
    columns = ["without prefetching", "without prefix-aware batching as well: further", "both"]
    parts = [
        head(TITLE, options, runner, [workloads_of(sources), *left_out, *stand_ins((ARXIV,))]),
        claims(
            "throughput lost (Azure)",
            columns,
            ["14.73 %", "28.51 %", NOT_STATED],
            [(condition(case), lost(grid, case, variants)) for case in ablated],
        ),
        throughputs(grid, ablated, variants),
    ]
    for name, stated in SWITCHES.items():
        rows = [of_aligned(grid, case, variants[0]) for case in others if case.source.name == name]
        parts.append(
            claims(
                f"aligned, {name}",
                ["switch iterations", "pool at most, GiB (to a hundredth of it)"],
                [stated, NOT_STATED],
                rows,
            )
        )
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    return run(parser(__doc__ or ""), make, argv)


if __name__ == "__main__":
    sys.exit(main())
