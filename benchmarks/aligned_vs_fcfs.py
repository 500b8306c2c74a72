"""`aligned` against `fcfs` on the real cluster, on a mixed-length load: tokens a second and P99 TPOT.

One prefill and one decode instance. Each policy has its own cluster. They take turns, in reverse order in every other
round, so that other load on the machine affects both.

    python benchmarks/aligned_vs_fcfs.py --rounds 4 --json aligned_vs_fcfs.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from mixed_load import MixedLoad, Streamed, run

from alignedserve.cluster.cli.serve_process import ServeProcess


def measure(policy: str, load: MixedLoad, options: argparse.Namespace) -> dict[str, float]:
    sizes = ("--set", f"decode.cache_blocks={options.cache_blocks}", "--set", "kv_pool.size_gib=0.5")
    model = ("--model", options.model, "--served-model-name", "bench", "--policy", policy)
    with ServeProcess(*model, *sizes, *options.serve) as server:
        run(server.url, MixedLoad(4, 1.0, (8, 8), (8, 8), (8, 8), options.seed))
        answers = run(server.url, load)
    return figures(answers)


def figures(answers: list[Streamed]) -> dict[str, float]:
    makespan_s = max(answer.last_s for answer in answers)
    tpot_s = sorted(answer.tpot_s for answer in answers)
    return {
        "tokens_per_s": round(sum(answer.tokens for answer in answers) / makespan_s, 2),
        "tpot_p99_ms": round(tpot_s[-(-99 * len(tpot_s) // 100) - 1] * 1e3, 2),
        "tpot_mean_ms": round(statistics.mean(tpot_s) * 1e3, 2),
        "ttft_mean_s": round(statistics.mean(answer.first_s for answer in answers), 3),
        "makespan_s": round(makespan_s, 3),
    }


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    load = MixedLoad(options.requests, options.short_share, (16, 64), (400, 900), (32, 96), options.seed)
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in options.policies}
    for number in range(options.rounds):
        for policy in options.policies if number % 2 == 0 else reversed(options.policies):
            runs[policy].append(measure(policy, load, options))
            print(f"round {number} {policy:14} {runs[policy][-1]}", file=sys.stderr)
    median = {
        policy: {name: statistics.median(run[name] for run in found) for name in found[0]}
        for policy, found in runs.items()
    }
    first, *others = options.policies
    ratios = {
        other: {name: round(median[first][name] / median[other][name], 3) for name in ("tokens_per_s", "tpot_p99_ms")}
        for other in others
    }
    return {"model": options.model, "requests": options.requests, "median": median, "ratios": ratios, "runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--policies", nargs="+", default=["aligned", "fcfs"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--short-share", type=float, default=0.9)
    parser.add_argument("--cache-blocks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `alignedserve serve`; last")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = benchmark(options)
    print(json.dumps({name: result[name] for name in ("median", "ratios")}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
