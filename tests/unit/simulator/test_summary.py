"""Every figure of a summary against hand calculations."""

from __future__ import annotations

import math
import statistics
from array import array

import numpy as np
import pytest

from alignedserve.request import RequestKey
from alignedserve.simulator.report.results import RequestResult, RunResult, StepColumns
from alignedserve.simulator.report.seeds import mean_and_interval, over_seeds
from alignedserve.simulator.report.summary import Objectives, measure
from alignedserve.simulator.requests import Replayed
from alignedserve.simulator.workload import Arrival


def request(number: int, arrival_s: float, tokens: list[float], **more: object) -> RequestResult:
    arrival = Arrival(f"r{number}", arrival_s, 100, max(1, len(tokens)))
    return RequestResult(arrival, array("d", tokens), **more)  # type: ignore[arg-type]


def run() -> RunResult:
    steps = StepColumns()
    for start, seconds, balanced, gap, decodes, switching in (
        (1.0, 1.0, 1.0, 0.0, 0, 0),  # prompts alone
        (2.0, 0.5, 0.4, 0.25, 2, 0),
        (3.0, 1.5, 1.0, 0.75, 1, 1),
    ):
        steps.instance.append(0)
        steps.start_s.append(start)
        steps.seconds.append(seconds)
        steps.balanced_s.append(balanced)
        steps.gap_s.append(gap)
        steps.decodes.append(decodes)
        steps.prefill_tokens.append(0 if decodes else 100)
        steps.shortest.append(100)
        steps.longest.append(101)
        steps.total.append(100 * decodes)
        steps.switching.append(switching)
    requests = [
        request(0, 0.0, [1.0, 2.0, 4.0], pool_wait_s=0.5, preemptions=2),
        request(1, 1.0, [2.0]),
        request(2, 2.0, [], refused="too long"),
        request(3, 2.0, [2.5, 3.0, 3.5, 4.0, 4.5]),
    ]
    return RunResult("aligned", requests, steps, ("decode-0",), 5.0)


def test_latencies_by_hand() -> None:
    found = measure(run(), Objectives()).metrics
    assert (found["requests"], found["completed"], found["refused"], found["preemptions"]) == (4, 3, 1, 2)
    assert found["makespan_s"] == 4.5
    assert found["ttft_mean_s"] == pytest.approx((1.0 + 1.0 + 0.5) / 3)
    assert found["ttft_p50_s"] == 1.0
    assert found["second_token_mean_s"] == pytest.approx((2.0 + 1.0) / 2)  # the second request has no second token
    assert found["tpot_mean_s"] == pytest.approx((1.5 + 0.5) / 2)
    assert found["tpot_p99_s"] == pytest.approx(0.5 + 0.99)
    assert found["tpot_without_pool_wait_mean_s"] == pytest.approx((1.25 + 0.5) / 2)
    assert found["tpot_longest_tenth_mean_s"] == pytest.approx((2.0 + 0.5) / 2)
    assert found["tpot_p99_gap_mean_s"] == pytest.approx((1.99 + 0.5) / 2)
    assert found["itl_mean_s"] == pytest.approx((1.0 + 2.0 + 4 * 0.5) / 6)
    assert found["itl_max_s"] == 2.0
    assert found["pool_wait_mean_s"] == pytest.approx(0.5 / 3)


def test_iterations_and_throughput_by_hand() -> None:
    found = measure(run(), Objectives()).metrics
    assert found["iterations"] == 2
    assert found["iteration_mean_s"] == 1.0
    assert found["iteration_p99_s"] == pytest.approx(1.49)
    assert found["bubble_share"] == pytest.approx(0.6 / 2.0)
    assert found["iteration_gap_mean_s"] == 0.5
    assert found["switch_iteration_share"] == 0.5
    assert found["batch_mean_requests"] == 1.5
    assert found["throughput_requests_per_s"] == pytest.approx(3 / 4.5)
    assert found["output_throughput_tokens_per_s"] == pytest.approx(9 / 4.5)
    assert found["throughput_tokens_per_s"] == pytest.approx(309 / 4.5)
    assert found["decode_throughput_tokens_per_s"] == pytest.approx(6 / 2.5)


def test_goodput_counts_refused_requests_as_missed() -> None:
    found = measure(run(), Objectives(ttft_s=1.0, tpot_s=1.0)).metrics
    assert found["slo_ttft_attainment"] == 0.75
    assert found["slo_tpot_attainment"] == 0.5
    assert found["slo_attainment"] == 0.5
    assert found["goodput_requests_per_s"] == pytest.approx(2 / 4.5)
    only = measure(run(), Objectives(ttft_s=0.75)).metrics
    assert (only["slo_attainment"], only["slo_tpot_attainment"]) == (0.25, None)
    assert measure(run(), Objectives()).metrics["goodput_requests_per_s"] is None


def test_the_share_of_waits_within_the_requests_objectives() -> None:
    found = run()
    assert measure(found, Objectives()).metrics["wait_objective_attainment"] is None
    waiting = Replayed(Arrival("r9", 0.0, 100, 1, 0.5), request(9, 0.0, [1.0]), RequestKey("r9"))
    for since_s, until_s, dropped in ((1.0, 1.5, False), (2.0, 2.75, False), (3.0, 3.25, True), (4.0, 4.25, False)):
        waiting.wait(since_s)
        waiting.stop_waiting(until_s, dropped=dropped)
    assert waiting.result.pool_wait_s == 1.75
    found.requests.append(waiting.result)
    metrics = measure(found, Objectives()).metrics
    assert metrics["wait_objective_attainment"] == 2 / 4
    assert metrics["pool_wait_max_s"] == 1.75  # of all waits of the request


def test_what_arrived_before_the_warm_up_ended_is_not_counted() -> None:
    found = measure(run(), Objectives(), warmup_s=2.0).metrics
    assert (found["requests"], found["completed"], found["refused"], found["preemptions"]) == (2, 1, 1, 0)
    assert found["makespan_s"] == 4.5  # of the whole run
    assert found["ttft_mean_s"] == 0.5
    assert found["output_throughput_tokens_per_s"] == pytest.approx(8 / 2.5)  # one token came before
    none = measure(run(), Objectives(), warmup_s=100.0).metrics
    assert (none["requests"], none["ttft_mean_s"], none["output_throughput_tokens_per_s"]) == (0, None, None)


def test_tails_of_many_requests_are_those_of_each_alone() -> None:
    rng = np.random.default_rng(3)
    requests = [
        request(number, 0.0, list(np.cumsum(rng.uniform(0.01, 1.0, size=int(rng.integers(1, 60))))))
        for number in range(40)
    ]
    tokens = measure(RunResult("x", requests, StepColumns(), (), 0.0), Objectives()).tokens
    for number, one in enumerate(requests):
        gaps = np.diff(np.frombuffer(one.token_s))
        if len(gaps) == 0:
            assert math.isnan(tokens.gap_p99[number])
            continue
        assert tokens.gap_p99[number] == pytest.approx(np.percentile(gaps, 99))
        longest = sorted(gaps)[-max(1, math.ceil(len(gaps) / 10)) :]
        assert tokens.longest_tenth[number] == pytest.approx(statistics.fmean(longest))


def test_lengths_of_tokens_are_the_prefixes_that_their_passes_read() -> None:
    tokens = measure(run(), Objectives()).tokens
    assert tokens.lengths.tolist() == [100, 101, 102, 100, 100, 101, 102, 103, 104]


def test_seeds_make_an_interval() -> None:
    mean, half = mean_and_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)
    assert mean_and_interval([7.0]) == (7.0, None)
    found = over_seeds({1: {"ttft_mean_s": 1.0, "x": None}, 2: {"ttft_mean_s": 3.0, "x": 1.0}})
    assert found["ttft_mean_s"] == 2.0
    assert found["ci95"] == {"ttft_mean_s": pytest.approx(12.706), "x": None}
    assert found["by_seed"] == {"1": {"ttft_mean_s": 1.0, "x": None}, "2": {"ttft_mean_s": 3.0, "x": 1.0}}
    assert over_seeds({1: {"ttft_mean_s": 1.0}}) == {"ttft_mean_s": 1.0}
