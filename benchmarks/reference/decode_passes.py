"""The time of a real run's decode passes against the kernel tables, where the passes between two moments are known.

    python benchmarks/reference/decode_passes.py --data ../shared/data

Two requests with their first token in the same pass, one of which ends later by k tokens: k passes lie between their
ends, if neither was preempted. Only ends after the last prompt are used, so that these passes only decode. Lengths
follow from each request's end. Printed are the real mean time of a pass, and by how much the tables differ: at equal
lengths (the bytes alone), and with what unequal lengths cost. Where requests were preempted (`kv_cache` in meta.json),
a pair whose tables are off by more than a tenth was not in the same passes, and is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.simulator.traces import Load, read_trace

sys.path.insert(0, str(Path(__file__).parents[1]))
import groundtruth
from groundtruth import Times

FEWEST = 50  # passes between two ends
MOST_OFF = 0.1


def pairs(real: list[Times]) -> Iterator[tuple[Times, Times]]:
    """Requests with one first token's time, in order of their ends, after the last first token of all."""
    together: defaultdict[float, list[Times]] = defaultdict(list)
    last_prompt_s = max(one.first_s for one in real)
    for one in real:
        if one.last_s > last_prompt_s:
            together[one.first_s].append(one)
    for group in together.values():
        for one, other in pairwise(sorted(group, key=lambda one: one.last_s)):
            if other.tokens - one.tokens >= FEWEST:
                yield one, other


def lengths_at(real: list[Times], prompts: list[int], at_s: float, pass_s: float) -> list[int]:
    return [
        max(1, round(prompt + one.tokens - (one.last_s - at_s) / pass_s))
        for one, prompt in zip(real, prompts, strict=True)
        if one.first_s < at_s <= one.last_s
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=groundtruth.data_folder(), help="folder of the data files")
    data = parser.parse_args().data
    for run in groundtruth.RUNS:
        folder = data / "groundtruth" / run
        real, cost = groundtruth.real_run(folder), load_step_cost(str(data / "costmodel" / run))
        arrivals = read_trace(str(folder / "workload.csv")).workload(Load(), seed=0).arrivals
        prompts = [arrival.input_tokens for arrival in arrivals]
        preempting = groundtruth.limits_of(folder)[1] > 0
        print(f"{run}\n  {'passes':>8}{'requests':>12}{'longest':>9}{'real (ms)':>11}{'equal':>8}{'unequal':>9}")
        for one, other in sorted(pairs(real), key=lambda pair: pair[0].last_s):
            passes = other.tokens - one.tokens
            pass_s = (other.last_s - one.last_s) / passes
            batches = [
                lengths_at(real, prompts, one.last_s + (number + 0.5) * pass_s, pass_s) for number in range(passes)
            ]
            equal = sum(cost.balanced_step_s((), lengths) for lengths in batches) / passes / pass_s - 1
            unequal = sum(cost.step_s((), lengths) for lengths in batches) / passes / pass_s - 1
            if preempting and abs(equal) > MOST_OFF:
                continue
            requests = f"{len(batches[0])} to {len(batches[-1])}"
            longest = max(map(max, batches))
            print(f"  {passes:>8}{requests:>12}{longest:>9}{pass_s * 1e3:>11.2f}{equal:>+8.1%}{unequal:>+9.1%}")


if __name__ == "__main__":
    main()
