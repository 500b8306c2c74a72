"""The supervisor's decisions about nodes, as lists of events: places of roles, lost nodes and unreachable nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.cluster.launch.units import Unit
from alignedserve.cluster.supervisor.core import Fence, Launch
from alignedserve.cluster.supervisor.nodes import RETURN_S
from alignedserve.cluster.supervisor.plan import PlannedRole, Shape
from alignedserve.config import ClusterConfig, Config
from alignedserve.control.role import new_incarnation
from alignedserve.errors import ResourceError, UnavailableError
from alignedserve.model import ModelInfo
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.sizing import HostMemory, StorePlan, plan_stores
from support.fake_roles import MODEL
from support.node_cell import APART, GIB, HOME, LIMITS, OTHER, THIRD, Cell, launched


def test_every_used_node_has_an_agent_and_a_shard_and_every_role_is_launched_on_its_own() -> None:
    cell = Cell()
    assert launched(cell.core.begin(0.0)) == {
        "node_agent-0": "home",
        "node_agent-1": "other",
        "kv_pool-0": "home",
        "kv_pool-1": "other",
        "scheduler-0": "home",
        "prefill-0": "home",
        "decode-0": "other",
    }
    assert list(cell.core.roster.slots)[:2] == ["node_agent-0", "node_agent-1"]
    assert cell.pools() == {"kv_pool-0": "home", "kv_pool-1": "other"}
    assert cell.core.nodes.agent_socket("other") == "/agent-1.sock"


def test_a_node_that_no_instance_is_on_has_neither_and_the_scheduler_is_there_all_the_same() -> None:
    cell = Cell(where={"prefill-0": "other", "decode-0": "other"})
    actions = launched(cell.core.begin(0.0))
    assert actions["scheduler-0"] == "home"
    assert cell.pools() == {"kv_pool-0": "other"}
    assert cell.core.nodes.agent_socket("home") == ""


def test_an_instance_without_a_place_waits_and_says_for_what() -> None:
    cell = Cell(where={"prefill-0": "home"})
    assert "decode-0" not in launched(cell.core.begin(0.0))
    assert cell.core.degraded()[-1] == "decode-0: waits for a node with 1 GPU"
    assert cell.core.roster.missing()[-1] == "decode"
    cell.where["decode-0"] = "other"
    assert launched(cell.locate()) == {"decode-0": "other", "node_agent-1": "other", "kv_pool-1": "other"}
    assert not [line for line in cell.core.degraded() if "waits" in line]


def test_stores_are_planned_once_all_nodes_have_said_what_they_have_by_the_one_with_least() -> None:
    cell = Cell()
    cell.core.begin(0.0)
    for role_id in ("prefill-0", "node_agent-0"):
        cell.bring_up(role_id)
    assert not cell.core.view().store_plan
    cell.bring_up("node_agent-1")
    plan = StorePlan.from_json(cell.core.view().store_plan)
    assert plan.pool == (4 * GIB - MODEL.weight_bytes) // 4 // MODEL.geometry(16).block_bytes


def test_a_node_that_has_gone_takes_its_shard_and_its_processes_and_its_instances_start_elsewhere() -> None:
    cell = Cell()
    cell.start()
    old = cell.hello("decode-0")
    cell.nodes, cell.where["decode-0"] = [HOME, THIRD], "third"
    assert launched(cell.locate()) == {"decode-0": "third", "node_agent-2": "third", "kv_pool-2": "third"}
    assert cell.pools() == {"kv_pool-0": "home", "kv_pool-2": "third"}
    assert "decode-0" not in [peer.process.id for peer in cell.core.view().peers]
    assert cell.core.roster.missing() == ["decode"]
    refusal = cell.core.joined(old, cell.now)
    assert refusal is not None
    assert "given up" in refusal.message
    old.node_id = "home"
    refusal = cell.core.joined(old, cell.now)
    assert refusal is not None
    assert "belongs on node third" in refusal.message
    gateway = sv.RoleHello(process=pb.ProcessKey(role="gateway", id="gateway-x", incarnation=1), node_id="other")
    refusal = cell.core.joined(gateway, cell.now)
    assert refusal is not None
    assert "given up" in refusal.message


def test_gateways_leave_with_their_node() -> None:
    cell = Cell()
    cell.start()
    key = pb.ProcessKey(role="gateway", id="gateway-x", incarnation=1)
    cell.core.joined(sv.RoleHello(process=key, node_id="other"), 0.0)
    cell.nodes = [HOME]
    cell.locate()
    assert "gateway-x" not in [peer.process.id for peer in cell.core.view().peers]


def test_a_machine_that_comes_back_is_another_node_whatever_its_name() -> None:
    cell = Cell()
    cell.start()
    cell.nodes = [HOME]
    assert launched(cell.locate()) == {}
    cell.nodes = [HOME, OTHER]
    cell.locate()
    assert cell.pools() == {"kv_pool-0": "home", "kv_pool-2": "other"}


def test_a_fence_that_cannot_be_carried_out_ends_with_the_node() -> None:
    cell = Cell()
    cell.start()
    slot = cell.core.roster.slots["decode-0"]
    cell.core.broke(cell.hello("decode-0").process, cell.now)
    (fence,) = [action for action in cell.pass_time(1.0) if isinstance(action, Fence)]
    assert (fence.role_id, slot.phase) == ("decode-0", "ending")
    cell.nodes = [HOME]
    cell.locate()
    assert slot.phase == "waiting"


def test_no_process_is_fenced_for_a_cut_that_heals_before_the_node_is_given_up() -> None:
    cell = Cell()
    cell.start()
    cell.pass_time(1.0)
    assert cell.pass_time(9.0, {"other"}) == []
    assert "node other does not answer" in cell.core.degraded()
    cell.core.broke(cell.hello("decode-0").process, cell.now)  # the role noticed it, and reopens its stream
    assert cell.pass_time(RETURN_S / 2) == []
    assert cell.core.joined(cell.hello("decode-0"), cell.now) is None
    assert cell.pass_time(2 * RETURN_S) == []
    assert cell.core.state() == "ready"


def test_one_that_does_not_come_back_when_its_node_does_is_fenced() -> None:
    cell = Cell()
    cell.start()
    cell.pass_time(9.0, {"other"})
    cell.core.broke(cell.hello("decode-0").process, cell.now)
    fenced = [action.role_id for action in cell.pass_time(RETURN_S + 2.0) if isinstance(action, Fence)]
    assert fenced == ["decode-0"]


def test_where_a_silent_node_is_not_given_up_its_processes_are_fenced_once_they_have_ended_themselves() -> None:
    cell = Cell()
    cell.start()
    fenced = [action.role_id for action in cell.pass_time(58.0, {"other"}) if isinstance(action, Fence)]
    assert fenced == []
    fenced = [action.role_id for action in cell.pass_time(8.0, {"other"}) if isinstance(action, Fence)]
    assert sorted(fenced) == ["decode-0", "kv_pool-1", "node_agent-1"]


def test_a_silent_process_of_a_node_that_answers_is_fenced_as_ever() -> None:
    cell = Cell()
    cell.start()
    cell.core.broke(cell.hello("kv_pool-1").process, cell.now)
    fenced = [action.role_id for action in cell.pass_time(2.0) if isinstance(action, Fence)]
    assert fenced == ["kv_pool-1"]


def test_added_instances_wait_for_their_node_and_are_given_up_where_none_comes() -> None:
    cell = Cell()
    cell.start()
    cell.core.scale(1, 2, {"home": 1 << 50}, cell.now)
    cell.shape = Shape(1, 2)
    assert launched(cell.locate()) == {}
    cell.pass_time(LIMITS.start_timeout_s + 1.0)
    assert cell.core.scaling.shape == Shape(1, 1)
    assert "no room for decode-1" in cell.core.scaling.failure


def needed_bytes(cell: Cell, role: str) -> int:
    """The memory that one more instance of the role needs on its node."""
    planner = cell.core.planner
    room = cell.core.scaling.room([(role, "new")], planner.model_info, planner.store_plan, {})
    return room.needed(Unit(("new",), {}))


def test_growth_that_fits_no_single_node_is_refused_though_all_nodes_together_have_the_memory() -> None:
    cell = Cell()
    cell.start()
    short = needed_bytes(cell, "decode") - 1
    with pytest.raises(
        ResourceError, match=r"decode-1 needs .* on one node .*only .* on node home, .* on node other are"
    ):
        cell.core.scale(1, 2, {"home": short, "other": short}, cell.now)
    assert cell.core.scaling.shape == Shape(1, 1)
    cell.core.scale(1, 2, {"home": 0, "other": short + 1}, cell.now)
    assert cell.core.scaling.shape == Shape(1, 2)


def test_several_new_instances_are_fitted_to_nodes_one_by_one() -> None:
    cell = Cell()
    cell.start()
    decode = needed_bytes(cell, "decode")
    with pytest.raises(ResourceError, match="3 more instances need"):
        cell.core.scale(1, 4, {"home": 2 * decode - 1, "other": 2 * decode - 1}, cell.now)
    cell.core.scale(1, 4, {"home": 2 * decode, "other": decode}, cell.now)
    assert cell.core.scaling.shape == Shape(1, 4)


def test_instances_that_share_a_node_are_fitted_together() -> None:
    cell = Cell(placement="pairs")
    cell.start()
    prefill, decode = needed_bytes(cell, "prefill"), needed_bytes(cell, "decode")
    with pytest.raises(ResourceError, match="2 more instances need"):
        cell.core.scale(2, 2, {"home": prefill, "other": decode}, cell.now)
    cell.core.scale(2, 2, {"home": 0, "other": prefill + decode}, cell.now)
    assert cell.core.scaling.shape == Shape(2, 2)


@pytest.mark.parametrize(("resources", "fits"), [({"CPU": 4.0}, True), ({"CPU": 0.0}, False), ({}, False)])
def test_a_node_without_anything_of_the_cluster_counts_with_what_ray_says_of_it(
    resources: dict[str, float], *, fits: bool
) -> None:
    cell = Cell()
    cell.start()
    cell.nodes = [HOME, OTHER, replace(THIRD, resources={**resources, "memory": 64.0 * GIB})]
    cell.locate()
    free = {"home": 0, "other": 0}
    if not fits:
        with pytest.raises(ResourceError, match="decode-1 needs"):
            cell.core.scale(1, 2, free, cell.now)
        return
    cell.core.scale(1, 2, free, cell.now)
    assert cell.core.scaling.shape == Shape(1, 2)


def test_no_role_grows_while_no_node_reports_its_resources() -> None:
    cell = Cell()
    cell.start()
    with pytest.raises(UnavailableError, match="no node agent reported its free memory"):
        cell.core.scale(1, 2, {}, cell.now)


def test_a_rolling_restart_runs_one_more_instance_only_where_it_fits_a_node() -> None:
    cell = Cell()
    cell.start()
    decode = needed_bytes(cell, "decode")
    cell.core.restart(["decode"], {"home": decode - 1, "other": decode - 1}, cell.now, 10)
    assert list(cell.core.rolling.state.surplus) == []
    second = Cell()
    second.start()
    second.core.restart(["decode"], {"home": decode - 1, "other": decode}, second.now, 10)
    assert list(second.core.rolling.state.surplus) == ["decode"]


def test_gpus_are_counted_on_each_node() -> None:
    where = {"prefill-0": "home", "prefill-1": "other", "decode-0": "home", "decode-1": "other"}
    cell = Cell(2, 2, where, device="cuda")
    actions = cell.core.begin(0.0)
    devices = {a.planned.id: a.planned.device for a in actions if isinstance(a, Launch) and a.planned.on_gpu}
    assert devices == {"prefill-0": "cuda:0", "prefill-1": "cuda:0", "decode-0": "cuda:1", "decode-1": "cuda:1"}
    pairs = {(pair.decode_id, pair.prefill_id) for pair in cell.core.view().pairs}
    assert pairs == {("decode-0", "prefill-0"), ("decode-1", "prefill-1")}


def test_a_device_of_a_node_that_has_gone_is_not_asked_for_on_another() -> None:
    cell = Cell(1, 1, APART, device="cuda")
    cell.core.begin(0.0)
    cell.incarnations["decode-0"] = 1
    hello = cell.hello("decode-0")
    hello.device = "cuda:1"
    assert cell.core.joined(hello, 0.0) is None
    cell.nodes, cell.where["decode-0"] = [HOME, THIRD], "third"
    cell.locate()
    assert cell.core.roster.slots["decode-0"].device == ""


def test_an_incarnation_is_larger_than_its_predecessors_though_the_clock_is_behind() -> None:
    ahead = new_incarnation() + 10**12
    assert new_incarnation(ahead) == ahead + 1
    assert new_incarnation(1) > 10**18


@pytest.mark.parametrize("least", [0, 1])
def test_the_node_with_least_memory_decides_and_is_named_where_it_has_too_little(least: int) -> None:
    config, model = Config(cluster=ClusterConfig(device="cpu")), ModelInfo.from_json(MODEL.to_json())
    hosts = [HostMemory("a", 8 * GIB, 1, 0, 0), HostMemory("b", 8 * GIB, 0, 1, 0)]
    small = [replace(host, available_bytes=GIB) if n == least else host for n, host in enumerate(hosts)]
    assert plan_stores(config, model, small).pool * 8 == pytest.approx(plan_stores(config, model, hosts).pool, rel=0.01)
    starved = [replace(host, available_bytes=2000) if n == least else host for n, host in enumerate(hosts)]
    with pytest.raises(ResourceError, match=f"on node {'ab'[least]},"):
        plan_stores(config, model, starved)


def test_numbers_count_nodes_in_the_order_of_their_first_use() -> None:
    cell = Cell()
    assert [cell.core.nodes.number(node.node_id) for node in (HOME, OTHER)] == [0, 1]
    assert cell.core.nodes.number("third") is None
    assert cell.core.nodes.planned(cell.core.roster.slots["kv_pool-1"]) == PlannedRole(
        "kv_pool", "kv_pool-1", node_id="other"
    )


def test_a_start_waits_for_a_node_that_comes_late() -> None:
    """Memory is divided once all instances have a node. A waiting start does not time out before that."""
    cell = Cell(where={"prefill-0": "home"})
    cell.core.begin(cell.now)
    cell.locate()
    here = ("node_agent-0", "kv_pool-0", "scheduler-0", "prefill-0")
    for role_id in here:
        cell.incarnations[role_id] = 1
        assert cell.core.joined(cell.hello(role_id), cell.now) is None
    while cell.now < 3 * LIMITS.start_timeout_s:
        cell.now += 1.0
        for role_id in here:
            beat = sv.Heartbeat(state="ready" if role_id == "node_agent-0" else "loading")
            cell.core.heard(cell.hello(role_id).process, beat, cell.now)
        assert not [action for action in cell.core.tick(cell.now) if isinstance(action, Fence)]
    assert cell.core.failure is None
    cell.where["decode-0"] = "other"
    assert launched(cell.locate()) == {"node_agent-1": "other", "kv_pool-1": "other", "decode-0": "other"}
