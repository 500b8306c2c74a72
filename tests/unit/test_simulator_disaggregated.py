"""The disaggregated simulator: nothing is lost, the same seed does the same, and a leap is what its steps would be."""

from __future__ import annotations

import pickle

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.config import Config, DecodeConfig, PrefillConfig, SchedulerConfig
from alignedserve.scheduler.systems import System, Topology
from alignedserve.simulator.disaggregated import simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.results import RunResult
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost

SYSTEMS = {name: System(name, Topology.DISAGGREGATED, "", "") for name in ("aligned", "fcfs")}
NO_PREFETCH = System("fcfs", Topology.DISAGGREGATED, "", "", {"cluster.prefetch": False})
COST = LinearStepCost()


def workload(*shapes: tuple[float, int, int]) -> Workload:
    return Workload(tuple(Arrival(f"r{number}", *shape) for number, shape in enumerate(shapes)))


def hardware(**sizes: int) -> Hardware:
    wanted = {"kv_tokens": 640, "kv_bytes_per_token": 1 << 16, "pool_tokens": 4000, "block_size": 4, **sizes}
    return Hardware(**wanted)


def small_config(**scheduler: object) -> Config:
    return Config(
        prefill=PrefillConfig(token_budget=64, max_requests=4, queue_tokens=256),
        decode=DecodeConfig(max_running=12, join_iterations=4),
        scheduler=SchedulerConfig(min_batch_requests=4, leaf_tokens=4, **scheduler),  # type: ignore[arg-type]
    )


def run(load: Workload, system: System, config: Config, machine: Hardware, **options: object) -> RunResult:
    return simulate(load, system, config, machine, COST, COST, **options)  # type: ignore[arg-type]


@st.composite
def cells(draw: st.DrawFn) -> tuple[Workload, System, Config, Hardware, dict[str, int]]:
    """From comfortable to a pool that a few requests fill, arrivals alone and in crowds."""
    times = draw(st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3]), min_size=1, max_size=40))
    prompts = st.one_of(st.integers(8, 16), st.integers(1, 150))
    shapes, now_s = [], 0.0
    for gap_s in times:
        now_s += gap_s
        shapes.append((now_s, draw(prompts), draw(st.integers(1, 120))))
    system = draw(st.sampled_from([*SYSTEMS.values(), NO_PREFETCH]))
    config = small_config(
        starvation_after_s=draw(st.sampled_from([0.05, 0.5, 5.0])),
        max_batch_share=draw(st.sampled_from([0.1, 0.4, 1.0])),
        join_window=draw(st.sampled_from([0.0, 0.25, 1.0])),
    )
    machine = hardware(
        kv_tokens=draw(st.sampled_from([640, 1200, 4000])),
        pool_tokens=draw(st.sampled_from([700, 1500, 20000])),
        block_size=draw(st.sampled_from([1, 4, 16])),
    )
    counts = {"prefill_instances": draw(st.integers(1, 3)), "decode_instances": draw(st.integers(1, 3))}
    return workload(*shapes), system, config, machine, counts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cells())
def test_every_request_ends_whole_and_a_leap_is_its_steps(
    cell: tuple[Workload, System, Config, Hardware, dict[str, int]],
) -> None:
    load, system, config, machine, counts = cell
    leapt = run(load, system, config, machine, **counts)
    for request in leapt.requests:
        times_s = list(request.token_s)
        assert bool(request.refused) != (len(times_s) == request.arrival.output_tokens)
        assert times_s == sorted(times_s)
        assert not times_s or times_s[0] > request.arrival.arrival_s
    served = [request for request in leapt.requests if not request.refused]
    if not leapt.counters.get("dropped_requests"):
        assert sum(leapt.steps.decodes) == sum(len(request.token_s) - 1 for request in served)
        assert sum(leapt.steps.prefill_tokens) == sum(request.arrival.input_tokens for request in served)
    stepped = run(load, system, config, machine, **counts, leap=False)
    assert pickle.dumps(stepped) == pickle.dumps(leapt)
