"""Colocated systems in virtual time: nothing is lost, leaping equals stepping, small cases match hand calculations."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.errors import AccountingError, ConfigError
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.systems import SYSTEMS, System, Topology, resolve, scheduler_class
from alignedserve.simulator.colocated import ROUTINGS, simulate_colocated
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.workload import Arrival, Workload

COLOCATED = [name for name, system in SYSTEMS.items() if system.topology is Topology.COLOCATED]
HARDWARE = Hardware(kv_tokens=1024, kv_bytes_per_token=1, pool_tokens=0)


class LinearCost(StepCost):
    """10 ms a pass, 1 ms a prompt token, 1 µs a token read, and half of the padding to the longest."""

    def step_s(self, chunks, lengths):
        spread = max(lengths) * len(lengths) - sum(lengths) if lengths else 0
        prompt = sum(chunk.tokens * (1000 + chunk.cached_tokens) for chunk in chunks)
        return 0.01 + 1e-6 * (prompt + sum(lengths) + 0.5 * spread) if chunks or lengths else 0.0

    def run_s(self, lengths, steps):
        return [self.step_s((), [length + step for length in lengths]) for step in range(steps)]

    def balanced_step_s(self, chunks, lengths):
        return self.step_s(chunks, [sum(lengths) / len(lengths)] * len(lengths)) if lengths else self.step_s(chunks, ())

    def describe(self):
        return {"name": "linear"}


def simulate(workload, name, options=None, hardware=HARDWARE, **others):
    return simulate_colocated(workload, resolve(name), options or {}, hardware, LinearCost(), **others)


def workload_of(*requests):
    return Workload(tuple(Arrival(f"r{i}", *request) for i, request in enumerate(requests)))


def frozen(result):
    """Every float to the last bit."""
    columns = [getattr(result.steps, name).tobytes() for name in result.steps.__slots__]
    requests = [
        (one.arrival, one.token_s.tobytes(), one.refused, one.preemptions, one.stages_s) for one in result.requests
    ]
    return columns, requests, result.end_s, result.counters, result.configuration


arrivals = st.builds(
    lambda found, clients: replace(workload_of(*sorted(found)), clients=clients),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=25),
    st.sampled_from([0, 0, 0, 1, 4]),
)
small = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.integers(1, 6),
        "max_batch": st.integers(1, 6),
        "n_workers": st.integers(1, 3),
        "max_num_batched_tokens": st.integers(8, 300),
        "token_budget": st.integers(8, 300),
        "async_scheduling": st.booleans(),
        "reserve_full_isl": st.booleans(),
        "prefix_caching": st.booleans(),
        "prefix_hit_share": st.sampled_from([0.0, 0.3, 1.0]),
        "dynamic": st.booleans(),
        "chunk_high": st.just(256),
        "chunk_low": st.just(32),
        "chunk_tokens": st.just(300),
        "watermark": st.sampled_from([0.0, 0.1]),
    },
)


@pytest.mark.parametrize("name", COLOCATED)
@settings(max_examples=30, deadline=None)
@given(arrivals, small, st.sampled_from([160, 512, 4096]), st.integers(1, 3), st.sampled_from(ROUTINGS), st.booleans())
def test_everything_is_kept_and_a_leap_is_what_stepping_gives(
    name, workload, changes, kv_tokens, instances, routing, pinned
):
    options = {key: value for key, value in changes.items() if key in SYSTEMS[name].options}
    if "max_num_seqs" in SYSTEMS[name].options:
        options.setdefault("max_num_seqs", 6)
    if not options.get("prefix_caching", True):
        options.pop("prefix_hit_share", None)
    if not options.keys().isdisjoint({"chunk_high", "chunk_low"}):
        options |= {"chunk_high": 256, "chunk_low": 32}  # one alone would conflict with the other's default
    hardware = replace(HARDWARE, kv_tokens=kv_tokens, host_overhead_s=0.001)
    runs = [
        simulate(
            workload, name, options, hardware, instances=instances, routing=routing, leap=leap, pinned_lengths=pinned
        )
        for leap in (True, False, True)
    ]
    assert frozen(runs[0]) == frozen(runs[1]) == frozen(runs[2])
    steps = runs[0].steps
    for one in runs[0].requests:
        fits = one.arrival.input_tokens + one.arrival.output_tokens <= kv_tokens
        assert bool(one.refused) is not fits
        assert len(one.token_s) == (one.arrival.output_tokens if fits else 0)
        assert list(one.token_s) == sorted(set(one.token_s))
        assert all(at > one.arrival.arrival_s for at in one.token_s)
    assert len({len(getattr(steps, column)) for column in steps.__slots__}) == 1
    assert not (pinned and name == "vllm" and runs[0].counters["unused_tokens"])
    decoded = sum(max(len(one.token_s) - 1, 0) for one in runs[0].requests)
    preemptions = sum(one.preemptions for one in runs[0].requests)
    assert decoded - preemptions <= sum(steps.decodes) <= decoded + runs[0].counters["unused_tokens"] + preemptions
    prompts = sum(one.arrival.input_tokens for one in runs[0].requests if one.token_s)
    if not options.get("prefix_hit_share"):
        assert sum(steps.prefill_tokens) >= prompts
        assert preemptions or sum(steps.prefill_tokens) == prompts


@pytest.mark.parametrize("name", COLOCATED)
def test_one_request_alone_takes_its_passes(name):
    result = simulate(workload_of((1.0, 100, 3)), name)
    one = result.requests[0]
    expected = [1.11, 1.11 + 0.0101, 1.11 + 0.0101 + 0.010101]
    assert list(one.token_s) == pytest.approx(expected, abs=1e-9)
    assert one.stages_s == {"queue_s": 0.0}


@pytest.mark.parametrize("instances", [1, 2])
def test_a_closed_loop_sends_the_next_request_when_one_has_ended(instances):
    requests = [(0.0, 10 + 3 * number, 2 + number % 4) for number in range(9)]
    workload = replace(workload_of(*requests, (0.0, 2000, 1), (0.0, 5, 5)), clients=3)
    result = simulate(workload, "vllm", instances=instances)
    ends_s = sorted(one.token_s[-1] if one.token_s else one.arrival.arrival_s for one in result.requests)
    assert [one.refused != "" for one in result.requests] == [False] * 9 + [True, False]
    assert [one.arrival.arrival_s for one in result.requests] == [0.0, 0.0, 0.0, *ends_s[:8]]


def test_a_machine_of_slow_passes():
    slow = replace(HARDWARE, decode_slowdown=2.0, decode_slowdown_beside=9.0, prefill_slowdown=9.0)
    workload = workload_of((0.0, 30, 5))
    usual, slowed = (simulate(workload, "vllm", hardware=machine).requests[0].token_s for machine in (HARDWARE, slow))
    assert list(slowed) == pytest.approx([2.0 * time_s for time_s in usual])
    shared = simulate(workload, "vllm", hardware=slow, instances=2).requests[0].token_s
    assert list(shared) == pytest.approx([9.0 * time_s for time_s in usual])


def test_planning_ahead_makes_a_request_that_comes_in_between_wait_for_a_pass_more():
    workload = workload_of((0.0, 100, 50), (0.115, 10, 1))
    first = {
        ahead: simulate(workload, "vllm", {"async_scheduling": ahead}).requests[1].token_s[0] for ahead in (False, True)
    }
    # passes end at 0.11, 0.1201, 0.1302, ..; the prompt of ten takes 10 ms beside a decode
    assert first[False] == pytest.approx(0.1201 + 0.020101)
    assert first[True] == pytest.approx(0.1201 + 0.010101 + 0.020102)


def test_a_pipeline_of_two_workers_runs_two_batches_at_once():
    workload = workload_of((0.0, 10, 200), (0.0, 10, 200))
    alone = simulate(workload, "orca", {"max_batch": 1, "n_workers": 1})
    piped = simulate(workload, "orca", {"max_batch": 1, "n_workers": 2})
    assert piped.end_s == pytest.approx(alone.end_s / 2, rel=0.01)


def test_routing_spreads_requests():
    workload = workload_of(*[(0.0, 100, 20)] * 6)
    for routing in ("least-loaded", "round-robin"):
        result = simulate(workload, "vllm", instances=3, routing=routing)
        assert len({one.token_s.tobytes() for one in result.requests}) == 1  # two on each: no request waits longer
        assert result.instances == ("colocated-0", "colocated-1", "colocated-2")
    random = [simulate(workload, "vllm", instances=3, routing="random", seed=seed) for seed in (1, 1, 2, 3)]
    assert frozen(random[0]) == frozen(random[1])
    assert len({one.end_s for one in random}) > 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vllm", {"routing": "nearest"}, "choose one of: least-loaded"),
        ("vllm", {"instances": 0}, "at least one instance"),
        ("vllm", {"options": {"token_budget": 1}}, "has no option 'token_budget'"),
        ("fcfs", {}, "disaggregated"),
    ],
)
def test_what_cannot_be_simulated_is_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        simulate(workload_of((0.0, 1, 1)), name, **arguments)


def test_no_request_comes():
    assert simulate(Workload(()), "vllm").requests == []


def test_a_system_of_ones_own_runs_like_the_others(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    workload = workload_of((0.0, 100, 30), (0.15, 200, 30), (0.15, 50, 30))
    name = "examples.one_prompt_at_a_time:OnePromptAtATime"
    runs = [simulate(workload, name, {"max_num_seqs": 8}, leap=leap) for leap in (True, False)]
    assert frozen(runs[0]) == frozen(runs[1])
    assert [len(one.token_s) for one in runs[0].requests] == [30, 30, 30]
    assert sorted(runs[0].steps.prefill_tokens)[-4:] == [0, 50, 100, 200]  # alone, each of them


class Lazy(scheduler_class(SYSTEMS["vllm"])):
    """Never runs a prompt of more than ten tokens."""

    OPTIONS: ClassVar = SYSTEMS["vllm"].options

    def _fill(self, draft, now_s):
        if all(member.left <= 10 for member in self._waiting.values()):
            super()._fill(draft, now_s)


def test_a_system_that_forgets_requests_is_found_out():
    system = System("lazy", Topology.COLOCATED, f"{__name__}:Lazy", "", {}, Lazy.OPTIONS)
    sys.modules.setdefault(__name__, SimpleNamespace(Lazy=Lazy))
    assert simulate_colocated(workload_of((0.0, 10, 2)), system, {}, HARDWARE, LinearCost()).requests[0].token_s
    with pytest.raises(AccountingError, match="'lazy' plans no more passes"):
        simulate_colocated(workload_of((0.0, 11, 2)), system, {}, HARDWARE, LinearCost())
