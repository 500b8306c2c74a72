"""`decode.max_running` 0: from the cache's size, whose memory it takes a part of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.batch_size import LEAST, MOST, REQUEST_TOKENS, STEP, automatic_max_running
from alignedserve.config import Config, DecodeConfig
from alignedserve.config_sources import from_tree
from alignedserve.device_memory import DECODE, DeviceMemory, fixed_parts, plan_devices
from alignedserve.errors import ConfigError, ResourceError
from alignedserve.graph_sizes import graph_sizes, size_for
from alignedserve.memory import GIB
from alignedserve.sizing import StorePlan, plan_stores
from support.fake_roles import MODEL

EIGHT_B = replace(
    MODEL,
    dtype="bfloat16",
    layers=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_positions=131_072,
    weight_bytes=15 * GIB,
    heads=32,
    hidden_size=4096,
    mlp_width=14_336,
)
BLOCK = EIGHT_B.geometry(16).block_bytes


def memories(gib: float) -> list[tuple[str, DeviceMemory]]:
    size = int(gib * GIB)
    return [(role, DeviceMemory(f"{role}-0", f"cuda:{n}", size, size)) for n, role in enumerate(("prefill", "decode"))]


@given(st.integers(0, 1 << 24), st.integers(0, 1 << 24))
def test_a_larger_cache_never_has_fewer(one: int, other: int) -> None:
    few, many = automatic_max_running(min(one, other)), automatic_max_running(max(one, other))
    assert LEAST <= few <= many <= MOST
    assert few % STEP == many % STEP == 0


def test_each_request_has_a_share_of_the_cache() -> None:
    assert automatic_max_running(REQUEST_TOKENS * (LEAST + STEP) - 1) == LEAST
    assert automatic_max_running(REQUEST_TOKENS * (LEAST + STEP)) == LEAST + STEP
    assert automatic_max_running(572_608) == 704


@pytest.mark.parametrize("gib", [24, 40, 80, 96, 141, 180])
def test_it_is_the_largest_that_the_cache_beside_it_justifies(gib: int) -> None:
    def cache_tokens(most: int) -> int:
        config = from_tree({"decode": {"max_running": most}})
        try:
            return 16 * plan_devices(config, EIGHT_B, memories(gib)).decode_cache
        except ResourceError:
            return 0

    found = plan_devices(Config(), EIGHT_B, memories(gib))
    assert found.decode_cache * 16 == cache_tokens(found.max_running)  # planned as if it were configured
    larger = range(found.max_running + STEP, MOST + 1, STEP)
    assert not any(automatic_max_running(cache_tokens(most)) >= most for most in larger)
    assert found.max_running == LEAST or automatic_max_running(cache_tokens(found.max_running)) >= found.max_running
    assert found.roles[DECODE].used <= found.roles[DECODE].budget


def test_a_larger_gpu_runs_more() -> None:
    assert [plan_devices(Config(), EIGHT_B, memories(gib)).max_running for gib in (24, 80, 180)] == [256, 512, 1024]


def test_a_configured_cache_keeps_its_size_and_decides() -> None:
    def planned(blocks: int) -> int:
        config = from_tree({"decode": {"cache_blocks": blocks}})
        found = plan_devices(config, EIGHT_B, memories(80))
        assert found.decode_cache == blocks
        return found.max_running

    assert planned(1000) == LEAST
    assert planned(20_000) == 384
    tight = from_tree({"decode": {"cache_blocks": 1, "max_running": LEAST}})
    free = int(72 * GIB) - sum(fixed_parts(tight, EIGHT_B, DECODE).values())
    assert planned(free // BLOCK) == LEAST  # activations of more rows would not fit beside it


def test_a_cpu_keeps_the_least_and_what_is_configured_stays() -> None:
    assert plan_stores(Config(), replace(EIGHT_B, dtype="float32"), 4000 * GIB).max_running == LEAST
    assert plan_stores(from_tree({"decode": {"max_running": 7}}), MODEL, 64 * GIB).max_running == 7
    plan = plan_stores(Config(), MODEL, 64 * GIB)
    assert StorePlan.from_json(plan.to_json()) == plan


def test_graphs_reach_it_in_few_sizes() -> None:
    sizes = graph_sizes("", MOST)
    assert sizes[-1] == MOST
    assert len(sizes) < 1.8 * len(graph_sizes("", LEAST))
    for rows in range(LEAST, MOST + 1):
        size = size_for(sizes, rows)
        assert size is not None
        assert rows <= size <= rows * 8 / 7
    with pytest.raises(ConfigError, match=r"decode\.max_running"):
        Config(decode=DecodeConfig(max_running=-1))
