"""Figure 3: batches of prompts of equal length, compared with batches of 64 different lengths.

    python benchmarks/paper/figure03.py
    python benchmarks/paper/figure03.py --engine            # the shipped model on this machine's CPU

There are 64 groups of 64 prompts, of 10, 70, 130, …, 3,790 tokens. Aligned: each group is a batch. Mixed: each of 64
equal batches has one prompt of each group. The paper's text does not state how many tokens are generated (--answer).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from evaluation.decoding import Batch, Decoding, parser, run
from evaluation.figures import Row, point, write
from evaluation.tables import NOT_STATED, claims, number, table

TITLE = "Figure 3: mean TPOT of aligned batches against mixed ones"
COLUMNS = ("aligned, mean of all batches", "mixed", "mixed / aligned")
SHOWN = 8  # of the aligned batches


def lengths(options: argparse.Namespace) -> list[int]:
    """Prompt lengths of the groups. Raises ValueError for invalid options."""
    if options.groups < 2 or options.first < 1 or options.step < 0:
        raise ValueError("--groups is at least 2, --first at least 1 and --step at least 0")
    return [options.first + number * options.step for number in range(options.groups)]


def tpots_ms(decoding: Decoding, options: argparse.Namespace) -> list[float]:
    """Mean TPOT of each aligned batch, and last that of the mixed batch."""
    each = lengths(options)
    batches: list[Batch] = [*((length,) * options.groups for length in each), tuple(each)]
    return [1e3 * seconds for seconds in decoding.means_s(batches, options.answer)]


def points(decoding: Decoding, each: Sequence[int], tpots: Sequence[float]) -> list[Row]:
    """For the CSV file: `tpots` as of `tpots_ms`."""
    *aligned, mixed = tpots
    place, what = decoding.place(), "mean TPOT"
    rows = [point(place, "aligned", what, [own], "ms", x=str(size)) for size, own in zip(each, aligned, strict=True)]
    rows.append(point(place, "aligned, mean of all batches", what, [statistics.fmean(aligned)], "ms"))
    return [*rows, point(place, "mixed", what, [mixed], "ms")]


def report(options: argparse.Namespace, decodings: Sequence[Decoding]) -> str:
    each = lengths(options)
    found = {decoding.name: tpots_ms(decoding, options) for decoding in decodings}
    write(options.csv, (), (row for one in decodings for row in points(one, each, found[one.name])))
    ours = []
    for name, (*aligned, mixed) in found.items():
        mean = statistics.fmean(aligned)
        ours.append((name, [number(mean), number(mixed), f"{mixed / mean:.3f}"]))
    chosen = range(0, len(each), max(1, len(each) // SHOWN))
    rows = [[f"{each[group]:,}", *(number(tpots[group]) for tpots in found.values())] for group in chosen]
    return "\n\n".join(
        [
            claims(f"mean TPOT, ms, over {options.answer} tokens", COLUMNS, [NOT_STATED] * len(COLUMNS), ours),
            'The text: longer prompts have "a relatively higher TPOT", and aligned batches outperform mixed ones.',
            f"### Mean TPOT of aligned batches, ms\n\n{table(['prompt tokens', *found], rows)}",
        ]
    )


def longest(options: argparse.Namespace) -> int:
    return lengths(options)[-1] + int(options.answer) + 1


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "")
    add = found.add_argument
    add("--groups", type=int, default=64, help="groups, and prompts in each (%(default)s)")
    add("--first", type=int, default=10, help="tokens of the first group's prompts (%(default)s)")
    add("--step", type=int, default=60, help="tokens from one group to the next (%(default)s)")
    add("--answer", type=int, default=128, help="tokens that each request generates (%(default)s)")
    return run(found, TITLE, longest, report, argv)


if __name__ == "__main__":
    sys.exit(main())
