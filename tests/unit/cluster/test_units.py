"""Which instances are placed together, and what they request from a node."""

from __future__ import annotations

import pytest

from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.launch.ray_places import Bundle, RayPlaces
from alignedserve.cluster.launch.units import Unit, gpu_share, plan_units, resources_of, with_parts
from alignedserve.cluster.launch.vetting import eligible
from alignedserve.cluster.supervisor.plan import Shape
from alignedserve.config import ClusterConfig, Config
from alignedserve.config_sources import from_tree
from alignedserve.errors import ConfigError, ResourceError
from alignedserve.resources import parse_resources


def config(**cluster: object) -> Config:
    return Config(cluster=ClusterConfig(**cluster))  # type: ignore[arg-type]


def units(asked: Config, prefill: int, decode: int, share: float) -> list[tuple[tuple[str, ...], dict[str, float]]]:
    return [(unit.instances, dict(unit.resources)) for unit in plan_units(asked, Shape(prefill, decode).ids(), share)]


def test_on_gpus_those_that_are_paired_share_a_node() -> None:
    assert units(config(), 2, 5, 1.0) == [
        (("prefill-0", "decode-0", "decode-2", "decode-4"), {"GPU": 4.0}),
        (("prefill-1", "decode-1", "decode-3"), {"GPU": 3.0}),
    ]
    assert [names for names, _ in units(config(), 3, 1, 1.0)] == [("decode-0", "prefill-0", "prefill-1", "prefill-2")]
    assert [names for names, _ in units(config(), 0, 2, 1.0)] == [("decode-0",), ("decode-1",)]


def test_partners_that_a_node_has_no_gpus_for_are_placed_alone_unless_pairs_are_configured() -> None:
    def names(tree: dict[str, object], prefill: int, decode: int, node_gpus: int) -> list[tuple[str, ...]]:
        asked = from_tree(tree)
        instances = with_parts(asked, Shape(prefill, decode).ids())
        return [unit.instances for unit in plan_units(asked, instances, 1.0, node_gpus)]

    unequal = {"prefill": {"tensor_parallel": 4}, "decode": {"tensor_parallel": 8}}
    assert names(unequal, 1, 1, 8) == [("prefill-0",), ("decode-0",)]
    assert names({**unequal, "cluster": {"placement": "pairs"}}, 1, 1, 8) == [("prefill-0", "decode-0")]
    assert names(unequal, 1, 1, 16) == names(unequal, 1, 1, 0) == [("prefill-0", "decode-0")]
    assert names({}, 1, 4, 4) == [("prefill-0", "decode-0", "decode-1", "decode-2"), ("decode-3",)]
    spread = {"cluster": {"tensor_parallel": 8}, "decode": {"pipeline_parallel": 2, "nodes": 2}}
    assert names(spread, 1, 1, 8) == [("prefill-0",), ("decode-0",), ("decode-0.1",)]


def test_what_an_instance_has_on_further_nodes_is_a_unit_of_its_own() -> None:
    """Of three stages of two ranks the second node has four ranks."""
    tree = {
        "cluster": {"tensor_parallel": 2, "decode_resources": "b=1"},
        "decode": {"pipeline_parallel": 3, "nodes": 2},
    }
    spread = from_tree(tree)
    instances = with_parts(spread, Shape(1, 2).ids())
    assert instances[3:] == [("decode", "decode-0.1"), ("decode", "decode-1.1")]
    assert {unit.instances[0]: dict(unit.resources) for unit in plan_units(spread, instances, 1.0)} == {
        "prefill-0": {"GPU": 2.0},
        "decode-0": {"b": 1.0, "GPU": 2.0},
        "decode-1": {"b": 1.0, "GPU": 2.0},
        "decode-0.1": {"b": 1.0, "GPU": 4.0},
        "decode-1.1": {"b": 1.0, "GPU": 4.0},
    }
    pairs = from_tree({**tree, "cluster": {"tensor_parallel": 2, "placement": "pairs"}})
    assert [unit.instances for unit in plan_units(pairs, with_parts(pairs, Shape(1, 1).ids()), 1.0)] == [
        ("prefill-0", "decode-0"),
        ("decode-0.1",),
    ]


@pytest.mark.parametrize(
    ("cluster", "share", "together"),
    [
        ({}, 0.0, False),
        ({"placement": "pairs"}, 0.0, True),
        ({"placement": "spread"}, 1.0, False),
        ({"decode_resources": "decode_node=1"}, 1.0, False),
        ({"decode_resources": "decode_node=1", "placement": "pairs"}, 1.0, True),
        ({"placement": "pairs", "prefetch": False}, 1.0, False),
    ],
)
def test_what_the_placement_says(cluster: dict[str, object], share: float, together: bool) -> None:
    assert (len(units(config(**cluster), 1, 1, share)) == 1) is together


def test_a_bundle_asks_for_all_that_its_instances_take_and_at_least_for_something() -> None:
    own = config(prefill_resources="a=1,CPU=2", decode_resources="b=0.5", placement="pairs")
    assert units(own, 1, 2, 1.0) == [
        (("prefill-0", "decode-0", "decode-1"), {"a": 1.0, "CPU": 2.0, "b": 1.0, "GPU": 3.0})
    ]
    assert units(config(), 1, 1, 0.0) == [(("prefill-0",), {"CPU": 0.01}), (("decode-0",), {"CPU": 0.01})]
    assert resources_of(own, "decode", 0.5) == {"b": 0.5, "GPU": 0.5}


@pytest.mark.parametrize(
    ("shape", "gpus", "share"),
    [
        (Shape(1, 1), [1], 0.5),
        (Shape(1, 1), [2], 1.0),
        (Shape(1, 1), [1, 1], 0.5),  # a pair is on one node
        (Shape(2, 2), [2, 2], 1.0),
        (Shape(1, 3), [2], 0.5),
        (Shape(1, 2), [], 0.333),
    ],
)
def test_as_few_share_a_gpu_as_can_be(shape: Shape, gpus: list[int], share: float) -> None:
    assert gpu_share(config(share_gpu=True), shape, gpus) == share
    assert gpu_share(config(), shape, gpus) == 1.0


def test_an_instance_asks_for_a_gpu_for_each_rank() -> None:
    own = from_tree(
        {"cluster": {"share_gpu": True}, "prefill": {"tensor_parallel": 2}, "decode": {"pipeline_parallel": 4}}
    )
    assert units(own, 1, 1, 1.0) == [(("prefill-0", "decode-0"), {"GPU": 6})]
    assert gpu_share(own, Shape(1, 1), [8]) == 1.0
    assert gpu_share(own, Shape(1, 1), [3]) == 0.5
    assert gpu_share(own, Shape(2, 2), [6, 6]) == 1.0
    four = from_tree({"cluster": {"share_gpu": True, "tensor_parallel": 4}})
    assert gpu_share(four, Shape(1, 1), [3]) == 0.25  # a third each would be two GPUs for each instance
    names = ("prefill-0", "decode-0")
    places = RayPlaces("app", "id", own)
    for gpus, asked in ((6.0, [2.0, 4.0]), (3.0, [1.0, 2.0]), (1.0, [0.332, 0.664])):
        places._bundles = dict.fromkeys(names, Bundle("00" * 18, 0, names, {"GPU": gpus}, "node"))
        found = [places.options(name.partition("-")[0], name)["num_gpus"] for name in names]
        assert found == pytest.approx(asked)


def test_rays_bundles_have_no_fractions_over_one() -> None:
    assert units(config(share_gpu=True), 1, 4, 0.333) == [
        (("prefill-0", "decode-0", "decode-1", "decode-2", "decode-3"), {"GPU": 2})
    ]


def test_resources_are_read_as_they_are_written() -> None:
    assert parse_resources(" a=1 , b=0.5,", "key") == {"a": 1.0, "b": 0.5}
    assert parse_resources("", "key") == {}


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=0", "a=-1", "a=x", "a=1,a=2", "GPU=1", "a=1.5", "a=inf", "a=nan"])
def test_what_are_no_resources_is_refused_with_the_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.prefill_resources"):
        config(prefill_resources=text)


@pytest.mark.parametrize(
    ("gpus", "instances", "share"),
    [(0.0, 2, 0.0), (0.5, 1, 0.5), (0.666, 2, 0.333), (1.0, 3, 0.333), (2.0, 2, 1.0), (2.0, 3, 0.5), (2.0, 5, 0.333)],
)
def test_the_instances_of_a_bundle_fit_its_gpus(gpus: float, instances: int, share: float) -> None:
    """Ray gives an actor a share of one GPU, so whole shares must fit on each GPU."""
    names = tuple(f"decode-{number}" for number in range(instances))
    places = RayPlaces("app", "id", Config())
    places._bundles = dict.fromkeys(names, Bundle("00" * 18, 0, names, {"GPU": gpus}, "node"))
    assert [places.options("decode", name)["num_gpus"] for name in names] == [share] * instances
    if gpus > 1.0:
        assert int(1 / share) * gpus >= instances


def test_what_is_added_is_wished_for_where_its_resources_are_and_the_fewest_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = config(prefill_resources="fast=1", decode_resources="fast=1", placement="spread")
    places = RayPlaces("app", "id", own)
    for name, node in (("prefill-0", "a"), ("decode-0", "b")):
        places._bundles[name] = Bundle(node, 0, (name,), {"fast": 1.0}, node)
    wished: list[str] = []
    monkeypatch.setattr(places, "_create", lambda units, **options: wished.append(options["_soft_target_node_id"]))
    new = plan_units(own, [("decode", f"decode-{number}") for number in (1, 2, 3)], 0.0)
    nodes = {"home": {"CPU": 8.0}, "a": {"fast": 2.0}, "b": {"fast": 9.0}}
    places._add(new, Shape(1, 4), nodes, NodeRoom({}, {}), on_gpu=False)
    assert wished == ["a", "b", "b"]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"a": {"GPU": 8.0}}, "need 2 big .*all nodes together have only 0"),
        ({"a": {"GPU": 8.0, "big": 1.0}}, "need 2 big .*all nodes together have only 1"),
        ({"a": {"big": 2.0}, "b": {"GPU": 4.0}}, "need 1 GPU, 1 big on one node for decode-0"),
        ({"a": {"GPU": 1.0, "big": 2.0}, "b": {"GPU": 1.0}}, "need 3 GPU"),
    ],
)
def test_what_no_node_has_is_refused_before_anything_ends(nodes: dict[str, dict[str, float]], said: str) -> None:
    asked = plan_units(config(decode_resources="big=1"), Shape(1, 2).ids(), 1.0)
    with pytest.raises(ResourceError, match=said):
        eligible(nodes, asked)


def test_a_pair_that_no_node_has_room_for_could_be_placed_apart() -> None:
    asked = plan_units(config(placement="pairs"), Shape(1, 1).ids(), 1.0)
    with pytest.raises(ResourceError, match=r"2 GPU on one node for prefill-0, decode-0 .*cluster\.placement: spread"):
        eligible({"a": {"GPU": 1.0}, "b": {"GPU": 1.0}}, asked)


def test_a_model_is_looked_for_where_instances_can_be() -> None:
    asked = plan_units(config(decode_resources="big=1"), Shape(1, 2).ids(), 1.0)
    nodes = {"head": {"CPU": 4.0}, "a": {"GPU": 2.0, "big": 2.0}, "b": {"GPU": 1.0}}
    assert eligible(nodes, asked) == ["a", "b"]


def test_shares_of_a_node_that_were_taken_and_given_back_leave_it_whole() -> None:
    left = 1.0
    for share in (0.1, 0.2, -0.2, -0.1):
        left -= share
    assert left < 1.0
    unit = Unit(("decode-0",), {"GPU": 1.0})
    assert unit.fits({"GPU": left})
    assert eligible({"node": {"GPU": left}}, [unit]) == ["node"]
    assert not unit.fits({"GPU": 0.999})
