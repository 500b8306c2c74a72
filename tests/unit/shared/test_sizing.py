"""How memory is divided: everything fits together, or the start is refused with the figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.plan import plan_roles
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.config_sources import from_tree
from alignedserve.device_memory import DeviceMemory
from alignedserve.errors import ResourceError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.sizing import GIB, RANK_BYTES, StorePlan, instance_bytes, plan_stores
from support.fake_roles import MODEL

MIB = 1 << 20
BLOCK = MODEL.geometry(16).block_bytes
LARGE = replace(MODEL, weight_bytes=2 * GIB)


def plan(memory: int, *, model: Any = MODEL, gpu_bytes: int = 0, **sections: dict[str, Any]) -> StorePlan:
    roles = ("prefill", "decode") if gpu_bytes else ()
    devices = [(role, DeviceMemory(role, f"of {role}", gpu_bytes, gpu_bytes)) for role in roles]
    return plan_stores(from_tree({"cluster": {"device": "cpu"}, **sections}), model, memory, devices)


def total(found: StorePlan, prefill: int, decode: int) -> int:
    buffers = found.batch_buffer + found.requests_buffer
    return (found.pool + decode * found.decode_cache + prefill * (found.prefill_cache + buffers)) * BLOCK


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 8), (8, 1), (3, 5)])
@pytest.mark.parametrize("memory", [40 * MIB, 1 * GIB, 64 * GIB])
def test_what_is_planned_without_being_told_fits(memory: int, prefill: int, decode: int) -> None:
    found = plan(memory, cluster={"prefill": prefill, "decode": decode, "device": "cpu"})
    assert total(found, prefill, decode) <= memory
    assert found.pool == (memory - (prefill + decode) * 1000) // 4 // BLOCK


@pytest.mark.parametrize(
    ("sections", "figures"),
    [
        ({"kv_pool": {"size_gib": 5.0}}, ("5.00 GiB for the pool's shard",)),
        ({"kv_pool": {"size_gib": 3.0}, "decode": {"cache_blocks": 2 * GIB // BLOCK}}, ("2.00 GiB for 1 decode",)),
        ({"kv_pool": {"size_gib": 3.0}, "prefill": {"cache_blocks": 2 * GIB // BLOCK}}, ("2.00 GiB for 1 prefill",)),
        (
            {"kv_pool": {"size_gib": 3.0}, "prefill": {"batch_buffer_blocks": GIB // BLOCK}},
            ("for the candidate buffers of 1 prefill",),
        ),
        ({"decode": {"cache_blocks": 4 * GIB // BLOCK}}, ("4.00 GiB for 1 decode", "1024.0 MiB for the pool's shard")),
    ],
)
def test_what_does_not_fit_together_is_refused_with_each_figure(
    sections: dict[str, dict[str, Any]], figures: tuple[str, ...]
) -> None:
    with pytest.raises(ResourceError) as refused:
        plan(4 * GIB, **sections)
    for figure in ("only 4.00 GiB is available", *figures):
        assert figure in refused.value.message


def test_the_prefix_index_counts_beside_the_blocks() -> None:
    blocks = 3 * GIB // BLOCK
    mib = blocks * (128 + 4 * 16) / MIB
    sections: dict[str, dict[str, Any]] = {
        "kv_pool": {"size_gib": 3.0, "prefix_cache": True},
        "cluster": {"device": "cpu", "prefetch": False},
    }
    with pytest.raises(ResourceError, match=f"{mib:.0f}.* MiB for the shard's prefix index"):
        plan(int(3.02 * GIB), **sections)
    sections["kv_pool"]["prefix_cache"] = False
    assert plan(4 * GIB, **sections).pool == blocks


def test_buffers_count_only_where_there_are_some() -> None:
    sections: dict[str, dict[str, Any]] = {
        "kv_pool": {"size_gib": 3.0},
        "prefill": {"batch_buffer_blocks": GIB // BLOCK},
    }
    found = plan(4 * GIB, cluster={"device": "cpu", "prefetch": False}, **sections)
    assert found.batch_buffer == GIB // BLOCK


def test_weights_count_on_a_cpu_and_not_on_gpus() -> None:
    with pytest.raises(ResourceError, match=r"4\.00 GiB for the weights of 2 workers"):
        plan(3 * GIB, model=LARGE)
    blocks = 5 * GIB // BLOCK
    found = plan(3 * GIB, model=LARGE, gpu_bytes=24 * GIB, kv_pool={"size_gib": 2.5}, decode={"cache_blocks": blocks})
    assert (found.pool, found.decode_cache) == (int(2.5 * GIB) // BLOCK, blocks)


def test_each_of_the_ranks_that_share_experts_has_the_other_weights() -> None:
    mixture = replace(MODEL, weight_bytes=3 * GIB, expert_bytes=GIB)
    # 3 GiB of the prefill instance, 3 times 2 and 1 of the decode instance's, and 300 MiB of each further rank
    with pytest.raises(ResourceError, match=r"10\.59 GiB for the weights of 2 workers of 4 ranks"):
        plan(4 * GIB, model=mixture, decode={"expert_parallel": 3})


def test_an_embedding_that_is_the_head_too_is_in_two_stages() -> None:
    model = replace(MODEL, weight_bytes=3 * GIB, tied_bytes=GIB // 2)
    staged = from_tree({"decode": {"pipeline_parallel": 2}})
    extra = instance_bytes(staged, "decode", model) - instance_bytes(staged, "prefill", model)
    assert extra == GIB // 2 + RANK_BYTES


def test_a_pool_that_could_not_hold_two_blocks_is_refused() -> None:
    with pytest.raises(ResourceError, match="holds 1 blocks"):
        plan(4 * GIB, kv_pool={"size_gib": 1.5 * BLOCK / GIB})


def test_the_start_fails_with_the_figures_that_the_node_agent_reported() -> None:
    """The node agent reports what its control group leaves, before any weights are loaded."""
    config = from_tree({"cluster": {"device": "cpu"}, "kv_pool": {"size_gib": 1.0}})
    core = SupervisorCore(config, plan_roles(config, 0))
    core.begin(0.0)
    for role, beat in (
        ("node_agent", sv.Heartbeat(state="ready", gauges={MEMORY_GAUGE: 3.0 * GIB})),
        ("decode", sv.Heartbeat(state="loading", model_info=LARGE.to_json())),
    ):
        key = pb.ProcessKey(role=role, id=f"{role}-0", incarnation=1)
        core.joined(sv.RoleHello(process=key), 0.0)
        core.heard(key, beat, 0.0)
    assert core.failure is not None
    assert core.failure.code == ResourceError.code
    figures = ("only 3.00 GiB is available", "1.00 GiB for the pool's shard", "4.00 GiB for the weights of 2 workers")
    for figure in figures:
        assert figure in core.failure.message
