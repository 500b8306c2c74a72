"""Figure 1: iteration latency of batches with a few long prompts.

    python benchmarks/paper/figure01.py
    python benchmarks/paper/figure01.py --engine            # the shipped model on this machine's CPU

Batches have 64 prompts of 32 tokens, of which 0, 1, 2 or 4 are replaced by prompts of 4,096 tokens. The paper's text
gives the latencies at 600 generated tokens, and does not state its other batch sizes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from evaluation.decoding import Batch, Decoding, grown, parser, run, whole_numbers
from evaluation.figures import Row, point, write
from evaluation.tables import NOT_STATED, claims, number, table

TITLE = "Figure 1: iteration latency with a few long prompts in the batch"


def batches(options: argparse.Namespace) -> dict[str, Batch]:
    """The batches by name, the baseline first. Raises ValueError if a batch would have only long prompts."""
    if max(options.longs) >= options.batch or min(options.longs) < 0:
        raise ValueError(f"--longs are from 0 to less than the batch of {options.batch}")
    counts = sorted({0, *options.longs})
    return {
        f"{options.batch - count}+{count}": (options.long,) * count + (options.short,) * (options.batch - count)
        for count in counts
    }


def curves(decoding: Decoding, named: dict[str, Batch], generated: Sequence[int]) -> dict[int, list[float]]:
    """Milliseconds of an iteration of each batch, by the number of tokens generated before it."""
    return {
        count: [1e3 * seconds for seconds in decoding.iterations_s([grown(batch, count) for batch in named.values()])]
        for count in generated
    }


def points(decoding: Decoding, named: dict[str, Batch], curve: dict[int, list[float]]) -> list[Row]:
    """For the CSV file."""
    return [
        point(decoding.place(), name, "iteration latency", [value], "ms", x=str(count))
        for count, values in curve.items()
        for name, value in zip(named, values, strict=True)
    ]


def report(options: argparse.Namespace, decodings: Sequence[Decoding]) -> str:
    named = batches(options)
    generated = sorted({options.at, *options.generated})
    found = {decoding.name: curves(decoding, named, generated) for decoding in decodings}
    write(options.csv, (), (row for one in decodings for row in points(one, named, found[one.name])))
    at = {name: curve[options.at] for name, curve in found.items()}
    stated = [NOT_STATED] * len(named)
    latencies = [(name, [number(value) for value in values]) for name, values in at.items()]
    rises = [(name, [f"{value / values[0]:.3f}" for value in values]) for name, values in at.items()]
    parts = [
        claims(f"ms of an iteration at {options.at} generated tokens", list(named), stated, latencies),
        claims(f"times the baseline's at {options.at}", list(named), stated, rises),
        'The text: "even a batch contains few long prompts, the overall performance will be degraded remarkably".',
    ]
    for name, curve in found.items():
        rows = [[f"{count:,}", *(number(value) for value in values)] for count, values in curve.items()]
        parts.append(f"### Iteration latency, ms: {name}\n\n{table(['generated tokens', *named], rows)}")
    return "\n\n".join(parts)


def longest(options: argparse.Namespace) -> int:
    return int(max(options.short, options.long) + max(options.at, *options.generated) + 1)


def main(argv: Sequence[str] | None = None) -> int:
    found = parser(__doc__ or "")
    add = found.add_argument
    add("--batch", type=int, default=64, help="requests (%(default)s)")
    add("--short", type=int, default=32, help="tokens of a short prompt (%(default)s)")
    add("--long", type=int, default=4096, help="tokens of a long one (%(default)s)")
    add("--longs", type=whole_numbers, default=(1, 2, 4), metavar="A,B,…", help="long prompts in a batch (1,2,4)")
    add("--at", type=int, default=600, help="generated tokens at which batches are compared (%(default)s)")
    add("--generated", type=whole_numbers, default=(0, 200, 400, 600, 800, 1000), metavar="A,B,…", help=(
        "further points of the curves (0 to 1000 by 200)"
    ))  # fmt: skip
    return run(found, TITLE, longest, report, argv)


if __name__ == "__main__":
    sys.exit(main())
