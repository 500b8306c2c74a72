"""Prefix caches simulated: hits of each policy against a cache of endless size, time to first token and goodput.

    python benchmarks/prefix_policies.py --trace /data/mooncake_synthetic_trace.jsonl
    python benchmarks/prefix_policies.py --sessions 300 --policy memserve-basic,memserve-1,memserve-2,memserve-3
    python benchmarks/prefix_policies.py --batch 2000,200,16 --instances 1 --policy vllm,sarathi,batchllm

`--trace`: a trace whose lines name blocks (`hash_ids`); `--batch`: a file of prompts, all at once, as in BatchLLM's
evaluation; else generated conversations of several turns, whose prompts have all that was said before and a system
prompt that all share. Each node has one prefill and one decode instance, and its own cache; colocated policies have as
many instances as both. Prints a table; `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from alignedserve.scheduler.cost.load import default_hardware as hardware_of_cost
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.simulator.colocated import simulate_colocated
from alignedserve.simulator.disaggregated import simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.hardware_file import default_hardware
from alignedserve.simulator.replay import ComparedPolicy
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.report.summary import Objectives, measure
from alignedserve.simulator.traces import Load, read_trace
from alignedserve.simulator.traces.chats import Chats
from alignedserve.simulator.workload import Arrival, Workload

POLICIES = "fcfs,mooncake-random,mooncake-least-loaded,memserve-1,memserve-2,memserve-3,mooncake"
BATCH_BLOCK, BATCH_ANSWER = 8, 100  # tokens


def batch(text: str, requests: int, seed: int) -> Workload:
    """`text`: tokens of the shared prefix and of the rest of each prompt, and how many prompts share a prefix.

    In an order of the seed, all at once.
    """
    prefix, own, sharing = (int(part) for part in text.split(","))
    whole, blocks = prefix // BATCH_BLOCK, (prefix + own) // BATCH_BLOCK
    found = []
    for number in range(requests):
        shared = [(number // sharing << 32) + block for block in range(whole)]
        rest = [(1 << 62) + (number << 32) + block for block in range(blocks - whole)]
        found.append(Arrival(f"{number}", 0.0, prefix + own, BATCH_ANSWER, blocks=(*shared, *rest)))
    random.Random(f"prefix policies {seed}").shuffle(found)
    return Workload(tuple(found), {"source": "a file of prompts", "batch": text}, block_tokens=BATCH_BLOCK)


def workload_of(options: argparse.Namespace) -> Workload:
    if options.batch is not None:
        return batch(options.batch, options.limit or 800, options.seed)
    if options.trace is None:
        load = Load((options.rate or 1.0) * options.turns)
        return Chats(conversations=options.sessions, turns=options.turns).workload(load, options.seed)
    load = Load(options.rate, None, options.limit, options.clients)
    return read_trace(options.trace).workload(load, options.seed)


def hardware_of(options: argparse.Namespace) -> Hardware:
    hardware = default_hardware(hardware_of_cost(options.cost_model, {}))
    pool = options.pool_tokens or hardware.pool_tokens
    return replace(hardware, nodes=options.nodes, pool_tokens=pool, disk_tokens=options.disk_tokens)


def run(name: str, options: argparse.Namespace, workload: Workload, hardware: Hardware) -> RunResult:
    policy, _, setting = name.partition(":")
    key, _, value = setting.partition("=")
    compared = ComparedPolicy.of(policy, {key: value} if key else {}, None, decode=options.nodes)
    cost = load_step_cost(options.cost_model)
    if compared.colocated:
        instances = options.instances or 2 * options.nodes
        return simulate_colocated(
            workload, compared.system, compared.options, hardware, cost, instances=instances, seed=options.seed
        )
    return simulate(
        workload,
        compared.system,
        compared.config,
        hardware,
        cost,
        cost,
        prefill_instances=options.nodes,
        decode_instances=options.nodes,
        options=compared.options,
    )


def figures(result: RunResult, objectives: Objectives) -> dict[str, Any]:
    found = measure(result, objectives, 0.0).metrics
    counters = result.counters
    queried, ideal = counters.get("prefix_queried_tokens", 0), counters.get("prefix_ideal_tokens", 0)
    hit = counters.get("prefix_hit_tokens", 0)
    return {
        "hit_share": hit / queried if queried else 0.0,
        "of_ideal": hit / ideal if ideal else 0.0,
        "copied_tokens": counters.get("prefix_copied_tokens", 0),
        "decode_hit_share": counters.get("decode_hit_tokens", 0) / queried if queried else 0.0,
        "network_gb": counters.get("network_bytes", 0) / 1e9,
        **{f"ttft_{which}_s": found[f"ttft_{which}_s"] for which in ("mean", "p50", "p99")},
        **{f"latency_{which}_s": found[f"latency_{which}_s"] for which in ("mean", "p99")},
        "throughput_tokens_per_s": found["throughput_tokens_per_s"],
        "tpot_p99_s": found["tpot_p99_s"],
        "second_token_mean_s": found["second_token_mean_s"],
        "goodput_requests_per_s": found["goodput_requests_per_s"],
        "slo_attainment": found["slo_attainment"],
        "refused": counters["refused"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--trace", help="a trace that names blocks; default: generated conversations")
    add("--batch", metavar="PREFIX,OWN,SHARING", help="a file of --limit (800) prompts of these lengths in tokens")
    add("--limit", type=int, help="only the first requests of the trace")
    add("--clients", type=int, default=0, help="a closed loop over the trace")
    add("--rate", type=float, help="requests a second of the trace (its own), conversations a second (1)")
    add("--sessions", type=int, default=300)
    add("--turns", type=int, default=8)
    add("--policy", default=POLICIES, help="NAME or NAME:KEY=VALUE, several separated by commas")
    add("--nodes", type=int, default=4)
    add("--instances", type=int, help="of colocated policies")
    add("--pool-tokens", type=int, help="of each node (the cost model's hardware)")
    add("--disk-tokens", type=int, default=0, help="of each node")
    add("--cost-model", default="rtxpro6000-llama-3.1-8b")
    add("--slo-ttft", type=float, default=30.0)
    add("--slo-tpot", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--json", type=Path)
    options = parser.parse_args()
    workload, hardware = workload_of(options), hardware_of(options)
    objectives = Objectives(options.slo_ttft, options.slo_tpot)
    print(f"{len(workload.arrivals)} requests, {hardware.nodes} nodes of {hardware.pool_tokens} tokens of memory")
    print(
        "| policy | hits | of ideal | at decode | copied, M tokens | TTFT mean / P50 / P99, s | P99 TPOT, s "
        "| latency mean / P99, s | tokens/s | in objectives | goodput, req/s |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    kept = {}
    for name in options.policy.split(","):
        begun_s = time.perf_counter()
        found = kept[name] = figures(run(name, options, workload, hardware), objectives)
        print(
            f"| `{name}` | {found['hit_share']:.1%} | {found['of_ideal']:.1%} | {found['decode_hit_share']:.1%} "
            f"| {found['copied_tokens'] / 1e6:.2f} "
            f"| {found['ttft_mean_s']:.2f} / {found['ttft_p50_s']:.2f} / {found['ttft_p99_s']:.2f} "
            f"| {found['tpot_p99_s']:.3f} | {found['latency_mean_s']:.2f} / {found['latency_p99_s']:.2f} "
            f"| {found['throughput_tokens_per_s']:,.0f} "
            f"| {found['slo_attainment']:.1%} | {found['goodput_requests_per_s']:.2f} |",
            flush=True,
        )
        print(f"{name}: {time.perf_counter() - begun_s:.0f} s", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"requests": len(workload.arrivals), "policies": kept}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
