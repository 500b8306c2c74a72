"""Ranks in step: nothing is lost, no rank holds more than it can, a leap equals its iterations, and time is a max."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.config import Config, DecodeConfig, PrefillConfig
from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.ranks.names import PLACEMENTS
from alignedserve.scheduler.ranks.rank_scheduler import RankScheduler
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.ranks.run import simulate_ranks
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.report.summary import Objectives, measure
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost

COST = LinearStepCost()
CONFIG = Config(
    prefill=PrefillConfig(token_budget=64, max_requests=4, queue_tokens=256),
    decode=DecodeConfig(max_running=6, join_iterations=4),
)
MACHINE = Hardware(kv_tokens=640, kv_bytes_per_token=1 << 16, pool_tokens=4000, block_size=4)


def workload(*shapes: tuple[float, int, int]) -> Workload:
    return Workload(tuple(Arrival(f"r{number}", *shape) for number, shape in enumerate(shapes)))


def run(load: Workload, placement: str, ranks: int, machine: Hardware = MACHINE, **options: object) -> RunResult:
    return simulate_ranks(load, placement, CONFIG, machine, COST, COST, ranks=ranks, **options)  # type: ignore[arg-type]


def crowd(requests: int, gap_s: float = 0.0) -> Workload:
    return workload(*((n * gap_s, 9 + 37 * n % 150, 5 + 53 * n % 90) for n in range(requests)))


@st.composite
def cells(draw: st.DrawFn) -> tuple[Workload, str, int, Hardware, dict[str, int]]:
    times = draw(st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.02]), min_size=1, max_size=50))
    prompts = st.one_of(st.integers(8, 16), st.integers(1, 150))
    shapes, now_s = [], 0.0
    for gap_s in times:
        now_s += gap_s
        shapes.append((now_s, draw(prompts), draw(st.integers(1, 120))))
    machine = replace(
        MACHINE,
        kv_tokens=draw(st.sampled_from([320, 480, 4000])),
        pool_tokens=draw(st.sampled_from([400, 700, 20000])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        message_s=draw(st.sampled_from([200e-6, 0.01])),
    )
    options = {"prefill_instances": draw(st.integers(1, 3)), "decode_instances": draw(st.integers(1, 2))}
    return workload(*shapes), draw(st.sampled_from(list(PLACEMENTS))), draw(st.integers(1, 5)), machine, options


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cells())
def test_every_request_ends_whole_and_a_leap_is_its_iterations(
    cell: tuple[Workload, str, int, Hardware, dict[str, int]],
) -> None:
    load, placement, ranks, machine, options = cell
    leapt = run(load, placement, ranks, machine, **options)
    for request in leapt.requests:
        times_s = list(request.token_s)
        assert bool(request.refused) != (len(times_s) == request.arrival.output_tokens)
        assert times_s == sorted(times_s)
    served = [request for request in leapt.requests if not request.refused]
    dropped = leapt.counters.get("dropped_requests", 0)  # each is prefilled again, which generates a token
    assert sum(leapt.steps.decodes) == sum(len(request.token_s) - 1 for request in served) - dropped
    prompts = sum(request.arrival.input_tokens for request in served)
    again = sum(leapt.steps.prefill_tokens) - prompts
    assert again > dropped if dropped else again == 0
    stepped = run(load, placement, ranks, machine, **options, leap=False)
    assert pickle.dumps(stepped) == pickle.dumps(leapt)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_rank_holds_more_than_its_cache_and_slots(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[tuple[int, int]] = []
    plan = RankScheduler.plan

    def watched(self: RankScheduler, now_s: float) -> object:
        made = plan(self, now_s)
        self.check_integrity()
        most.append((len(made.run), self._allocator.owned_blocks))
        return made

    monkeypatch.setattr(RankScheduler, "plan", watched)
    found = run(crowd(120), placement, 3, replace(MACHINE, kv_tokens=480))
    assert all(len(request.token_s) == request.arrival.output_tokens for request in found.requests)
    assert 0 < max(running for running, _ in most) <= CONFIG.decode.max_running
    assert 0 < max(blocks for _, blocks in most) <= 480 // MACHINE.block_size


@pytest.mark.parametrize("placement", ["round-robin", "least-requests", "least-tokens"])
def test_an_iteration_takes_as_long_as_its_slowest_rank(placement: str) -> None:
    """Two requests on two ranks: each iteration is that of the longer one, and the other waits for it."""
    found = run(workload((0.0, 100, 20), (0.0, 20, 20)), placement, 2, prefill_instances=2)
    assert found.barriers is not None
    both = [n for n, start in enumerate(found.barriers.start_s) if start > found.barriers.last_join_s][:10]
    seconds = [found.barriers.seconds[n] for n in both]
    others = [found.barriers.own_s[n] - found.barriers.seconds[n] for n in both]
    longest = [found.steps.longest[found.steps.start_s.index(found.barriers.start_s[n])] for n in both]
    assert seconds == [COST.step_s((), [length]) for length in longest]
    assert longest[0] >= 100
    begun = next(length for length in range(20, 40) if others[0] == pytest.approx(COST.step_s((), [length]), abs=1e-9))
    assert others == pytest.approx([COST.step_s((), [begun + n]) for n in range(len(both))], abs=1e-9)
    metrics = measure(found, Objectives()).metrics
    whole = 2 * sum(found.barriers.seconds)
    assert metrics["idle_share_run"] == pytest.approx(1 - sum(found.barriers.own_s) / whole)


def test_the_shared_pool_keeps_ranks_in_step() -> None:
    idle = {}
    for placement in ("round-robin", "shared-pool"):
        metrics = measure(run(crowd(400, 0.002), placement, 4, prefill_instances=8), Objectives()).metrics
        idle[placement] = metrics["idle_share"]
    assert idle["shared-pool"] < idle["round-robin"] / 2


def test_the_shared_pool_keeps_ranks_in_step_where_caches_are_full() -> None:
    """Long and short requests, all at time zero, of which the caches hold a third."""
    cost = load_step_cost("a100-opt-13b")
    machine = replace(MACHINE, kv_tokens=24_000, pool_tokens=400_000, block_size=16)
    load = workload(
        *((0.0, 3000 + 77 * n % 3000 if n % 7 == 0 else 100 + 53 * n % 700, 60 + 31 * n % 90) for n in range(400))
    )
    idle, tokens = {}, {}
    for placement in ("round-robin", "shared-pool"):
        found = simulate_ranks(load, placement, Config(), machine, cost, cost, ranks=4, prefill_instances=12)
        assert all(len(request.token_s) == request.arrival.output_tokens for request in found.requests)
        metrics = measure(found, Objectives()).metrics
        idle[placement], tokens[placement] = metrics["idle_share"], metrics["filled_tokens_per_s"]
    assert idle["shared-pool"] < idle["round-robin"] / 2
    assert tokens["shared-pool"] > tokens["round-robin"]


def test_a_request_stays_on_its_rank_unless_the_pool_is_shared() -> None:
    """Only the shared pool copies from rank to rank."""
    moved = {name: run(crowd(200, 0.01), name, 4, prefill_instances=4).barriers.moved_bytes for name in PLACEMENTS}
    assert moved.pop("shared-pool") > 0
    assert set(moved.values()) == {0}


def test_a_preempted_request_is_counted_and_goes_on() -> None:
    machine = replace(MACHINE, kv_tokens=320)
    for placement in PLACEMENTS:
        found = run(workload(*((0.0, 60, 110) for _ in range(12))), placement, 2, machine)
        assert found.counters["evictions"] > 0
        assert found.barriers.evicted_bytes > 0
        assert all(len(request.token_s) == 110 for request in found.requests)


FULL_POOL = [(0.001, 34, 96), (0.002, 40, 37), (0.022, 65, 73), (0.022, 135, 97), (0.023, 94, 104), (0.023, 94, 2)]
FULL_POOL += [(0.023, 25, 93), (0.043, 96, 94), (0.043, 88, 87)]
FULL_AGAIN = [(0.02, 121, 38), (0.02, 134, 13), (0.04, 100, 24), (0.04, 115, 42), (0.04, 78, 81), (0.04, 59, 58)]
FULL_AGAIN += [(0.04, 129, 107), (0.04, 22, 103), (0.04, 29, 1), (0.041, 130, 114), (0.061, 90, 85)]


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize(
    ("placement", "shapes", "prefills"), [("least-tokens", FULL_POOL, 1), ("balance-route", FULL_AGAIN, 3)]
)
def test_evicted_requests_that_find_the_pool_full_are_computed_again(
    placement: str, shapes: list[tuple[float, int, int]], prefills: int, leap: bool
) -> None:
    """Otherwise evicted requests wait for the pool, and those in the pool for the rank."""
    machine = replace(MACHINE, kv_tokens=480, pool_tokens=400, block_size=1)
    found = run(workload(*shapes), placement, 1, machine, prefill_instances=prefills, leap=leap)
    assert 0 < found.counters["dropped_requests"] <= found.counters["evictions"]
    assert [len(request.token_s) for request in found.requests] == [tokens for _, _, tokens in shapes]
    assert sum(found.steps.prefill_tokens) > sum(prompt for _, prompt, _ in shapes)


def test_a_request_of_one_token_ends_with_its_prefill() -> None:
    found = run(workload((0.0, 10, 1), (0.0, 20, 5)), "shared-pool", 2)
    assert [len(request.token_s) for request in found.requests] == [1, 5]
    assert sum(found.steps.decodes) == 4


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_request_as_large_as_a_cache_runs_alone_in_spite_of_a_watermark(placement: str) -> None:
    config = replace(CONFIG, decode=replace(CONFIG.decode, watermark_blocks=20))
    load = workload((0.0, 636, 4), (0.0, 20, 30), (0.0, 30, 30))
    found = simulate_ranks(load, placement, config, MACHINE, COST, COST, ranks=1)
    assert [len(request.token_s) for request in found.requests] == [4, 30, 30]


def test_what_no_store_holds_is_refused() -> None:
    found = run(workload((0.0, 600, 200), (0.0, 10, 10)), "shared-pool", 2)
    assert [bool(request.refused) for request in found.requests] == [True, False]
    with pytest.raises(ConfigError, match="no request fits"):
        run(workload((0.0, 1, 1)), "shared-pool", 2, replace(MACHINE, kv_tokens=0))
