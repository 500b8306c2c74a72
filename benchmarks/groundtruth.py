"""A real vLLM run against its simulation: the same arrivals through policy `vllm` and the measured kernel tables.

    python benchmarks/groundtruth.py --data ../shared/data

`--data` holds `groundtruth/RUN` (workload.csv, requests.jsonl) and `costmodel/RUN`. Nothing is fitted to the run: the
tables are kernel times, and the host's overhead is added only with `--calibrated-host-overhead-s`. The KV capacity of
the run was not recorded. No request waited for blocks in it, and none does here, with the blocks that fit in 90 % of
the device's memory beside the model. Time to first token is measured from the arrival at the scheduler (`queued_ts` in
the real run).
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
from alignedserve.scheduler.systems import Option, resolve
from alignedserve.simulator.colocated import simulate_colocated
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.traces import Load, read_trace
from alignedserve.simulator.workload import Workload

RUN = "rtxpro6000-llama-3.1-8b"
BOUNDS = {"ttft_mean_s": 0.05, "tpot_mean_s": 0.02, "tpot_p99_s": 0.03, "makespan_s": 0.02}
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


def simulated(workload: Workload, cost_source: str, options: dict[str, Option], host_overhead_s: float) -> RunResult:
    hardware = replace(Hardware(**default_hardware(cost_source)), host_overhead_s=host_overhead_s)
    return simulate_colocated(workload, resolve("vllm"), options, hardware, load_step_cost(cost_source))


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


def compare(
    data: Path, cost_source: str = "", options: dict[str, Option] | None = None, host_overhead_s: float = 0.0
) -> tuple[list[Times], list[Times]]:
    """The requests of the real run and of the simulation."""
    folder = data / "groundtruth" / RUN
    workload = read_trace(str(folder / "workload.csv")).workload(Load(), seed=0)
    source = cost_source or str(data / "costmodel" / RUN)
    return real_run(folder), times_of(simulated(workload, source, options or {}, host_overhead_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data_folder(), help="folder of the data files")
    parser.add_argument("--cost-model", default="", help="another cost model than the measured tables")
    parser.add_argument("--no-async-scheduling", action="store_true", help="plan each pass after the last has ended")
    parser.add_argument("--calibrated-host-overhead-s", type=float, default=0.0, help="added to every pass")
    arguments = parser.parse_args()
    options: dict[str, Option] = {"async_scheduling": not arguments.no_async_scheduling}
    real, ours = compare(arguments.data, arguments.cost_model, options, arguments.calibrated_host_overhead_s)
    found, expected = metrics(ours), metrics(real)
    label = "calibrated on this run" if arguments.calibrated_host_overhead_s else "nothing calibrated"
    print(f"{'metric':<14}{'real':>10}{'ours':>10}{'error':>9}{'bound':>8}   ({label})")
    for name, bound in BOUNDS.items():
        error = found[name] / expected[name] - 1
        verdict = "" if abs(error) <= bound else "  outside"
        print(f"{name:<14}{expected[name]:>10.4f}{found[name]:>10.4f}{error:>+9.2%}{bound:>8.0%}{verdict}")
    print("by arrival:    mean TTFT real, ours (s)   mean TPOT real, ours (ms), error")
    for first, last in GROUPS:
        one, other = metrics(real[first:last]), metrics(ours[first:last])
        ttfts = f"{one['ttft_mean_s']:>10.3f}{other['ttft_mean_s']:>10.3f}"
        tpots = f"{one['tpot_mean_s'] * 1e3:>13.2f}{other['tpot_mean_s'] * 1e3:>9.2f}"
        print(f"  {first:>3} to {last:<3}  {ttfts}{tpots}{other['tpot_mean_s'] / one['tpot_mean_s'] - 1:>+9.2%}")


if __name__ == "__main__":
    main()
