"""A backlog of batch requests beside interactive ones: it fills what they leave, and costs them a fifth at most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from alignedserve.config import Config
from alignedserve.request import BATCH_PRIORITY
from alignedserve.scheduler.systems import resolve
from alignedserve.simulator.disaggregated import configured, simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.report.results import RequestResult
from alignedserve.simulator.report.summary import Objectives, measure
from alignedserve.simulator.report.tokens import token_times
from alignedserve.simulator.traces import Load, read_trace
from alignedserve.testing.linear_cost import LinearStepCost

HARDWARE = Hardware(kv_tokens=6000, kv_bytes_per_token=1 << 16, pool_tokens=40_000, block_size=16)
COST = LinearStepCost()
MIX = "mix:short=0.8,requests=40,short_min=30,short_max=200,long_min=300,long_max=800,output_min=10,output_max=60"


def p99s(requests: Sequence[RequestResult]) -> dict[str, float]:
    times = token_times(requests)
    of_all = {"ttft": times.ttft, "second": times.second_token, "tpot": times.tpot}
    found = {**of_all, "latency": times.last - times.arrival}
    return {name: float(np.nanpercentile(values, 99)) for name, values in found.items()}


@pytest.mark.parametrize(("policy", "decodes"), [("aligned", 1), ("fcfs", 2)])
def test_a_backlog_costs_interactive_requests_little_and_fills_what_they_leave(policy: str, decodes: int) -> None:
    config = configured(Config(), {"decode.max_running": 32, "scheduler.max_prefix_tokens": 1024})
    runs = []
    for source in (MIX, f"{MIX},batch=60"):
        workload = read_trace(source).workload(Load(rate_per_s=10.0), 1)
        of_two = {"prefill_instances": 2, "decode_instances": decodes}
        runs.append(simulate(workload, resolve(policy), config, HARDWARE, COST, COST, **of_two))  # type: ignore[arg-type]
    alone, beside = ([request for request in run.requests if request.arrival.priority < BATCH_PRIORITY] for run in runs)
    ratios = {name: p99s(beside)[name] / value for name, value in p99s(alone).items()}
    assert max(ratios.values()) <= 1.2, ratios
    behind = [request for request in runs[1].requests if request.arrival.priority >= BATCH_PRIORITY]
    until_s = max(request.arrival.arrival_s for request in beside)
    assert sum(stamp <= until_s for request in behind for stamp in request.token_s) > 100
    metrics = measure(runs[1], Objectives()).metrics
    assert (metrics["requests"], metrics["completed"]) == (40, 40)
    assert (metrics["batch_requests"], metrics["batch_completed"]) == (60, 60)
    assert metrics["tpot_p99_s"] == pytest.approx(p99s(beside)["tpot"])
