"""How a GPU's memory is divided: every part counts, blocks get the rest, and a shortage is reported in GiB."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.nodes import NodeBook
from alignedserve.cluster.supervisor.plan import PlannedRole, plan_roles
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.config import Config
from alignedserve.config_sources import from_tree
from alignedserve.device_memory import (
    DeviceMemory,
    RanksHere,
    activation_bytes,
    describe_plan,
    fixed_parts,
    plan_devices,
)
from alignedserve.errors import ResourceError
from alignedserve.memory import GIB
from alignedserve.model import ModelInfo
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.sizing import StorePlan, plan_stores
from support.fake_roles import MODEL

SEVEN_B = replace(
    MODEL,
    name="llama-2-7b",
    dtype="bfloat16",
    layers=32,
    kv_heads=32,
    head_dim=128,
    vocab_size=32000,
    max_positions=4096,
    weight_bytes=int(12.55 * GIB),
    heads=32,
    hidden_size=4096,
    mlp_width=11008,
)
BLOCK = SEVEN_B.geometry(16).block_bytes
H200 = int(139.8 * GIB)
Memories = list[tuple[str, DeviceMemory]]


def config(**sections: dict[str, Any]) -> Config:
    return from_tree({"kv_pool": {"size_gib": 8.0}, **sections})


def devices(prefill: Sequence[int], decode: Sequence[int], *, shared: bool = False, used: int = 0) -> Memories:
    """GPUs of these sizes in bytes, one for each instance; `shared`: all instances are on the first."""
    sizes = [("prefill", f"prefill-{i}", size) for i, size in enumerate(prefill)]
    sizes += [("decode", f"decode-{i}", size) for i, size in enumerate(decode)]
    return [
        (role, DeviceMemory(name, f"cuda:{0 if shared else number}", size, size - used))
        for number, (role, name, size) in enumerate(sizes)
    ]


def plan(memories: Memories, *, model: ModelInfo = SEVEN_B, **sections: dict[str, Any]) -> StorePlan:
    counts = {role: sum(other == role for other, _ in memories) for role in ("prefill", "decode")}
    sections["cluster"] = {**counts, **sections.get("cluster", {})}
    return plan_stores(config(**sections), model, 64 * GIB, memories)


def test_what_is_left_becomes_blocks_of_every_kind() -> None:
    found = plan(devices([H200], [H200]))
    decode, prefill = found.devices["decode"], found.devices["prefill"]
    assert found.pool == 8 * GIB // BLOCK
    assert decode.budget == prefill.budget == int(0.9 * H200)
    assert 0 <= decode.budget - decode.used < BLOCK
    assert decode.parts["cache"] == found.decode_cache * BLOCK > 100 * GIB
    assert 0 <= prefill.budget - prefill.used < BLOCK
    assert found.batch_buffer == int(0.4 * found.decode_cache)  # K
    assert found.prefill_cache == 2 * 8192 // 16  # prefill.queue_tokens, twice
    held = (found.prefill_cache + found.batch_buffer + found.requests_buffer) * BLOCK
    assert held == sum(prefill.parts[name] for name in ("cache", "batch buffer", "requests buffer"))
    assert list(decode.parts)[:3] == ["weights", "activations", "CUDA graphs"]
    assert "CUDA graphs" not in prefill.parts
    assert StorePlan.from_json(found.to_json()) == found


def test_activations_are_of_the_order_that_such_a_model_takes() -> None:
    """512 tokens, of which 256 are sampled: mostly MLP rows of 11008 and logits of 32000 in fp32."""
    assert 0.2 * GIB < activation_bytes(SEVEN_B, 512, 256) < 1.5 * GIB
    assert activation_bytes(SEVEN_B, 8192, 256) - activation_bytes(SEVEN_B, 4096, 256) < 1.0 * GIB
    experts = replace(SEVEN_B, mlp_width=8 * 14336)
    assert activation_bytes(experts, 512, 256) > activation_bytes(SEVEN_B, 512, 256)
    unknown = replace(SEVEN_B, heads=0, hidden_size=0, mlp_width=0)
    assert activation_bytes(unknown, 512, 256) == pytest.approx(activation_bytes(SEVEN_B, 512, 256), rel=0.5)


def test_the_longer_passes_of_a_gpu_are_planned_for() -> None:
    on_gpu = fixed_parts(config().on_device("cuda"), SEVEN_B, "prefill")["activations"]
    assert on_gpu - fixed_parts(config(), SEVEN_B, "prefill")["activations"] > 7000 * 4 * 11008 * 2


def test_a_model_that_is_too_large_is_refused_with_what_is_missing_and_every_part() -> None:
    with pytest.raises(ResourceError) as refused:
        plan(devices([16 * GIB], [12 * GIB]))
    message = refused.value.message
    found = re.search(
        r"decode-0 on cuda:1 \(12\.00 GiB\) lacks ([\d.]+) GiB: it needs weights 12\.55, activations", message
    )
    assert found is not None
    parts = fixed_parts(config(), SEVEN_B, "decode")
    least = 128 * BLOCK  # 2048 tokens
    assert float(found[1]) == pytest.approx((sum(parts.values()) + least - 0.9 * 12 * GIB) / GIB, abs=0.01)
    assert "prefill-0 on cuda:0 (16.00 GiB) lacks" in message
    for key in ("cluster.gpu_memory_share", "prefill.token_budget", "decode.max_running"):
        assert key in message


def test_only_what_lacks_memory_is_named() -> None:
    with pytest.raises(ResourceError) as refused:
        plan(devices([H200, H200], [H200, 14 * GIB]))
    assert "decode-1 on cuda:3" in refused.value.message
    for other in ("prefill-0", "decode-0", "prefill.token_budget"):
        assert other not in refused.value.message


@pytest.mark.parametrize(
    ("sections", "role"),
    [
        ({"decode": {"cache_blocks": H200 // BLOCK}}, "decode"),
        ({"prefill": {"cache_blocks": H200 // BLOCK}}, "prefill"),
        ({"prefill": {"batch_buffer_blocks": H200 // BLOCK}}, "prefill"),
        ({"prefill": {"requests_buffer_blocks": H200 // BLOCK}}, "prefill"),
        ({"prefill": {"token_budget": 1 << 20}}, "prefill"),
        ({"decode": {"max_running": 65536}}, "decode"),
    ],
)
def test_what_is_asked_for_is_had_or_refused(sections: dict[str, dict[str, Any]], role: str) -> None:
    with pytest.raises(ResourceError, match=f"{role}-0 on cuda:. .139.80 GiB. lacks"):
        plan(devices([H200], [H200]), **sections)


def test_what_is_asked_for_and_fits_is_kept() -> None:
    asked = {"cache_blocks": 1000, "batch_buffer_blocks": 2000, "requests_buffer_blocks": 500}
    found = plan(devices([H200], [H200]), prefill=asked, decode={"cache_blocks": 3000})
    stores = (found.prefill_cache, found.batch_buffer, found.requests_buffer, found.decode_cache)
    assert stores == (1000, 2000, 500, 3000)


def test_the_smallest_device_of_a_role_decides_and_the_log_says_what_lies_idle() -> None:
    memories = devices([40 * GIB], [H200, 80 * GIB])
    found = plan(memories)
    assert found.devices["decode"].budget == int(0.9 * 80 * GIB)
    assert found.devices["prefill"].budget == int(0.9 * 40 * GIB)
    lines = describe_plan(config(cluster={"prefill": 1, "decode": 2}), found.devices, memories)
    assert [line.split()[0] for line in lines if "unused" in line] == ["decode-0"]
    assert any("memory of each prefill instance" in line and "batch buffer" in line for line in lines)


def test_instances_that_share_a_gpu_divide_it() -> None:
    alone, shared = plan(devices([H200], [H200])), plan(devices([H200], [H200], shared=True))
    assert shared.devices["decode"].budget == alone.devices["decode"].budget // 2
    assert sum(memory.used for memory in shared.devices.values()) <= 0.9 * H200
    with pytest.raises(ResourceError, match=r"decode-3 on cuda:0 \(139\.80 GiB\) lacks"):
        plan(devices([H200] * 5, [H200] * 5, shared=True))


def test_of_those_that_share_the_first_to_look_saw_what_was_free() -> None:
    """The second process sees the first's weights, which count as the first's part and not as other use."""
    memories = devices([H200], [H200], shared=True)
    late = replace(memories[1][1], free_bytes=H200 - 13 * GIB)
    found = plan([memories[0], ("decode", late)])
    assert found.devices == plan(memories).devices


def test_what_others_use_on_the_device_is_left_alone() -> None:
    found = plan(devices([H200], [H200], used=100 * GIB))
    assert found.devices["decode"].budget == H200 - 100 * GIB


def test_without_prefetch_there_are_no_buffers() -> None:
    found = plan(devices([40 * GIB], [40 * GIB]), cluster={"prefetch": False})
    assert "batch buffer" not in found.devices["prefill"].parts
    assert found.devices["prefill"].used <= found.devices["prefill"].budget


def test_a_tiny_model_takes_no_more_than_is_of_use() -> None:
    found = plan(devices([H200], [H200]), model=MODEL)
    longest = 256 // 16 + 1
    assert found.decode_cache == 256 * longest  # every running request at its longest
    assert found.requests_buffer == found.decode_cache
    assert found.devices["decode"].used < 4 * GIB


sizes = st.integers(1 * GIB, 200 * GIB)


@given(prefill=sizes, decode=sizes, share=st.floats(0.1, 1.0), served=st.integers(1, 4), shared=st.booleans())
def test_parts_are_at_most_the_budget_and_every_store_serves(
    prefill: int, decode: int, share: float, served: int, shared: bool
) -> None:
    memories = devices([prefill], [decode] * served, shared=shared)
    settings = config(cluster={"decode": served, "gpu_memory_share": share})
    try:
        found = plan_devices(settings, SEVEN_B, memories)
    except ResourceError as refused:
        assert " lacks " in refused.message  # noqa: PT017
        return
    for role, memory in memories:
        sharers = len(memories) if shared else 1
        assert found.roles[role].used * sharers <= share * max(prefill, decode if shared else memory.total_bytes)
        assert all(size > 0 for size in found.roles[role].parts.values())
    assert min(found.prefill_cache, found.decode_cache, found.batch_buffer, found.requests_buffer) >= 128


@given(size=st.integers(24 * GIB, 200 * GIB), more=st.integers(0, 50 * GIB), decode=st.integers(24 * GIB, 200 * GIB))
def test_more_memory_never_makes_a_store_smaller(size: int, more: int, decode: int) -> None:
    stores = ("prefill_cache", "batch_buffer", "requests_buffer", "decode_cache")
    less, larger = (plan_devices(config(), SEVEN_B, devices([total], [decode])) for total in (size, size + more))
    assert all(getattr(less, store) <= getattr(larger, store) for store in stores)
    less, larger = (plan_devices(config(), SEVEN_B, devices([decode], [total])) for total in (size, size + more))
    assert less.decode_cache <= larger.decode_cache


class Cell:
    """A supervisor's core whose workers report the memory of pretended GPUs."""

    def __init__(self, share_gpu: bool = False) -> None:
        self.config = config(cluster={"device": "cuda", "decode": 2, "share_gpu": share_gpu})
        self.core = SupervisorCore(self.config, plan_roles(self.config, 1 if share_gpu else 3), gpus=3)
        self.core.begin(0.0)

    def say(self, role_id: str, device: str, memory: DeviceMemory | None = None) -> None:
        key = pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=1)
        self.core.joined(sv.RoleHello(process=key, device=device, node_id="n"), 0.0)
        gauges = memory.gauges() if memory else {MEMORY_GAUGE: 64.0 * GIB}
        info = SEVEN_B.to_json() if memory else ""
        self.core.heard(key, sv.Heartbeat(state="loading", model_info=info, gauges=gauges), 0.0)


def test_the_supervisor_plans_once_every_instance_has_said_what_its_device_has() -> None:
    cell = Cell()
    cell.say("node_agent-0", "cpu")
    for number, (role_id, total) in enumerate((("prefill-0", H200), ("decode-0", H200), ("decode-1", 80 * GIB))):
        assert cell.core.view().store_plan == ""
        cell.say(role_id, f"cuda:{number}", DeviceMemory(role_id, "", total, total))
    found = StorePlan.from_json(cell.core.view().store_plan)
    assert found.devices["decode"].budget == int(0.9 * 80 * GIB)
    assert cell.core.failure is None


def test_a_start_on_gpus_that_are_too_small_ends_with_the_table() -> None:
    cell = Cell(share_gpu=True)
    cell.say("node_agent-0", "cpu")
    for role_id in ("prefill-0", "decode-0", "decode-1"):
        cell.say(role_id, "cuda:0", DeviceMemory(role_id, "", 24 * GIB, 24 * GIB))
    assert cell.core.failure is not None
    assert cell.core.failure.code == ResourceError.code
    assert re.search(
        r"prefill-0 on cuda:0 \(24.00 GiB\) lacks [\d.]+ GiB: it needs weights 12.55", cell.core.failure.message
    )


def test_ranks_divide_weights_and_blocks_among_their_devices() -> None:
    """Two ranks for prefill and four for decode, each on a GPU that the model alone does not fit."""
    size, sections = 12 * GIB, {"prefill": {"tensor_parallel": 2}, "decode": {"tensor_parallel": 4}}
    memories = [
        ("prefill", DeviceMemory("prefill-0", "cuda:0,1", size, size)),
        ("decode", DeviceMemory("decode-0", "cuda:2,3,4,5", size, size)),
    ]
    found = plan(memories, **sections)
    prefill, decode = found.devices["prefill"], found.devices["decode"]
    for parts, ranks in ((prefill.parts, 2), (decode.parts, 4)):
        assert 1.0 < parts["weights"] / (SEVEN_B.weight_bytes / ranks) < 1.03  # norms are in each rank
    assert decode.parts["cache"] == found.decode_cache * BLOCK // 4
    assert "CUDA graphs" in decode.parts
    assert 0 <= decode.budget - decode.used < BLOCK // 4
    with pytest.raises(ResourceError, match=r"decode-0 on cuda:1 .* lacks"):
        plan(devices([size], [size]))


def test_ranks_that_share_a_device_share_its_memory() -> None:
    """Two instances of two ranks on one GPU: each has half of it, and all of its weights there."""
    sections: dict[str, Any] = {"prefill": {"tensor_parallel": 2}, "decode": {"pipeline_parallel": 2}}
    memories = devices([H200], [H200], shared=True)
    found = plan(memories, **sections)
    assert {found.devices[role].budget for role in ("prefill", "decode")} == {2 * (int(0.9 * H200) // 4)}
    assert 1.0 < found.devices["prefill"].parts["weights"] / SEVEN_B.weight_bytes < 1.03
    assert found.devices["decode"].parts["weights"] > SEVEN_B.weight_bytes  # the stages need not be equal
    assert found.devices["prefill"].parts["cache"] == found.prefill_cache * BLOCK
    assert "CUDA graphs" in found.devices["decode"].parts
    summing = fixed_parts(config(decode={"tensor_parallel": 2}), SEVEN_B, "decode")
    assert "CUDA graphs" not in summing  # sums by Gloo are no part of them


@pytest.mark.parametrize(
    ("tensor", "stages", "more"),
    [(2, 1, 1.0), (4, 1, 1.0), (1, 2, 18 / 16), (2, 2, 18 / 16), (64, 1, 2.0)],
)
def test_a_rank_holds_its_heads_of_its_layers(tensor: int, stages: int, more: float) -> None:
    """A stage may have more layers than the last, which has the head; 64 ranks hold each of 32 KV heads twice."""
    own = config(decode={"tensor_parallel": tensor, "pipeline_parallel": stages})
    ranks = RanksHere.of(own, "decode", "cuda:" + ",".join(map(str, range(tensor * stages))))
    assert ranks.number == 1
    assert ranks.block_bytes(SEVEN_B, SEVEN_B.geometry(16)) == pytest.approx(more * BLOCK / (tensor * stages))


def test_candidate_buffers_are_in_the_devices_of_the_first_node() -> None:
    """Which has one of two stages, and so all layers of the buffers."""
    prefill = {"tensor_parallel": 2, "pipeline_parallel": 2}
    memories = [
        ("prefill", DeviceMemory("prefill-0", "cuda:0,1", 80 * GIB, 79 * GIB)),
        ("decode", DeviceMemory("decode-0", "cuda:2", 80 * GIB, 79 * GIB)),
    ]
    found = plan(memories, prefill=prefill | {"nodes": 2})
    parts = found.devices["prefill"].parts
    assert parts["batch buffer"] == found.batch_buffer * BLOCK // 2
    assert parts["cache"] == pytest.approx(18 / 16 * found.prefill_cache * BLOCK / 4)
    assert found.devices["prefill"].used <= found.devices["prefill"].budget
    memories[0] = ("prefill", replace(memories[0][1], device="cuda:0,1,3,4"))
    found = plan(memories, prefill=prefill)
    assert found.devices["prefill"].parts["batch buffer"] == found.batch_buffer * BLOCK // 4


def test_a_first_node_with_fewer_stages_has_a_device_for_each_of_its_ranks() -> None:
    own = config(decode={"tensor_parallel": 4, "pipeline_parallel": 3, "nodes": 2})
    ranks = RanksHere.of(own, "decode", "cuda:0,1,2,3")
    assert (ranks.number, ranks.stages, ranks.captures) == (1, 1, True)


def test_instances_of_ranks_are_planned_on_devices_of_their_own() -> None:
    degrees: dict[str, Any] = {"prefill": {"tensor_parallel": 2}, "decode": {"pipeline_parallel": 4}}
    own = config(cluster={"device": "cuda", "prefill": 2}, **degrees)
    where = {role.id: role.device for role in plan_roles(own, 8) if role.on_gpu}
    assert where == {"prefill-0": "cuda:0,1", "prefill-1": "cuda:2,3", "decode-0": "cuda:4,5,6,7"}
    with pytest.raises(ResourceError, match="instances of 8 ranks together need 8 GPUs, but there are 7"):
        plan_roles(own, 7)
    sharing = config(cluster={"device": "cuda", "share_gpu": True}, decode={"tensor_parallel": 4})
    assert [role.device for role in plan_roles(sharing, 2) if role.on_gpu] == ["cuda:0", "cuda:1,0"]
    nodes = NodeBook(own, Roster([PlannedRole("prefill", "prefill-0", "cuda:0,3")]), 4)
    assert (nodes.free_device("prefill"), nodes.free_device("decode")) == ("cuda:1,2", "cuda:1,2,0,3")
    own = config(cluster={"device": "cuda"}, decode={"expert_parallel": 4})
    assert [role.device for role in plan_roles(own, 5) if role.on_gpu] == ["cuda:0", "cuda:1,2,3,4"]
    with pytest.raises(ResourceError, match="instances of 5 ranks together need 5 GPUs, but there are 4"):
        plan_roles(own, 4)


@pytest.mark.parametrize(("devices", "number"), [("cuda:0,1,2,3", 1), ("cuda:0,1", 2)])
def test_ranks_that_share_experts_hold_all_else_and_blocks_of_their_own(devices: str, number: int) -> None:
    mixture = replace(SEVEN_B, expert_bytes=SEVEN_B.weight_bytes // 2)
    own = config(decode={"expert_parallel": 4})
    ranks = RanksHere.of(own, "decode", devices)
    assert ranks.number == number
    assert ranks.weight_bytes(mixture) == pytest.approx(number * (1 / 2 + 1 / 8) * SEVEN_B.weight_bytes)
    assert ranks.block_bytes(mixture, mixture.geometry(16)) == number * BLOCK / 4
    parts = fixed_parts(own, mixture, "decode", ranks)
    assert "CUDA graphs" not in parts
    assert parts["activations"] > fixed_parts(config(), mixture, "decode")["activations"]
    memories = [
        ("decode", DeviceMemory("decode-0", devices, 80 * GIB, 79 * GIB)),
        ("prefill", DeviceMemory("prefill-0", "cuda:7", 80 * GIB, 79 * GIB)),
    ]
    plan = plan_devices(own, mixture, memories)
    assert plan.decode_cache % 4 == 0
    held = plan.roles["decode"]
    assert held.parts["cache"] == plan.decode_cache * number * BLOCK // 4
    assert held.used <= held.budget
