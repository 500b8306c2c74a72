"""Seconds until a cluster is ready whose instances have several ranks, over those of a cluster with one rank each.

Each cluster is started in each round, by turns, with one prefill and one decode instance. Medians.

    python benchmarks/rank_start.py --rounds 3 --json start.json 1x1 4x1 1x4

Degrees of both roles: TENSORxSTAGES; the first one's time is the measure. Target: at most 1.3 times.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from alignedserve.cluster.cli.serve_process import ServeProcess


def start_s(model: str, degrees: str) -> float:
    tensor, _, stages = degrees.partition("x")
    with ServeProcess("--model", model, "--tensor-parallel-size", tensor, "--pipeline-parallel-size", stages) as server:
        return server.start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("degrees", nargs="*", metavar="TENSORxSTAGES", default=["1x1", "4x1", "1x4"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[float]] = {degrees: [] for degrees in given.degrees}
    for number in range(given.rounds):
        for degrees in (*given.degrees[number:], *given.degrees[:number]):
            found[degrees].append(start_s(given.model, degrees))
    one_s = statistics.median(found[given.degrees[0]])
    for degrees, seconds in found.items():
        median_s = statistics.median(seconds)
        print(f"{degrees}: {median_s:.1f} s, {median_s / one_s:.2f} x {given.degrees[0]}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
