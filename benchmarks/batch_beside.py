"""Interactive requests beside a backlog of batch requests, simulated: their P99 with and without it (aim: 1.2 x).

    python benchmarks/batch_beside.py --cost-model rtxpro6000-llama-3.1-8b --rates 4,8

The backlog (priority BATCH_PRIORITY) is there at time 0 and outlasts the interactive requests, which arrive at random.
The last columns are decode tokens a second while these arrive: of all requests without and with the backlog, and of the
backlog alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alignedserve.config import Config
from alignedserve.request import BATCH_PRIORITY
from alignedserve.scheduler.cost.load import default_hardware, load_step_cost
from alignedserve.scheduler.systems import resolve
from alignedserve.simulator.disaggregated import configured, simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.report.results import RequestResult
from alignedserve.simulator.report.tokens import token_times
from alignedserve.simulator.traces.load import Load
from alignedserve.simulator.traces.mix import Mix
from alignedserve.simulator.workload import Workload

AIM = 1.2
FIGURES = {"TTFT": "ttft", "second token": "second_token", "TPOT": "tpot", "latency": "last"}


def p99(requests: Sequence[RequestResult], name: str) -> float:
    times = token_times(requests)
    values = times.last - times.arrival if name == "last" else getattr(times, name)
    return float(np.nanpercentile(values, 99))


def tokens_per_s(requests: Sequence[RequestResult], until_s: float) -> float:
    """Decode tokens a second up to `until_s`."""
    return sum(stamp <= until_s for request in requests for stamp in request.token_s[1:]) / until_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost-model", default="a100-opt-13b")
    parser.add_argument("--policy", default="aligned,fcfs", help="one or more, separated by commas")
    parser.add_argument("--mix", default="mix:short=0.95,requests=400", help="the interactive requests")
    parser.add_argument("--rates", default="2,4,6", help="interactive requests a second")
    parser.add_argument("--backlog", type=int, default=2000, help="batch requests at time 0, of the same lengths")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a number of the configuration")
    options = parser.parse_args()
    settings = {key: float(value) for key, _, value in (one.partition("=") for one in options.set)}
    config = configured(Config(), settings)
    hardware, cost = Hardware(**default_hardware(options.cost_model)), load_step_cost(options.cost_model)
    mix = Mix.parse(options.mix)
    missed = 0

    def run(policy: str, workload: Workload) -> list[RequestResult]:
        instances = {"prefill_instances": options.prefill, "decode_instances": options.decode}
        return simulate(workload, resolve(policy), config, hardware, cost, cost, **instances).requests

    print("policy rate  " + "  ".join(f"{name:>12}" for name in FIGURES) + "   alone  beside  backlog  tokens/s")
    for policy in options.policy.split(","):
        for rate in map(float, options.rates.split(",")):
            both = replace(mix, batch=options.backlog).workload(Load(rate_per_s=rate), options.seed)
            behind = tuple(arrival for arrival in both.arrivals if arrival.priority == BATCH_PRIORITY)
            alone = run(policy, mix.workload(Load(rate_per_s=rate), options.seed))
            beside, backlog = run(policy, both), run(policy, Workload(behind))
            interactive = [request for request in beside if request.arrival.priority < BATCH_PRIORITY]
            ratios = [p99(interactive, name) / p99(alone, name) for name in FIGURES.values()]
            last_s = max(request.arrival.arrival_s for request in interactive)
            rates = [tokens_per_s(some, last_s) for some in (alone, beside, backlog)]
            missed += any(ratio > AIM for ratio in ratios)
            shown = "  ".join(f"{ratio:>10.3f} x" for ratio in ratios)
            print(f"{policy} {rate:g}  {shown}   " + "  ".join(f"{one:7.0f}" for one in rates), flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
