"""The simulated prefix cache: what it finds, what it gives up, and what that saves."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config import Config, KvPoolConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.systems import CACHE_OPTIONS, SYSTEMS, System, Topology
from alignedserve.simulator.colocated import simulate_colocated
from alignedserve.simulator.disaggregated import as_run, simulate
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.prefix.cache import Found, SimulatedPrefixes
from alignedserve.simulator.report.results import RunResult
from alignedserve.simulator.traces.answers import with_answers
from alignedserve.simulator.traces.trace import Row
from alignedserve.simulator.workload import Arrival, Workload
from alignedserve.testing.linear_cost import LinearStepCost

BLOCK = 64  # of the trace, in tokens
COST = LinearStepCost()
BASELINES = ("mooncake-least-loaded", "mooncake-random")
FCFS = System("fcfs", Topology.DISAGGREGATED, "", "")


def arrival(name: str, *blocks: int, tokens: int = 0, at_s: float = 0.0, outputs: int = 4) -> Arrival:
    return Arrival(name, at_s, tokens or len(blocks) * BLOCK, outputs, blocks=blocks)


def prefixes(
    pool_blocks: int = 64, policy: str = "lru", clock: Callable[[], float] = float, disk_blocks: int = 0
) -> SimulatedPrefixes:
    return SimulatedPrefixes(policy, lambda tokens: 1e-3 * tokens, clock, BLOCK, pool_blocks, 16, disk_blocks)


def test_a_prompt_finds_what_an_earlier_one_left() -> None:
    found = prefixes()
    first, longer, other = arrival("a", 1, 2, 3), arrival("b", 1, 2, 9, 8), arrival("c", 5, 6)
    assert found.hold(RequestKey("a"), first) == Found(0)
    found.commit(RequestKey("a"), first, first.input_tokens)
    assert found.match(longer) == 2 * BLOCK, "it is there while its request still has it"
    assert found.match(arrival("d", 1, 2, 3)) == 3 * BLOCK - 1, "the last token is always computed"
    assert found.match(arrival("e", 1, 2, 3, tokens=2 * BLOCK + 5)) == 2 * BLOCK, "only full blocks"
    assert found.match(other) == 0
    found.release(RequestKey("a"))
    assert found.hold(RequestKey("b"), longer) == Found(2 * BLOCK)
    assert found.hit_tokens == 2 * BLOCK
    found.check_integrity()


def test_what_is_used_least_recently_goes_first_and_never_what_is_held() -> None:
    found = prefixes(pool_blocks=16)  # four blocks of the trace
    for name, blocks in ("a", (1, 2)), ("b", (3, 4)):
        found.hold(RequestKey(name), arrival(name, *blocks))
        found.commit(RequestKey(name), arrival(name, *blocks), BLOCK * len(blocks))
    found.release(RequestKey("a"))
    found.release(RequestKey("b"))
    assert found.hold(RequestKey("c"), arrival("c", 1, 2, 7)) == Found(2 * BLOCK)  # now 3 and 4 are older
    found.release(RequestKey("c"))
    found.trim(8)
    assert [found.match(arrival("x", *ids, 99)) // BLOCK for ids in ((1, 2), (3, 4))] == [2, 0]
    found.hold(RequestKey("d"), arrival("d", 1, 2))
    found.trim(0)
    assert found.match(arrival("x", 1, 2, 99)) == 2 * BLOCK
    found.check_integrity()


def test_a_conversation_does_not_make_its_own_blocks_popular() -> None:
    found = prefixes(pool_blocks=40, policy="value")  # ten blocks of the trace
    for turn in range(1, 7):
        serve(found, arrival(f"chat-{turn}", *range(1, 1 + turn)))
    for name, own in ("a", 52), ("b", 53):
        serve(found, arrival(name, 50, 51, own))
    found.trim(8)
    kept = [found.match(arrival("x", *ids, 99)) // BLOCK for ids in (range(1, 7), (50, 51))]
    assert kept == [0, 2], "two conversations have used 50 and 51"


def test_conversations_that_are_likely_to_go_on_are_kept() -> None:
    """Here a first turn seldom goes on, and a second one always does."""
    now_s, number = 0.0, 0
    found = prefixes(pool_blocks=400, policy="value", clock=lambda: now_s)

    def turn(*blocks: int) -> None:
        nonlocal now_s, number
        now_s, number = now_s + 0.1, number + 1
        serve(found, arrival(str(number), *blocks))

    for first in range(0, 10_000, 100):
        for single in range(first + 10, first + 90, 10):
            turn(single, single + 1)
        for length in range(2, 6):
            turn(*range(first, first + length))
        found.trim(100)
    turn(20_000, 20_001)
    turn(20_000, 20_001, 20_002)
    turn(30_000, 30_001)
    found.trim(12)
    assert [found.match(arrival("x", *ids, 99)) // BLOCK for ids in ((20_000, 20_001, 20_002), (30_000,))] == [3, 0]


def serve(found: SimulatedPrefixes, one: Arrival) -> None:
    key = RequestKey(one.request_id)
    found.hold(key, one)
    found.commit(key, one, one.input_tokens)
    found.release(key, ended=True)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(["lru", "value"]), st.sampled_from([0, 24]))
def test_books_are_right_whatever_happens(seed: int, policy: str, disk_blocks: int) -> None:
    draw = random.Random(seed)
    found, held = prefixes(48, policy, disk_blocks=disk_blocks), {}
    for number in range(60):
        if held and draw.random() < 0.5:
            found.release(held.pop(draw.choice(sorted(held))))
        else:
            key, chain = RequestKey(str(number)), [draw.randrange(3)]
            while draw.random() < 0.7:
                chain.append(chain[-1] * 3 + 3 + draw.randrange(3))  # a tree: an id has one parent
            one = arrival(str(number), *chain)
            assert found.hold(key, one).tokens <= one.input_tokens - 1
            if draw.random() < 0.8:
                found.commit(key, one, one.input_tokens)
            held[str(number)] = key
            if draw.random() < 0.3:
                found.keep(arrival(f"{number}-kept", *chain, 999 - number), (len(chain) + 1) * BLOCK)
        if draw.random() < 0.5:  # else memory may stay full
            found.trim(draw.randrange(49))
        found.check_integrity()


def run(workload: Workload, cache: bool, pool_tokens: int = 40_000) -> RunResult:
    hardware = Hardware(kv_tokens=8000, kv_bytes_per_token=1 << 12, pool_tokens=pool_tokens, block_size=16)
    return simulate(workload, FCFS, Config(kv_pool=KvPoolConfig(prefix_cache=cache)), hardware, COST, COST)


def first_token_s(result: RunResult) -> float:
    return statistics.mean(one.token_s[0] - one.arrival.arrival_s for one in result.requests)


def conversations(count: int, turns: int) -> Workload:
    """Each turn has the prompt of the one before; all begin with the same eight blocks."""
    found = []
    for conversation in range(count):
        for turn in range(turns):
            own = [1000 * (conversation + 1) + block for block in range(turn)]
            found.append(arrival(f"{conversation}-{turn}", *range(8), *own, at_s=turn * 30.0 + conversation * 0.5))
    return Workload(tuple(sorted(found, key=lambda one: one.arrival_s)), block_tokens=BLOCK)


def test_later_turns_are_computed_from_where_they_differ() -> None:
    asked = conversations(5, 4)
    without, cached = run(asked, False), run(asked, True)
    assert "prefix_hit_tokens" not in without.counters
    prompts = sum(one.input_tokens for one in asked.arrivals)
    assert cached.counters["prefix_queried_tokens"] == prompts
    ideal = prompts - (8 + 5 * 3) * BLOCK  # each distinct block is computed once
    last_tokens = sum(
        one.blocks in {other.blocks for other in asked.arrivals[:n]} for n, one in enumerate(asked.arrivals)
    )
    assert cached.counters["prefix_hit_tokens"] == ideal - last_tokens
    assert first_token_s(cached) < 0.6 * first_token_s(without)
    assert [len(one.token_s) for one in cached.requests] == [one.output_tokens for one in asked.arrivals]


@pytest.mark.parametrize("pool_tokens", [1000, 1200])
def test_a_small_pool_serves_all_and_hits_less(pool_tokens: int) -> None:
    asked = conversations(5, 4)
    small = run(asked, True, pool_tokens)
    assert all(len(one.token_s) == one.arrival.output_tokens for one in small.requests)
    assert small.counters["prefix_hit_tokens"] < run(asked, True).counters["prefix_hit_tokens"]


def test_without_names_of_blocks_nothing_changes() -> None:
    asked = Workload(tuple(Arrival(f"r{n}", 0.1 * n, 300, 5) for n in range(20)))
    assert run(asked, True).requests == run(asked, False).requests


def test_what_is_given_up_goes_to_disk_and_comes_back() -> None:
    found = prefixes(32, disk_blocks=8)  # 8 and 2 blocks of the trace
    first = arrival("a", 1, 2, 3)
    found.commit(RequestKey("a"), first, first.input_tokens)
    found.release(RequestKey("a"))
    found.trim(4)
    assert found.disk_written_tokens == 2 * BLOCK
    assert found.hold(RequestKey("b"), arrival("b", 1, 2, 3, 4)) == Found(3 * BLOCK, 2 * BLOCK)
    found.check_integrity()
    found.release(RequestKey("b"))
    found.trim(0)
    assert found.match(arrival("c", 1, 2, 3, 9)) == 2 * BLOCK, "the disk has room for two; the deepest came first"
    found.check_nothing_is_held()


def test_a_full_cache_gives_up_what_goes_next_for_what_is_on_disk() -> None:
    found = prefixes(16, disk_blocks=16)  # 4 and 4 blocks of the trace
    for name, blocks in ("a", (1, 2, 3, 4)), ("b", (5, 6, 7, 8)):
        serve(found, arrival(name, *blocks))
    assert found.hold(RequestKey("c"), arrival("c", 1, 2, 3, 4, 9)) == Found(4 * BLOCK, 4 * BLOCK)
    found.check_integrity()
    assert found.hold(RequestKey("d"), arrival("d", 5, 6)) == Found(0), "all of memory is held"
    assert found.match(arrival("e", 5, 6, 7, 8, 9)) == 4 * BLOCK, "and the disk still has it"
    found.keep(arrival("f", 7), BLOCK)
    found.release(RequestKey("c"))
    found.keep(arrival("g", 11, 12), 2 * BLOCK)
    assert found.match(arrival("h", 11, 12, 13)) == 2 * BLOCK
    found.check_integrity()


@pytest.mark.parametrize("name", ["fcfs", "mooncake", "memserve-3"])
def test_prompts_that_memory_cannot_hold_come_from_disk(name: str) -> None:
    """Each of 40 prompts comes four times; memory has room for half of them, the disk for all."""
    system = SYSTEMS.get(name, FCFS)
    rows = [
        arrival(f"{turn}-{n}", *range(1000 * n, 1000 * n + 10), at_s=5.0 * (40 * turn + n))
        for turn in range(4)
        for n in range(40)
    ]
    hardware = Hardware(8000, 1 << 12, 20 * 10 * BLOCK, 16, disk_tokens=41 * 10 * BLOCK)
    config = as_run(Config(kv_pool=KvPoolConfig(prefix_cache=True)), system, 1, 1, False)
    options = system.options or CACHE_OPTIONS
    workload = Workload(tuple(rows), block_tokens=BLOCK)
    counters = simulate(workload, system, config, hardware, COST, COST, options=options).counters
    assert counters["prefix_disk_hit_tokens"] > 0.5 * counters["prefix_ideal_tokens"]
    assert counters["prefix_hit_tokens"] > 0.95 * counters["prefix_ideal_tokens"]


def test_answers_are_found_by_the_next_turn() -> None:
    found = prefixes()
    first = Arrival("a", 0.0, 2 * BLOCK + 10, 2 * BLOCK, blocks=(1, 2, 90), answer_blocks=(3, 4))
    found.keep(first, first.input_tokens + first.output_tokens - 1)
    assert found.match(arrival("b", 1, 2, 3, 4, 5)) == 4 * BLOCK
    found.check_nothing_is_held()


def test_the_answers_blocks_are_those_that_all_later_prompts_go_on_with() -> None:
    rows = (
        Row(2 * BLOCK + 10, BLOCK, 0.0, blocks=(1, 2, 90)),  # the next turn goes on with 3
        Row(BLOCK, BLOCK + 1, 1.0, blocks=(7,)),  # two prompts go on from it, so neither is its next turn
        Row(4 * BLOCK, BLOCK, 2.0, blocks=(1, 2, 3, 4)),
        *(Row(2 * BLOCK, 1, 3.0, blocks=(7, block)) for block in (8, 9)),
    )
    found, continued = with_answers(rows, BLOCK)
    assert continued == 1
    assert [row.answer_blocks for row in found[:3]] == [(3,), (-1,), ()]
    assert found[3:] == rows[3:]


@pytest.mark.parametrize("name", [name for name, one in SYSTEMS.items() if one.settings.get("kv_pool.prefix_cache")])
@pytest.mark.parametrize("pool_tokens", [1200, 40_000])
def test_nodes_share_what_they_cache_and_nothing_is_lost(name: str, pool_tokens: int) -> None:
    """`Cell.check_nothing_is_left` recounts all stores at the end."""
    asked = conversations(8, 4)
    hardware = Hardware(8000, 1 << 12, pool_tokens, 16, nodes=2, disk_tokens=600)
    system = SYSTEMS[name]
    config = as_run(Config(), system, 2, 2, False)
    found = simulate(
        asked, system, config, hardware, COST, COST, prefill_instances=2, decode_instances=2, options=system.options
    )
    assert all(len(one.token_s) == one.arrival.output_tokens for one in found.requests)
    counters = found.counters
    assert 0 < counters["prefix_hit_tokens"] <= counters["prefix_ideal_tokens"] < counters["prefix_queried_tokens"]
    if name == "mooncake" or name in BASELINES:
        assert (counters.get("prefix_copied_tokens", 0) > 0) == (name == "mooncake")
    if pool_tokens > 2000 and name == "mooncake":
        assert counters["prefix_hit_tokens"] > 0.95 * counters["prefix_ideal_tokens"]


def test_prompts_of_one_prefix_at_once_compute_it_once() -> None:
    asked = Workload(tuple(arrival(f"r{n}", *range(20), 100 + n) for n in range(6)), block_tokens=BLOCK)
    found = run(asked, True).counters
    assert found["prefix_waited_prompts"] == 5
    assert found["prefix_hit_tokens"] == 5 * 20 * BLOCK == found["prefix_ideal_tokens"]


def test_batchllm_computes_a_shared_prefix_once_and_shorter_groups_first() -> None:
    asked = [arrival(f"long-{n}", *range(40), 100 + n) for n in range(4)]
    asked += [arrival(f"short-{n}", 50, 51, 200 + n) for n in range(4)]
    hardware = Hardware(kv_tokens=8000, kv_bytes_per_token=1 << 12, pool_tokens=1600, block_size=16)
    workload = Workload(tuple(asked), block_tokens=BLOCK)
    found = simulate_colocated(workload, SYSTEMS["batchllm"], {"token_budget": 256}, hardware, COST)
    hits = found.counters["prefix_hit_tokens"]
    assert hits == 3 * 40 * BLOCK + 3 * 2 * BLOCK == found.counters["prefix_ideal_tokens"]
    first_s = {one.arrival.request_id: one.token_s[0] for one in found.requests}
    assert max(first_s[f"short-{n}"] for n in range(4)) < min(first_s[f"long-{n}"] for n in range(4))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([640, 960, 4000]))
def test_batchllm_loses_nothing_where_memory_is_short(seed: int, kv_tokens: int) -> None:
    draw = random.Random(seed)
    asked = []
    for number in range(draw.randrange(1, 16)):
        blocks = [draw.randrange(2)]
        while draw.random() < 0.6 and len(blocks) < 4:
            blocks.append(blocks[-1] * 2 + 2 + draw.randrange(2))
        tokens = len(blocks) * BLOCK + draw.randrange(BLOCK)
        asked.append(arrival(str(number), *blocks, tokens=tokens, at_s=0.0, outputs=draw.randrange(1, 200)))
    hardware = Hardware(kv_tokens=kv_tokens, kv_bytes_per_token=1 << 12, pool_tokens=1600, block_size=16)
    workload = Workload(tuple(asked), block_tokens=BLOCK)
    leapt = simulate_colocated(workload, SYSTEMS["batchllm"], {}, hardware, COST)
    assert all(len(one.token_s) == one.arrival.output_tokens for one in leapt.requests)
    assert leapt.counters.get("prefix_hit_tokens", 0) <= leapt.counters.get("prefix_ideal_tokens", 0)
    stepped = simulate_colocated(workload, SYSTEMS["batchllm"], {}, hardware, COST, leap=False)
    assert stepped.requests == leapt.requests
