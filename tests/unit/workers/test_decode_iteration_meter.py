"""The gap between iterations and their bubble, as metrics and in a request's timings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.config import Config
from alignedserve.control.convert import timings_from_proto, timings_to_proto
from alignedserve.decode_worker import iteration_meter
from alignedserve.decode_worker.iteration_meter import IterationMeter
from alignedserve.metrics import Page
from alignedserve.request import Stopwatch
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.cost.measured import MeasuredCost
from alignedserve.scheduler.cost.step import ChunkShape, StepCost
from alignedserve.scheduler.systems import resolve
from alignedserve.simulator.disaggregated import simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.workload import Arrival, Workload

SHARE = ("predicted", "balanced")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [0.0]
    monkeypatch.setattr(iteration_meter.time, "perf_counter", lambda: now[0])
    return now


def samples(meter: IterationMeter) -> dict[tuple[str, str], float]:
    page = Page(instance="decode-0")
    meter.show_metrics(page)
    found = (sample for family in page.collect() for sample in family.samples)
    return {(sample.name, sample.labels.get("le", "")): sample.value for sample in found}


def test_a_gap_is_from_the_last_token_to_the_next_pass_and_not_where_nothing_ran(clock: list[float]) -> None:
    meter = IterationMeter(None)
    assert meter.bubble_s([700, 300]) is None
    for begin_s, end_s in ((1.0, 1.1), (1.104, 1.2), (1.26, 1.3)):
        clock[0] = begin_s
        meter.begin()
        clock[0] = end_s
        meter.end()
    meter.pause()
    clock[0] = 99.0
    meter.begin()
    assert meter.gaps.count == 2
    assert meter.gaps.sum == pytest.approx(0.064)
    found = samples(meter)
    assert found["alignedserve_iteration_gap_seconds_bucket", "0.005"] == 1
    assert found["alignedserve_iteration_gap_seconds_bucket", "+Inf"] == 2
    assert not any("bubble" in name or "predicted" in name for name, _ in found)


def test_the_bubble_is_what_unequal_lengths_cost_more_than_equal_ones() -> None:
    meter = IterationMeter(load_step_cost("rtxpro6000-llama-3.1-8b"))
    assert meter.bubble_s([700] * 64) == 0.0
    bubble_s = meter.bubble_s([8000] * 4 + [300] * 60)
    assert bubble_s is not None
    assert bubble_s > 1e-5
    found = samples(meter)
    assert found["alignedserve_iteration_bubble_seconds_sum", ""] == pytest.approx(bubble_s)
    assert found["alignedserve_iteration_bubble_seconds_count", ""] == 2
    assert found["alignedserve_iteration_bubble_seconds_bucket", "0.0"] == 1
    predicted_s, balanced_s = (found[f"alignedserve_iteration_{name}_seconds_total", ""] for name in SHARE)
    assert predicted_s - balanced_s == pytest.approx(bubble_s)
    assert balanced_s > 0.0


class Rounds(StepCost):
    """10 ms, and 1 µs a token of KV: of a pass through all layers, or of a round of lanes on so many stages."""

    rounds_of = 1

    def __init__(self, stages: int) -> None:
        self.rounds_of = stages  # type: ignore[misc]

    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        return 0.01 + 1e-6 * sum(lengths) / self.rounds_of

    def balanced_step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        return self.step_s(chunks, lengths) - 1e-3

    def run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        return [self.step_s((), lengths)] * steps

    def describe(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("lanes", "round_s", "balanced_s", "idle_s"),
    [
        ([[4000], [2000, 2000]], 0.014, 0.013, 0.0),
        ([[9000, 1000], [1000, 1000]], 0.020, 0.015, 0.004),  # flights of 20 and 12 ms: each stage works for 16
        ([[4000]], 0.014, 0.013, 0.007),  # one request on two stages
    ],
)
def test_in_a_pipeline_stages_idle_while_the_slowest_lane_flies(
    stages: int, lanes: list[list[int]], round_s: float, balanced_s: float, idle_s: float
) -> None:
    """Whether the cost model was measured on one stage or on the instance's two."""
    meter = IterationMeter(Rounds(stages), 2)
    assert [meter.bubble_s(lengths) for lengths in lanes] == pytest.approx([1e-3] * len(lanes))
    meter.note_lanes(lanes)
    found = samples(meter)
    assert found["alignedserve_iteration_predicted_seconds_total", ""] == pytest.approx(round_s)
    assert found["alignedserve_iteration_balanced_seconds_total", ""] == pytest.approx(balanced_s)
    assert found["alignedserve_lanes_idle_predicted_seconds_total", ""] == pytest.approx(idle_s)


def test_a_round_of_equal_lanes_takes_what_was_profiled_on_as_many_stages() -> None:
    shipped = load_step_cost("rtxpro6000-llama-3.1-8b")
    source = {**shipped.parts.source, "degrees": {"decode": {"tensor": 1, "stages": 2, "experts": 1}}}
    cost = MeasuredCost(replace(shipped.parts, source=source))
    meter = IterationMeter(cost, 2)
    meter.note_lanes([[800] * 8] * 2)
    found = samples(meter)["alignedserve_iteration_predicted_seconds_total", ""]
    assert found == cost.step_s((), [800] * 16)


def test_the_bubble_is_the_simulators_where_it_is_below_0_too() -> None:
    prompts = [2745, 1450, 2156, 2604, 1908, 2866]  # one round of jobs is shorter than two at equal lengths
    cost = load_step_cost("rtxpro6000-llama-3.1-8b", kernel_mode="no_split_longest_first", block_bandwidth=5e9)
    load = Workload(tuple(Arrival(f"r{number}", 0.0, tokens, 80) for number, tokens in enumerate(prompts)))
    hardware = Hardware(kv_tokens=40_000, kv_bytes_per_token=1 << 17, pool_tokens=80_000)
    found = simulate(load, resolve("fcfs"), Config(), hardware, cost, cost)
    steps, meter = found.steps, IterationMeter(cost)
    bubbles_s = []
    for start_s, decodes, *seconds in zip(steps.start_s, steps.decodes, steps.seconds, steps.balanced_s, strict=True):
        if decodes == len(prompts):  # all of them run
            tokens = [sum(token_s <= start_s for token_s in one.token_s) for one in found.requests]
            lengths = [prompt + answered - 1 for prompt, answered in zip(prompts, tokens, strict=True)]
            bubbles_s.append(meter.bubble_s(lengths))
            assert bubbles_s[-1] == seconds[0] - seconds[1]
    assert min(bubbles_s) < -1e-3
    assert meter.bubbles.sum == pytest.approx(sum(bubbles_s))


def test_a_request_carries_the_bubble_of_its_iterations_wherever_it_goes() -> None:
    stopwatch = Stopwatch()
    assert timings_from_proto(timings_to_proto(stopwatch)).bubble_s is None
    stopwatch.waste(0.0)
    stopwatch.waste(0.25)
    assert timings_from_proto(timings_to_proto(stopwatch)).bubble_s == 0.25
