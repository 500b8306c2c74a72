"""Real vLLM runs against their simulation: the same arrivals through policy `vllm` and the measured kernel tables.

    python benchmarks/groundtruth.py --data ../shared/data

`--data` holds `groundtruth/RUN` (workload.csv, requests.jsonl, meta.json) and `costmodel/RUN`. Nothing is fitted to a
run: the tables are kernel times, limits and cache are those of meta.json, and the host's overhead is added only with
`--calibrated-host-overhead-s`. Where the KV capacity was not recorded no request waited for blocks, and none does here,
with the blocks that fit in 90 % of the device's memory beside the model. Where prefix caching was on, lengths do not
tell which prompts share what, so the figures are given without such hits and with those of an infinite cache in every
prompt. Time to first token is measured from the arrival at the scheduler (`queued_ts` in the real run).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.scheduler.cost.load import default_hardware, load_step_cost
from alignedserve.scheduler.systems import Option, System, resolve
from alignedserve.simulator.colocated import simulate_colocated
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.traces import Load, read_trace

BOUNDS = {
    "rtxpro6000-llama-3.1-8b": {"ttft_mean_s": 0.02, "tpot_mean_s": 0.012, "tpot_p99_s": 0.028, "makespan_s": 0.01},
    "rtx4090-llama-3.1-8b": {"ttft_mean_s": 0.04, "tpot_mean_s": 0.018, "tpot_p99_s": 0.025, "makespan_s": 0.028},
}
RUNS = tuple(BOUNDS)
HIT_SHARE = {"rtx4090-llama-3.1-8b": 0.076}  # of the prompt tokens in an infinite prefix cache
GROUPS = ((0, 60), (60, 120), (120, 200), (200, 300))  # requests by arrival


@dataclass(frozen=True)
class Times:
    """The times of one request, in seconds of one clock."""

    arrival_s: float
    first_s: float
    last_s: float
    tokens: int

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.tokens - 1)


def data_folder() -> Path:
    return Path(os.environ.get("ALIGNEDSERVE_DATA") or Path(__file__).parents[1] / "../shared/data").resolve()


def real_run(folder: Path) -> list[Times]:
    records = [json.loads(line) for line in (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
    stamps = ("queued_ts", "first_token_ts", "last_token_ts")
    return [Times(*(float(record[stamp]) for stamp in stamps), int(record["output_toks"])) for record in records]


def limits_of(folder: Path) -> tuple[dict[str, Option], int]:
    """vLLM's limits in a run, and the tokens of its KV cache (0: not recorded)."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    cache = meta.get("kv_cache", {})
    options: dict[str, Option] = {
        name: meta["engine_kwargs"][name] for name in ("max_num_seqs", "max_num_batched_tokens")
    }
    options["prefix_caching"] = bool(cache.get("enable_prefix_caching"))
    blocks = cache.get("num_gpu_blocks", 0)  # one of them is vLLM's null block (`BlockPool`), which no request gets
    return options, max(0, blocks - 1) * cache.get("block_size", 0)


def times_of(result: RunResult) -> list[Times]:
    return [Times(one.arrival.arrival_s, one.token_s[0], one.token_s[-1], len(one.token_s)) for one in result.requests]


def metrics(times: list[Times]) -> dict[str, float]:
    tpots = [one.tpot_s for one in times]
    return {
        "ttft_mean_s": statistics.fmean(one.first_s - one.arrival_s for one in times),
        "tpot_mean_s": statistics.fmean(tpots),
        "tpot_p99_s": percentile(tpots, 0.99),
        "makespan_s": max(one.last_s for one in times) - min(one.arrival_s for one in times),
    }


def percentile(values: list[float], share: float) -> float:
    """A quantile, interpolated linearly between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def simulated(
    data: Path,
    run: str,
    cost_source: str = "",
    options: dict[str, Option] | None = None,
    host_overhead_s: float = 0.0,
    system: System | None = None,
    leap: bool = True,
) -> RunResult:
    """The run's arrivals through policy `vllm`, or another `system` with the same options."""
    folder = data / "groundtruth" / run
    limits, kv_tokens = limits_of(folder)
    workload = read_trace(str(folder / "workload.csv")).workload(Load(), seed=0)
    source = cost_source or str(data / "costmodel" / run)
    hardware = replace(Hardware(**default_hardware(source)), host_overhead_s=host_overhead_s)
    hardware = replace(hardware, kv_tokens=kv_tokens or hardware.kv_tokens)
    cost, changes = load_step_cost(source), limits | (options or {})
    # The real run replayed lengths: `ignore_eos`, and `max_tokens` was the length of the answer.
    return simulate_colocated(
        workload, system or resolve("vllm"), changes, hardware, cost, leap=leap, pinned_lengths=True
    )


def compare(
    data: Path, run: str, cost_source: str = "", options: dict[str, Option] | None = None, host_overhead_s: float = 0.0
) -> tuple[list[Times], list[Times]]:
    """The requests of the real run and of the simulation."""
    ours = times_of(simulated(data, run, cost_source, options, host_overhead_s))
    return real_run(data / "groundtruth" / run), ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data_folder(), help="folder of the data files")
    parser.add_argument("--cost-model", default="", help="another cost model than the measured tables")
    parser.add_argument("--no-async-scheduling", action="store_true", help="plan each pass after the last has ended")
    parser.add_argument("--calibrated-host-overhead-s", type=float, default=0.0, help="added to every pass")
    arguments = parser.parse_args()
    options: dict[str, Option] = {"async_scheduling": not arguments.no_async_scheduling}
    overhead_s = arguments.calibrated_host_overhead_s
    for run in RUNS:
        for share in (0.0, HIT_SHARE[run]) if run in HIT_SHARE else (0.0,):
            told = f"{run}, {share:.1%} of every prompt cached" if run in HIT_SHARE else run
            print(f"{told}, {'calibrated' if overhead_s else 'nothing calibrated'}")
            chosen = options | ({"prefix_hit_share": share} if share else {})
            show(run, *compare(arguments.data, run, arguments.cost_model, chosen, overhead_s))


def show(run: str, real: list[Times], ours: list[Times]) -> None:
    found, expected = metrics(ours), metrics(real)
    print(f"  {'metric':<14}{'real':>10}{'ours':>10}{'error':>9}{'bound':>8}")
    for name, bound in BOUNDS[run].items():
        error = found[name] / expected[name] - 1
        verdict = "" if abs(error) <= bound else "  outside"
        print(f"  {name:<14}{expected[name]:>10.4f}{found[name]:>10.4f}{error:>+9.2%}{bound:>8.1%}{verdict}")
    print("  by arrival:    mean TTFT real, ours (s)   mean TPOT real, ours (ms), error")
    for first, last in GROUPS:
        one, other = metrics(real[first:last]), metrics(ours[first:last])
        ttfts = f"{one['ttft_mean_s']:>10.3f}{other['ttft_mean_s']:>10.3f}"
        tpots = f"{one['tpot_mean_s'] * 1e3:>13.2f}{other['tpot_mean_s'] * 1e3:>9.2f}"
        print(f"    {first:>3} to {last:<3}  {ttfts}{tpots}{other['tpot_mean_s'] / one['tpot_mean_s'] - 1:>+9.2%}")


if __name__ == "__main__":
    main()
