"""Instances that are spread over nodes: which ranks a node has, and how its memory counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.cluster.launch.plain_places import PlainPlaces
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import Node, Shape, plan_processes
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.config_sources import from_tree
from alignedserve.errors import ResourceError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.ranks.degrees import Degrees, Spread
from alignedserve.sizing import GIB, RANK_BYTES, HostMemory, StorePlan, plan_stores
from support.fake_roles import MODEL

BLOCK = MODEL.geometry(16).block_bytes


@pytest.mark.parametrize(
    ("degrees", "nodes", "ranks"),
    [
        (Degrees(2, 1), 1, [[0, 1]]),
        (Degrees(1, 1, 4), 1, [[0, 1, 2, 3]]),
        (Degrees(1, 2), 2, [[0], [1]]),
        (Degrees(2, 3), 2, [[0, 1], [2, 3, 4, 5]]),
        (Degrees(2, 4), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Degrees(1, 5), 3, [[0], [1, 2], [3, 4]]),
    ],
)
def test_each_node_has_whole_stages_in_a_row(degrees: Degrees, nodes: int, ranks: list[list[int]]) -> None:
    spread = Spread(degrees, nodes)
    spread.require()
    assert [list(spread.ranks(node)) for node in range(nodes)] == ranks
    assert [spread.ranks_of(part) for part in ("decode-0", *spread.parts("decode-0"))] == [len(own) for own in ranks]
    assert spread.most_ranks == max(map(len, ranks))


def test_parts_are_on_other_nodes_if_there_are_some_and_wait_for_those_that_are_fixed_for_them() -> None:
    nodes = [Node("a"), Node("b")]
    places = PlainPlaces(nodes, {"decode-1.1": "c"})
    places.place({"decode-0": ["decode-0.1", "decode-0.2"], "decode-1": ["decode-1.1"]})
    found = places.placement()
    assert (found.where["decode-0"], list(found.parts["decode-0"])) == ("a", ["b", "a"])
    assert found.waiting == {"decode-1": "waits for node c"}
    nodes.append(Node("c"))
    assert list(places.placement().parts["decode-1"]) == ["c"]
    del nodes[1]  # what was there has a place elsewhere
    assert list(places.placement().parts["decode-0"]) == ["c", "a"]


def test_a_node_with_half_of_an_instance_needs_half_of_its_memory_and_no_shard() -> None:
    config = from_tree({"cluster": {"device": "cpu"}, "decode": {"pipeline_parallel": 2, "nodes": 2}})
    first = HostMemory("a", GIB, 1, 0.5, 0)
    second = HostMemory("b", GIB // 4, 0, 0.5, 0, shard=False)
    found = plan_stores(config, MODEL, [first, second])
    assert found.pool > GIB // 5 // BLOCK  # the second node does not limit it
    assert found.decode_cache * BLOCK // 2 <= GIB // 4
    larger = from_tree(
        {"cluster": {"device": "cpu"}, "decode": {"pipeline_parallel": 2, "nodes": 2, "cache_blocks": GIB // BLOCK}}
    )
    with pytest.raises(ResourceError, match=r"on node b, but only 256.0 MiB is available: .*0.5 decode cache"):
        plan_stores(
            larger, MODEL, [replace(first, available_bytes=8 * GIB), HostMemory("b", GIB // 4, 0, 0.5, 0, shard=False)]
        )


@pytest.mark.parametrize("parts", [("b", "c"), ("b", "b"), ("b", "a")])
def test_stores_are_planned_once_every_node_with_ranks_has_said_what_it_has(parts: tuple[str, str]) -> None:
    """Of four stages over three nodes the last has two. Nodes without an instance's first rank have no shard."""
    decode = {"pipeline_parallel": 4, "nodes": 3}
    config = from_tree({"cluster": {"device": "cpu"}, "decode": decode})
    core = SupervisorCore(config, plan_processes(config, "cpu", Shape(1, 1)))
    where = {"prefill-0": "a", "decode-0": "a"}
    core.settle(Placement(tuple(map(Node, "abc")), where, parts={"decode-0": parts}), 0.0)
    core.begin(0.0)
    agents = {
        slot.planned.node_id: slot.planned.id for slot in core.roster.slots.values() if "agent" in slot.planned.id
    }
    assert set(agents) == {"a", *parts}
    assert [pool.node_id for pool in core.view().pools] == ["a"]

    def say(role_id: str, node_id: str, model_info: str = "", memory: float = 0.0) -> str:
        key = pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=1)
        core.joined(sv.RoleHello(process=key, device="cpu", node_id=node_id), 0.0)
        beat = sv.Heartbeat(state="loading", model_info=model_info, gauges={MEMORY_GAUGE: memory} if memory else {})
        core.heard(key, beat, 0.0)
        return core.view().store_plan

    assert say("prefill-0", "a", MODEL.to_json()) == ""
    last = agents.pop(parts[1])
    for node_id, agent_id in agents.items():
        assert say(agent_id, node_id, memory=16.0 * GIB) == ""
    found = StorePlan.from_json(say(last, parts[1], memory=float(GIB)))
    ranks = 2 if parts[0] != parts[1] else 3
    assert found.decode_cache * BLOCK <= (GIB - ranks * RANK_BYTES // 2) // 8
    assert (found.pool < 2 * GIB // BLOCK) == (parts[1] == "a")
