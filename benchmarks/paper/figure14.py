"""Figure 14 (ablation), and other figures of section 4.4: the share of batch switches and the pool's occupancy.

    python benchmarks/paper/figure14.py --data DIR --out results/paper

The ablation uses Azure's code trace: without prefetching, then also without prefix-aware batching.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.figures import Row, Stated, add_csv, metric_point, place_of, point, write
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
LOST = ("without prefetching", "without prefix-aware batching as well: further", "both")
STATED_LOST = tuple(
    Stated(value, said, "section 4.4", system=system, quantity="throughput lost", workload=AZURE_CODE.name)
    for system, value, said in zip(LOST, (0.1473, 0.2851), ("14.73 %", "28.51 %"), strict=False)
)
STATED_SWITCHES = tuple(
    Stated(value, said, "section 4.4", quantity="switch iterations", workload=name)
    for name, value, said in (
        (SHAREGPT.name, 0.0861, "at most 8.61 %"),
        (ARXIV.name, 0.1237, "at most 12.37 % (LongBench)"),
    )
)


def lost(grid: Grid, case: Case, variants: Sequence[Variant]) -> list[list[float]]:
    """Share of throughput lost without prefetching, by then dropping alignment too, and by both, by seed."""
    whole, no_prefetch, neither = (grid.values(case, variant, THROUGHPUT) for variant in variants)
    pairs = ((no_prefetch, whole), (neither, no_prefetch), (neither, whole))
    return [[1 - value for value in ratios(*pair)] for pair in pairs]


def points(grid: Grid, ablated: Sequence[Case], others: Sequence[Case], variants: Sequence[Variant]) -> list[Row]:
    """For the CSV file."""
    rows = []
    for case in ablated:
        rows += [metric_point(grid, case, variant, THROUGHPUT, "decode throughput", "tokens/s") for variant in variants]
        named = zip(LOST, lost(grid, case, variants), strict=True)
        rows += [point(place_of(case, grid), name, "throughput lost", values) for name, values in named]
    for case in others:
        rows.append(metric_point(grid, case, variants[0], "switch_iteration_share", "switch iterations"))
        rows.append(metric_point(grid, case, variants[0], "pool_peak_gib", "pool at most", "GiB"))
    return rows


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
    write(options.given.csv, (*STATED_LOST, *STATED_SWITCHES), points(grid, ablated, others, variants))
    parts = [
        head(TITLE, options, runner, [workloads_of(sources), *left_out, *stand_ins((ARXIV,))]),
        claims(
            "throughput lost (Azure)",
            LOST,
            [*(one.said for one in STATED_LOST), NOT_STATED],
            [(condition(case), list(map(percent, lost(grid, case, variants)))) for case in ablated],
        ),
        throughputs(grid, ablated, variants),
    ]
    for stated in STATED_SWITCHES:
        rows = [of_aligned(grid, case, variants[0]) for case in others if case.source.name == stated.workload]
        parts.append(
            claims(
                f"aligned, {stated.workload}",
                ["switch iterations", "pool at most, GiB (to a hundredth of it)"],
                [stated.said, NOT_STATED],
                rows,
            )
        )
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "")
    add_csv(found)
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
