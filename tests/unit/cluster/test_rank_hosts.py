"""Instances that are spread over nodes: which ranks a node has, and how its memory counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.cluster.launch.plain_places import PlainPlaces
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.plan import Node, plan_roles
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.config_sources import from_tree
from alignedserve.device_memory import HOST_GAUGE
from alignedserve.errors import ResourceError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.ranks.degrees import Degrees, Spread
from alignedserve.sizing import GIB, HostMemory, StorePlan, plan_stores
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


def test_a_part_is_on_another_node_if_there_is_one_and_waits_for_the_one_that_is_fixed_for_it() -> None:
    nodes = [Node("a"), Node("b")]
    places = PlainPlaces(nodes, {"decode-1.1": "c"})
    assert places.part("decode-0.1", "a") == "b"
    assert places.part("decode-0.1", "b") == "a"
    assert places.part("decode-1.1", "a") is None
    nodes.append(Node("c"))
    assert places.part("decode-1.1", "a") == "c"
    del nodes[1:]
    assert places.part("decode-0.1", "a") == "a"


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


def test_stores_are_planned_once_an_instance_has_said_what_its_other_nodes_have() -> None:
    config = from_tree({"cluster": {"device": "cpu"}, "decode": {"pipeline_parallel": 2, "nodes": 2}})
    core = SupervisorCore(config, plan_roles(config, 0))
    core.begin(0.0)

    def say(role_id: str, model_info: str = "", **gauges: Any) -> str:
        key = pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=1)
        core.joined(sv.RoleHello(process=key, device="cpu", node_id="a"), 0.0)
        core.heard(key, sv.Heartbeat(state="loading", model_info=model_info, gauges=gauges), 0.0)
        return core.view().store_plan

    assert say("node_agent-0", **{MEMORY_GAUGE: 4.0 * GIB}) == ""
    assert say("prefill-0", MODEL.to_json()) == ""
    assert say("decode-0", MODEL.to_json()) == ""
    small = GIB // 4
    found = say("decode-0", MODEL.to_json(), **{f"{HOST_GAUGE}b": float(small)})
    assert StorePlan.from_json(found).decode_cache * BLOCK <= small // 8
