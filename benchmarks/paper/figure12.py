"""Figure 12: forward latency by the length of the long requests.

    python benchmarks/paper/figure12.py --out results/paper

The text says that 95 % of the requests are long, probably by mistake for short: both readings are run. It does not
state the constant length of the short ones (--short-tokens). Means are over all passes with decodes, without gaps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evaluation.comparison import COLOCATED
from evaluation.figures import Row, add_csv, place_of, point, write
from evaluation.grid import DECODE_BOUND, Case, Grid, by_condition, condition
from evaluation.options import Evaluation, head, parser, run, workloads_of
from evaluation.runner import Runner
from evaluation.runs import ALIGNED, FASTGEN, FCFS, VLLM, Variant
from evaluation.tables import NOT_STATED, PAPER, claims, gain, ratios, table, with_interval
from evaluation.workloads import Source, mix

TITLE = "Figure 12: latency of forward computing against the length of long requests"
LENGTHS = (2000, 4000, 6000, 8000, 10_000)
READINGS = {"95 % long, as printed": 0.05, "95 % short": 0.95}
VARIANTS = (ALIGNED, FCFS, VLLM, FASTGEN)
REQUESTS = 400
METRIC = "iteration_mean_s"


def sources(short_tokens: int) -> dict[str, list[Source]]:
    """The workloads of each reading, in the order of `LENGTHS`."""
    return {
        reading: [
            mix(
                f"{reading}, {length:,}",
                REQUESTS,
                short=share,
                short_min=short_tokens,
                short_max=short_tokens,
                long_min=length,
                long_max=length,
            )
            for length in LENGTHS
        ]
        for reading, share in READINGS.items()
    }


def rise(grid: Grid, cases: Sequence[Case], variant: Variant) -> list[float]:
    """Latency with the longest long requests over that with the shortest, by seed."""
    return ratios(grid.values(cases[-1], variant, METRIC), grid.values(cases[0], variant, METRIC))


def points(grid: Grid, reading: str, cases: Sequence[Case], variants: Sequence[Variant]) -> list[Row]:
    """For the CSV file; `x` is the length of the long requests."""
    rows = []
    for length, case in zip(LENGTHS, cases, strict=True):
        place = {**place_of(case, grid), "workload": reading}
        for variant in variants:
            values = grid.values(case, variant, METRIC)
            rows.append(point(place, variant.label, "mean forward latency", values, "ms", x=str(length), scale=1e3))
    return rows


def section(grid: Grid, reading: str, cases: Sequence[Case], variants: Sequence[Variant]) -> str:
    rows = []
    for length, case in zip(LENGTHS, cases, strict=True):
        means = [with_interval(grid.values(case, variant, METRIC), scale=1e3) for variant in variants]
        rows.append([f"{length:,}", str(grid.topology(case)), *means])
    title = f"### Mean forward latency, ms: {reading}; {condition(cases[0])}"
    return f"{title}\n\n{table(['long requests, tokens', 'prefill:decode', *(v.label for v in variants)], rows)}"


def make(options: Evaluation, runner: Runner) -> str:
    listed = {name: options.limited(found) for name, found in sources(options.given.short_tokens).items()}
    variants, grid = options.variants(VARIANTS), options.grid(runner)
    cases = {name: options.cases(found) for name, found in listed.items()}
    grid.prepare([case for found in cases.values() for case in found], variants)
    groups = [(name, group) for name, found in cases.items() for group in by_condition(found)]
    write(options.given.csv, (), (row for name, group in groups for row in points(grid, name, group, variants)))
    labels = [variant.label for variant in variants]
    rises = [
        (f"{name}; {condition(group[0])}", [gain(rise(grid, group, variant)) for variant in variants])
        for name, group in groups
    ]
    what = "times the latency at 10,000 that it is at 2,000"
    lowest = sum(
        all(
            sum(grid.values(case, ours, METRIC)) < sum(grid.values(case, other, METRIC))
            for ours, other in ((variants[0], variant) for variant in variants[1:])
        )
        for _, group in groups
        for case in group
    )
    total = sum(len(group) for _, group in groups)
    pairs = f"{lowest} of {total} pairs of a workload and a condition"
    said = f"Aligned the lowest of all: always, says {PAPER}; ours: {pairs}."
    notes = [workloads_of(source for found in listed.values() for source in found), COLOCATED]
    parts = [
        head(TITLE, options, runner, notes),
        claims(what, labels, [NOT_STATED] * len(labels), rises),
        'The text: "remarkably" for the others, "slightly" for AlignedServe.',
        said,
        *(section(grid, name, group, variants) for name, group in groups),
    ]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "", topology=DECODE_BOUND, loads="at-once")
    add_csv(found)
    found.add_argument("--short-tokens", type=int, default=500, help="length of the short requests (%(default)s)")
    return run(found, make, argv)


if __name__ == "__main__":
    sys.exit(main())
