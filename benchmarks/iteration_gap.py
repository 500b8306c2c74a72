"""The whole gap between two decode iterations on the real engine, including joins and evictions (paper, figure 11).

A cluster under a mixed-length load. Its decode cache is so small that requests are evicted and batches switched all the
time. The decode worker measures each gap, from the last token of one iteration to the forward pass of the next.

    python benchmarks/iteration_gap.py --requests 96 --json iteration_gap.json

Target: at most 5 ms for 95 % of the gaps.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mixed_load import MixedLoad, run

from alignedserve.cluster.cli.serve_process import ServeProcess
from alignedserve.control.samples import value

GAP = "alignedserve_iteration_gap_seconds"
BOUNDS_S = ("0.001", "0.002", "0.003", "0.005", "0.01", "0.02")
AIM_SHARE = 0.95


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    load = MixedLoad(options.requests, 0.8, (16, 64), (128, 400), (16, 96), options.seed)
    sizes = ("--set", f"decode.cache_blocks={options.cache_blocks}", "--set", "kv_pool.size_gib=0.25")
    model = ("--model", options.model, "--served-model-name", "bench")
    with ServeProcess(*model, *sizes, "--policy", options.policy, *options.serve) as server:
        run(server.url, MixedLoad(4, 1.0, (8, 8), (8, 8), (8, 8), options.seed))
        before = server.metrics()
        run(server.url, load)
        after = server.metrics()

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    gaps = grown(f"{GAP}_count")
    within = {bound: grown(f"{GAP}_bucket", le=bound) / gaps for bound in BOUNDS_S}
    return {
        "model": options.model,
        "policy": options.policy,
        "requests": options.requests,
        "gaps": int(gaps),
        "mean_gap_ms": round(grown(f"{GAP}_sum") / gaps * 1e3, 3),
        "share_within_s": {bound: round(share, 4) for bound, share in within.items()},
        "evictions": int(grown("alignedserve_decode_evictions_total")),
        "switch_iterations": int(grown("alignedserve_decode_switch_iterations_total")),
        "met": within["0.005"] >= AIM_SHARE,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--policy", default="aligned")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--cache-blocks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options for `alignedserve serve`; last")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = benchmark(options)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
