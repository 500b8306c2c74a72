"""How many requests per second the simulator replays on one core, with 4 prefill and 4 decode instances.

    python benchmarks/simulator_speed.py --trace AzureLLMInferenceTrace_conv.csv     (target: 500 requests/s)

Without a trace: Poisson arrivals at the rate of that trace, with similar lengths.
"""

from __future__ import annotations

import argparse
import random
import time

from alignedserve.config import Config
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.systems import resolve
from alignedserve.simulator.disaggregated import simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.traces.load import Load
from alignedserve.simulator.traces.read import read_trace
from alignedserve.simulator.workload import Arrival, Workload

REQUESTS_PER_S = 5.5  # rate of the Azure conversation trace
AIM = 500.0


def make_up(requests: int) -> Workload:
    rng = random.Random(0)
    arrivals, now_s = [], 0.0
    for number in range(requests):
        now_s += rng.expovariate(REQUESTS_PER_S)
        prompt, output = rng.lognormvariate(6.6, 0.9), rng.lognormvariate(5.0, 0.8)
        arrivals.append(Arrival(f"r{number}", now_s, 1 + int(prompt), 1 + int(output)))
    return Workload(tuple(arrivals))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="as for `alignedserve simulate`")
    parser.add_argument("--limit", type=int, default=0, help="replay only this many requests")
    parser.add_argument("--policy", default="aligned,fcfs", help="one or more, separated by commas")
    parser.add_argument("--cost-model", default="rtxpro6000-llama-3.1-8b")
    parser.add_argument("--kernel-mode", default="split_kv", choices=("split_kv", "no_split"))
    options = parser.parse_args()
    if options.trace:
        workload = read_trace(options.trace).workload(Load(limit=options.limit or None), 0)
    else:
        workload = make_up(options.limit or 2000)
    hardware = Hardware(kv_tokens=260_000, kv_bytes_per_token=131_072, pool_tokens=2_000_000)
    cost = load_step_cost(options.cost_model, kernel_mode=options.kernel_mode)
    for name in options.policy.split(","):
        begun_s = time.process_time()
        result = simulate(
            workload, resolve(name), Config(), hardware, cost, cost, prefill_instances=4, decode_instances=4
        )
        spent_s = time.process_time() - begun_s
        requests = len(workload.arrivals)
        print(
            f"{name}, {options.cost_model}, {options.kernel_mode}: {requests} requests, "
            f"{len(result.steps.seconds)} passes, "
            f"{result.end_s:.0f} s of virtual time in {spent_s:.1f} s of processor time: "
            f"{requests / spent_s:.0f} requests/s (aim: {AIM:.0f})"
        )


if __name__ == "__main__":
    main()
