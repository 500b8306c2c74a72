"""The disaggregated simulator: nothing is lost, a seed is reproducible, and a leap equals its iterations."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.config import Config, DecodeConfig, PrefillConfig, SchedulerConfig
from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.step import ChunkShape
from alignedserve.scheduler.policies.base import BatchLimits
from alignedserve.scheduler.policies.rounds import LEAST_FOR_ROUND, RoundsPolicy
from alignedserve.scheduler.systems import System, Topology, resolve
from alignedserve.simulator.disaggregated import as_run, configured, simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.report.steps import StepRecorder
from alignedserve.simulator.report.summary import Objectives, measure
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost

SYSTEMS = {name: System(name, Topology.DISAGGREGATED, "", "") for name in ("aligned", "fcfs")}
NO_PREFETCH = System("fcfs", Topology.DISAGGREGATED, "", "", {"cluster.prefetch": False})
ALL_SYSTEMS = [
    System(name, Topology.DISAGGREGATED, "", "", settings)
    for name in ("aligned", "aligned-cost", "fcfs")
    for settings in ({}, {"cluster.prefetch": False})
]
COST = LinearStepCost()


def workload(*shapes: tuple[float, int, int] | tuple[float, int, int, float]) -> Workload:
    return Workload(tuple(Arrival(f"r{number}", *shape) for number, shape in enumerate(shapes)))


def hardware(**sizes: float) -> Hardware:
    wanted: dict[str, float] = {
        "kv_tokens": 640,
        "kv_bytes_per_token": 1 << 16,
        "pool_tokens": 4000,
        "block_size": 4,
        **sizes,
    }
    return Hardware(**wanted)  # type: ignore[arg-type]


def small_config(**scheduler: object) -> Config:
    return Config(
        prefill=PrefillConfig(token_budget=64, max_requests=4, queue_tokens=256),
        decode=DecodeConfig(max_running=12, join_iterations=4),
        scheduler=SchedulerConfig(min_batch_requests=4, leaf_tokens=4, **scheduler),  # type: ignore[arg-type]
    )


def run(load: Workload, system: System, config: Config, machine: Hardware, **options: object) -> RunResult:
    return simulate(load, system, config, machine, COST, COST, **options)  # type: ignore[arg-type]


@st.composite
def cells(draw: st.DrawFn) -> tuple[Workload, System, Config, Hardware, dict[str, float]]:
    """From comfortable to a pool that a few requests fill; single arrivals and crowds."""
    times = draw(st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.001, 0.02]), min_size=1, max_size=40))
    prompts = st.one_of(st.integers(8, 16), st.integers(1, 150))
    shapes, now_s = [], 0.0
    for gap_s in times:
        now_s += gap_s
        objective_s = draw(st.sampled_from([0.0, 0.0, 0.02, 0.3]))
        shapes.append((now_s, draw(prompts), draw(st.integers(1, 120)), objective_s))
    system = draw(st.sampled_from(ALL_SYSTEMS))
    config = small_config(
        starvation_after_s=draw(st.sampled_from([0.05, 0.5, 5.0])),
        max_batch_share=draw(st.sampled_from([0.1, 0.4, 1.0])),
        join_window=draw(st.sampled_from([0.0, 0.25, 1.0])),
        tpot_objective_s=draw(st.sampled_from([0.0, 0.0, 1e-3, 6e-3, 9e-3])),
    )
    machine = hardware(
        kv_tokens=draw(st.sampled_from([320, 480, 640, 4000])),
        pool_tokens=draw(st.sampled_from([330, 500, 700, 20000])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        prefill_slowdown=draw(st.sampled_from([1.0, 1.25])),
        prefill_slowdown_beside=draw(st.sampled_from([1.0, 1.75])),
        decode_slowdown=draw(st.sampled_from([1.0, 1.25])),
        decode_slowdown_beside=draw(st.sampled_from([1.0, 1.5])),
        message_s=draw(st.sampled_from([200e-6, 0.01])),
    )
    options = {
        "prefill_instances": draw(st.integers(1, 3)),
        "decode_instances": draw(st.integers(1, 3)),
        "iteration_gap_s": draw(st.sampled_from([0.0, 0.003])),
    }
    load = replace(workload(*shapes), clients=draw(st.sampled_from([0, 0, 1, 4])))
    return load, system, config, machine, options


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cells())
def test_every_request_ends_whole_and_a_leap_is_its_steps(
    cell: tuple[Workload, System, Config, Hardware, dict[str, float]],
) -> None:
    load, system, config, machine, options = cell
    leapt = run(load, system, config, machine, **options)
    for request in leapt.requests:
        times_s = list(request.token_s)
        assert bool(request.refused) != (len(times_s) == request.arrival.output_tokens)
        assert times_s == sorted(times_s)
        assert not times_s or times_s[0] > request.arrival.arrival_s
    served = [request for request in leapt.requests if not request.refused]
    if not leapt.counters.get("dropped_requests"):
        assert sum(leapt.steps.decodes) == sum(len(request.token_s) - 1 for request in served)
        assert sum(leapt.steps.prefill_tokens) == sum(request.arrival.input_tokens for request in served)
    stepped = run(load, system, config, machine, **options, leap=False)
    assert pickle.dumps(stepped) == pickle.dumps(leapt)


@pytest.mark.parametrize(
    ("requests", "gap_s", "factors", "kv_tokens", "pool_tokens", "decode"),
    [
        (14, 0.001, (123, 4, 118, 133), 640, 480, 1),  # a copy is dropped while its request's eviction waits
        (12, 0.001, (154, 51, 27, 84), 640, 320, 1),
        (28, 0.001, (60, 7, 135, 150), 480, 480, 2),  # a write that waited begins
        (38, 0.01, (24, 66, 116, 160), 480, 320, 2),  # a write waits for more than it did
    ],
)
def test_a_leap_is_its_steps_and_nothing_is_lost_where_messages_are_slow_and_the_pool_is_full(
    requests: int, gap_s: float, factors: tuple[int, int, int, int], kv_tokens: int, pool_tokens: int, decode: int
) -> None:
    a, b, c, d = factors
    load = workload(*((number * gap_s, 8 + number * a % b, 1 + number * c % d) for number in range(requests)))
    machine = hardware(kv_tokens=kv_tokens, pool_tokens=pool_tokens, block_size=32, message_s=0.01)
    leapt, stepped = (
        run(load, NO_PREFETCH, small_config(), machine, decode_instances=decode, leap=leap) for leap in (True, False)
    )
    assert [len(request.token_s) for request in leapt.requests] == [one.output_tokens for one in load.arrivals]
    assert pickle.dumps(stepped) == pickle.dumps(leapt)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("clients", [1, 3, 100, 1 << 60])
def test_a_closed_loop_sends_the_next_request_when_one_has_ended(clients: int) -> None:
    too_long = (0.0, 700, 1)
    load = workload(*((0.0, 8 + number * 37 % 100, 1 + number % 5) for number in range(12)), too_long, (0.0, 9, 3))
    result = run(replace(load, clients=clients), SYSTEMS["fcfs"], small_config(), hardware(), decode_instances=2)
    ends_s = sorted(one.token_s[-1] if one.token_s else one.arrival.arrival_s for one in result.requests)
    assert [one.refused != "" for one in result.requests] == [False] * 12 + [True, False]
    arrivals_s = [one.arrival.arrival_s for one in result.requests]
    assert arrivals_s == [*[0.0] * min(clients, 14), *ends_s[: max(0, 14 - clients)]]


def crowd(requests: int = 40) -> Workload:
    """All at once, with lengths in no order."""
    return workload(*((0.0, 8 + number * 37 % 100, 1 + number * 53 % 110) for number in range(requests)))


def test_the_same_arguments_give_the_same_bytes() -> None:
    machine = hardware(kv_tokens=480, pool_tokens=700)
    first, second = (run(crowd(), SYSTEMS["aligned"], small_config(), machine, seed=3) for _ in range(2))
    assert pickle.dumps(first) == pickle.dumps(second)


def test_what_no_store_can_hold_is_refused_with_the_reason_and_the_others_are_served() -> None:
    result = run(workload((0.0, 500, 10), (0.0, 20, 10)), SYSTEMS["aligned"], small_config(), hardware())
    large, small = result.requests
    assert "may grow to 510 tokens" in large.refused
    assert not large.token_s
    assert len(small.token_s) == 10
    assert result.counters["refused"] == 1


def test_passes_take_longer_beside_those_of_the_same_machine() -> None:
    """The first prompt is computed while nothing decodes, the second while the first answer grows."""
    config = replace(small_config(), prefill=PrefillConfig(token_budget=512))
    slow = {
        "prefill_slowdown": 2.0,
        "prefill_slowdown_beside": 3.0,
        "decode_slowdown": 4.0,
        "decode_slowdown_beside": 5.0,
    }
    load, machine = workload((0.0, 16, 60), (0.2, 400, 1)), hardware(kv_tokens=6400, pool_tokens=8000)
    first, second = run(load, SYSTEMS["aligned"], config, replace(machine, **slow)).requests
    assert first.token_s[0] == pytest.approx(machine.message_s + 2.0 * COST.step_s([ChunkShape(16)], ()))
    begins_s = second.arrival.arrival_s + second.stages_s["queue"]
    ends_s = second.token_s[0]
    assert ends_s - begins_s == pytest.approx(3.0 * COST.step_s([ChunkShape(400)], ()))
    beside = 0
    for number, (start_s, end_s) in enumerate(itertools.pairwise(first.token_s[1:]), start=17):
        factor = 5.0 if begins_s <= start_s < ends_s else 4.0
        beside += factor == 5.0
        assert end_s - start_s == pytest.approx(factor * COST.step_s((), [number]))
    assert 0 < beside < 50


def test_one_request_takes_what_its_passes_copies_and_messages_take() -> None:
    machine = hardware(kv_tokens=640, pool_tokens=4000)
    result = run(workload((1.0, 16, 3)), SYSTEMS["aligned"], small_config(), machine)
    (request,) = result.requests
    prefill_s = COST.step_s([ChunkShape(16)], ())
    first_s, second_s, third_s = request.token_s
    assert first_s == pytest.approx(1.0 + machine.message_s + prefill_s)
    assert third_s - second_s == pytest.approx(COST.step_s((), [17]))
    block_bytes = 4 * machine.kv_bytes_per_token
    pool_copy_s = 4 * block_bytes / machine.pool_bandwidth + machine.copy_latency_s
    peer_copy_s = (4 + 0) * block_bytes / machine.peer_bandwidth + machine.copy_latency_s
    # One message each: the commit, its answer, Prefilled, Prefetch and the offer.
    moved_s = 2 * pool_copy_s + peer_copy_s + 5 * machine.message_s
    assert request.pool_wait_s == pytest.approx(moved_s)
    assert second_s - first_s == pytest.approx(moved_s + COST.step_s((), [16]))
    assert sum(request.stages_s.values()) == pytest.approx(third_s - 1.0)
    assert result.end_s == third_s


def test_an_iteration_gap_is_charged_to_decode_iterations_alone() -> None:
    load, machine = workload((1.0, 16, 4)), replace(hardware(), host_overhead_s=0.001)
    plain = run(load, SYSTEMS["fcfs"], small_config(), machine)
    charged = run(load, SYSTEMS["fcfs"], small_config(), machine, iteration_gap_s=0.01)
    (before,), (after,) = plain.requests, charged.requests
    assert after.token_s[0] == before.token_s[0]
    for number in (1, 2, 3):
        assert after.token_s[number] - before.token_s[number] == pytest.approx(number * 0.01)
    assert list(charged.steps.gap_s) == pytest.approx([0.001, 0.011, 0.011, 0.011])  # a prompt, then three decodes
    assert list(charged.steps.seconds) == list(plain.steps.seconds)


def test_without_prefetch_the_pool_is_read_by_the_decode_instance_alone() -> None:
    result = run(crowd(3), NO_PREFETCH, small_config(), hardware())
    assert result.counters["from_peers_bytes"] == 0
    assert result.counters["from_pool_bytes"] == result.counters["to_pool_bytes"] > 0


def test_an_overcrowded_cell_evicts_and_drops_and_loses_nothing() -> None:
    machine = hardware(kv_tokens=320, pool_tokens=330, block_size=1)
    results = [run(crowd(60), system, small_config(), machine) for system in SYSTEMS.values()]
    for request in (request for result in results for request in result.requests):
        assert request.refused or len(request.token_s) == request.arrival.output_tokens
    assert sum(result.counters["evictions"] for result in results) > 0
    assert sum(result.counters.get("dropped_copies", 0) for result in results) > 0
    assert all(any(request.preemptions for request in result.requests) for result in results)


def test_the_pool_s_occupancy_begins_and_ends_empty() -> None:
    result = run(crowd(), SYSTEMS["fcfs"], small_config(), hardware(pool_tokens=700))
    blocks = [blocks for _, blocks in result.pool_blocks]
    assert blocks[0] == 0
    assert 0 < max(blocks) <= 175
    assert blocks[-1] <= 2  # changes of 1 % or less are not recorded


def test_the_settings_of_a_system_are_its_configuration() -> None:
    result = run(crowd(5), NO_PREFETCH, small_config(), hardware(), decode_instances=2)
    config = result.configuration["config"]
    assert isinstance(config, dict)
    assert config["cluster"]["prefetch"] is False
    assert config["cluster"]["decode"] == 2
    assert result.instances == ("prefill-0", "decode-0", "decode-1")
    assert asdict(as_run(small_config(), NO_PREFETCH, 1, 2, refuse_for_load=False)) == config  # what a plan records
    with pytest.raises(ConfigError, match=r"no configuration key cluster\.speed"):
        configured(Config(), {"cluster.speed": 1})
    with pytest.raises(ConfigError, match="colocated"):
        run(crowd(5), System("vllm", Topology.COLOCATED, "", ""), small_config(), hardware())


def test_passes_are_listed_by_their_start_and_none_overlaps_another_of_its_instance() -> None:
    result = run(crowd(), SYSTEMS["aligned"], small_config(), hardware(), decode_instances=2)
    steps = result.steps
    assert list(steps.start_s) == sorted(steps.start_s)
    for number in range(len(result.instances)):
        own = [i for i, instance in enumerate(steps.instance) if instance == number]
        for before, after in itertools.pairwise(own):
            assert steps.start_s[before] + steps.seconds[before] <= steps.start_s[after] + 1e-9
    for column in StepRecorder.__slots__:
        assert len(getattr(steps, column)) == len(steps.instance) == len(steps.gap_s)


def test_a_request_goes_by_the_objective_that_its_trace_gives_it() -> None:
    """A long request among an endless stream of short ones, which keep the default objective."""

    def wait_s(objective_s: float) -> float:
        short = [Arrival(f"short-{i}", 0.003 * i, 12 + i % 3, 15) for i in range(300)]
        long = Arrival("long", 0.1, 100, 15, objective_s)
        arrivals = sorted([*short, long], key=lambda arrival: arrival.arrival_s)
        config = small_config(starvation_after_s=5.0, waiting_rule="overdue")
        result = run(Workload(tuple(arrivals)), SYSTEMS["aligned"], config, hardware(pool_tokens=20_000))
        return next(request.pool_wait_s for request in result.requests if request.arrival is long)

    assert wait_s(0.0) > 1.0
    assert 0.02 < wait_s(0.02) < 0.1


def test_no_request_waits_for_a_full_instance_while_another_has_room() -> None:
    """Two instances of two slots: one runs 900 tokens twice, the other is soon idle."""
    first = [(0.002 * number, 16, output) for number, output in enumerate((10, 10, 900, 900))]
    late = [(0.02 + 0.002 * number, 16, 8) for number in range(3)]
    config = replace(small_config(), decode=DecodeConfig(max_running=2, join_iterations=4))
    machine = hardware(kv_tokens=8000, pool_tokens=20000)
    instances = {"prefill_instances": 2, "decode_instances": 2}
    result = run(workload(*first, *late), SYSTEMS["aligned"], config, machine, **instances)
    assert max(request.pool_wait_s for request in result.requests) < 0.5  # the long ones run for more than 4 s


@pytest.mark.parametrize("system", ALL_SYSTEMS, ids=lambda system: f"{system.name}{'-direct' * bool(system.settings)}")
def test_with_a_tpot_objective_iterations_meet_it_under_overload_at_the_cost_of_throughput(system: System) -> None:
    objective_s = 7e-3
    load = workload(*((0.0, 20 + 37 * number % 180, 200 + 17 * number % 60) for number in range(160)))
    machine = hardware(kv_tokens=40_000, pool_tokens=80_000)

    def served(wanted_s: float) -> tuple[RunResult, Mapping[str, Any]]:
        config = replace(small_config(tpot_objective_s=wanted_s), decode=DecodeConfig(max_running=128))
        result = run(load, system, config, machine, prefill_instances=6)
        return result, measure(result, Objectives()).metrics

    (freely, free), (bounded, within) = served(0.0), served(objective_s)
    assert free["tpot_without_pool_wait_p50_s"] > objective_s
    assert within["tpot_without_pool_wait_p99_s"] <= objective_s
    assert within["iteration_p99_s"] <= 1.02 * objective_s  # members grow, and none is evicted for it
    assert 0.4 * free["decode_throughput_tokens_per_s"] < within["decode_throughput_tokens_per_s"]
    assert within["decode_throughput_tokens_per_s"] < 0.95 * free["decode_throughput_tokens_per_s"]
    assert bounded.counters["held_iterations"] > 0
    assert freely.counters["held_iterations"] == 0
    hopeless, _ = served(1e-9)  # one after the other
    assert max(hopeless.steps.decodes) == 1
    assert all(len(request.token_s) == request.arrival.output_tokens for request in hopeless.requests)


def test_without_a_configured_maximum_the_cache_decides() -> None:
    load = workload(*((0.0, 1, 300) for _ in range(400)))
    for kv_tokens, most in ((40_000, 256), (768 * 320, 320)):
        machine = hardware(kv_tokens=kv_tokens, pool_tokens=400_000)
        config = replace(small_config(), decode=DecodeConfig())
        assert max(run(load, SYSTEMS["fcfs"], config, machine).steps.decodes) == most


class PaddedCost(LinearStepCost):
    """As if each request read this share of the way from its own KV to that of the longest."""

    def __init__(self, alpha: float) -> None:
        super().__init__(base_s=2e-3, kv_token_s=5e-6, longest_token_s=0.0)
        self._alpha = alpha

    def _seconds(self, prompt: int, decodes: int, kv_tokens: int, longest: int) -> float:
        padding = max(0, decodes * longest - kv_tokens) if decodes else 0
        return super()._seconds(prompt, decodes, kv_tokens + int(self._alpha * padding), longest)


@pytest.mark.parametrize(("alpha", "in_order"), [(0.0, "age"), (0.5, "length")])
def test_rounds_that_do_not_know_the_cost_learn_it(
    alpha: float, in_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin by length, and come to go as with the cost."""
    cost, loss = PaddedCost(alpha), RoundsPolicy._loss
    seen: list[str] = []

    def noting(policy: RoundsPolicy, limits: BatchLimits) -> float:
        found = loss(policy, limits)
        seen.append("length" if found >= LEAST_FOR_ROUND else "age")
        return found

    monkeypatch.setattr(RoundsPolicy, "_loss", noting)
    load = workload(*[(0.0, 8 + 97 * number % 150, 20 + 31 * number % 90) for number in range(300)])
    for knows_cost in True, False:
        seen.clear()
        found = simulate(load, resolve("aligned"), small_config(), hardware(), cost, cost, knows_cost=knows_cost)
        assert found.configuration["knows_cost"] is knows_cost
        assert (seen[0] == "age") is knows_cost  # one request waits
        assert set(seen[-3:-1]) == {in_order}  # few wait when the last one begins
