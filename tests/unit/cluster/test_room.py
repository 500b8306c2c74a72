"""Which node has host memory for new instances, and which node Ray is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.cluster.launch import ray_groups, ray_places
from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.launch.ray_places import RayPlaces
from alignedserve.cluster.launch.units import Unit
from alignedserve.cluster.supervisor.plan import Shape
from alignedserve.config import ClusterConfig, Config

NODES = ("a" * 56, "b" * 56)


def units(*names: str) -> list[Unit]:
    return [Unit(tuple(name.split("+")), {}) for name in names]


@pytest.mark.parametrize(
    ("free", "needed", "fits"),
    [
        ((5, 5), (6,), False),
        ((5, 6), (6,), True),
        ((12, 6), (4, 6, 4, 4), True),
        ((12, 6), (4, 6, 4, 5), False),
        ((), (0,), True),
    ],
)
def test_units_fit_where_each_finds_a_node(free: tuple[int, ...], needed: tuple[int, ...], *, fits: bool) -> None:
    names = [f"decode-{number}" for number in range(len(needed))]
    room = NodeRoom({f"n{number}": size for number, size in enumerate(free)}, dict(zip(names, needed, strict=True)))
    assert room.fits(units(*names)) is fits


def test_a_unit_goes_to_the_first_node_that_leaves_room_for_the_others() -> None:
    room = NodeRoom({"a": 12, "b": 6}, {"d1": 6, "d2": 4, "d3": 4, "d4": 4})
    first, *others = units("d1", "d2", "d3", "d4")
    assert room.choose(first, others, ["a", "b"]) == "b"
    assert room.choose(others[0], others[1:], ["a", "b"]) == "a"
    assert room.choose(others[1], others[2:], ["b"]) is None


def test_what_share_a_node_need_their_memory_there_together() -> None:
    room = NodeRoom({"a": 5, "b": 9}, {"p": 5, "d": 4})
    (pair,) = units("p+d")
    assert room.choose(pair, (), ["a", "b"]) == "b"


class Groups:
    """Ray's placement groups, each on the requested node."""

    def __init__(self) -> None:
        self.table: dict[str, dict[str, Any]] = {}

    def create(self, bundles: list[Any], name: str, strategy: str, lifetime: str, **options: Any) -> None:
        node = options.get("_soft_target_node_id", NODES[0])
        self.table[f"{len(self.table):036x}"] = {
            "name": name,
            "state": "CREATED",
            "bundles": dict(enumerate(bundles)),
            "bundles_to_node_id": dict.fromkeys(range(len(bundles)), node),
        }


@pytest.mark.parametrize(("free", "node"), [((10, 10), 1), ((10, 3), 0), ((3, 3), 1)])
def test_an_instance_that_is_added_goes_to_the_node_with_the_fewest_that_has_the_memory(
    monkeypatch: pytest.MonkeyPatch, free: tuple[int, int], node: int
) -> None:
    groups = Groups()
    resources = {"CPU": 2.0, "memory": 1e9}
    monkeypatch.setattr(ray_places, "placement_group", groups.create)
    monkeypatch.setattr(ray_groups, "placement_group_table", lambda: groups.table)
    monkeypatch.setattr(
        ray_places.ray, "nodes", lambda: [{"NodeID": name, "Alive": True, "Resources": resources} for name in NODES]
    )
    places = RayPlaces(f"{ray_groups.NAMESPACE}app", "cluster", Config(cluster=ClusterConfig(device="cpu")))
    room = NodeRoom(dict(zip(NODES, free, strict=True)), {"decode-1": 8})
    places.place(Shape(1, 1), Shape(1, 1).ids(), NodeRoom({}, {}), on_gpu=False, elastic=True)
    places.place(Shape(1, 2), Shape(1, 2).ids(), room, on_gpu=False, elastic=True)
    assert places.look()["decode-1"].node == NODES[node]
