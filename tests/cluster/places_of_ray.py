"""Where instances are placed, on a Ray cluster of three small nodes on this machine.

pytest finds this file by its name only: `test_ray_places.py` runs it in a process of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private.authentication_test_utils import reset_auth_token_state
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.launch.ray_groups import NAMESPACE, group_name, groups, leave_nothing
from alignedserve.cluster.launch.ray_launcher import RayLauncher
from alignedserve.cluster.launch.ray_places import RayPlaces
from alignedserve.cluster.serve.ray_session import ENVIRONMENT, OBJECT_STORE_BYTES
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import Shape
from alignedserve.config import ClusterConfig, Config
from alignedserve.errors import ResourceError, UnavailableError
from support.ray_nodes import HEALTH_CHECKS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

NODES: tuple[dict[str, float], ...] = ({}, {"fast": 4}, {"fast": 4})
WITHIN_S = 60.0


class Machines:
    """The first is the supervisor's; it has nothing that instances ask for."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.cluster = Cluster()
        self.nodes: list[Any] = []

    def add(self, resources: dict[str, float]) -> Any:
        node = self.cluster.add_node(
            num_cpus=1,
            resources=resources,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            include_log_monitor=False,
            temp_dir=self._folder,
        )
        self.nodes.append(node)
        return node

    def kill(self, node: Any) -> None:
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    folder = tempfile.mkdtemp(prefix="as-", dir="/tmp")  # sockets want a short path
    on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray puts its own in its place
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **ENVIRONMENT,
            **HEALTH_CHECKS,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }.items():
            patch.setenv(name, value)
        # Else it tells the whole machine of itself, where `address="auto"` looks.
        patch.setattr(ray._private.utils, "write_ray_address", lambda address: None)
        reset_auth_token_state()
        running = Machines(folder)
        try:
            for resources in NODES:
                running.add(resources)
            ray.init(address=running.cluster.address, log_to_driver=False)
            yield running
        finally:
            ray.shutdown()
            running.cluster.shutdown()
            signal.signal(signal.SIGTERM, on_sigterm)
            shutil.rmtree(folder, ignore_errors=True)
    reset_auth_token_state()


@pytest.fixture(autouse=True)
def no_group_is_left(machines: Machines) -> Iterator[None]:
    yield
    assert [group.entry["name"] for group in groups()] == []
    deadline = time.monotonic() + WITHIN_S
    while ray.available_resources().get("fast", 0.0) < sum(resources.get("fast", 0.0) for resources in NODES):
        assert time.monotonic() < deadline, "the room of removed groups has not come back"
        time.sleep(0.02)


def config(placement: str, resource: str = "fast") -> Config:
    asked = f"{resource}=1"
    cluster = ClusterConfig(device="cpu", placement=placement, prefill_resources=asked, decode_resources=asked)
    return Config(cluster=cluster)


class Placed:
    """`RayPlaces` of a cluster of its own, and what it is asked for."""

    def __init__(self, placement: str) -> None:
        self.places = RayPlaces(f"{NAMESPACE}app", secrets.token_hex(4), config(placement))

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *_: object) -> None:
        self.places.release()

    def place(self, prefill: int, decode: int) -> dict[str, str]:
        """The node of each instance, once each has one."""
        shape = Shape(prefill, decode)
        self.places.place(shape, shape.ids(), NodeRoom({}, {}), on_gpu=False, elastic=True)
        deadline = time.monotonic() + WITHIN_S
        while "" in (where := {name: bundle.node for name, bundle in self.places.look().items()}).values():
            assert time.monotonic() < deadline, where
            time.sleep(0.02)
        assert where.keys() >= {name for _, name in shape.ids()}
        return where


def per_node(where: dict[str, str]) -> list[int]:
    return sorted(Counter(where.values()).values())


def test_pairs_share_a_node_and_are_apart_from_each_other() -> None:
    with Placed("pairs") as placed:
        where = placed.place(2, 2)
    assert where["prefill-0"] == where["decode-0"]
    assert where["prefill-1"] == where["decode-1"]
    assert per_node(where) == [2, 2]


def test_what_is_no_pair_is_spread(machines: Machines) -> None:
    with Placed("spread") as placed:
        where = placed.place(2, 2)
    assert set(where.values()) == {node.node_id for node in machines.nodes[1:]}


def test_one_that_is_added_joins_those_that_it_is_paired_with() -> None:
    with Placed("pairs") as placed:
        before = placed.place(2, 2)
        where = placed.place(2, 4)
    assert {name: where[name] for name in before} == before
    for decode, prefill in (("decode-2", "prefill-0"), ("decode-3", "prefill-1")):
        assert where[decode] == where[prefill]


def test_those_that_are_added_go_where_the_fewest_are_of_nodes_that_have_what_they_ask_for() -> None:
    with Placed("spread") as placed:
        assert per_node(placed.place(1, 1)) == [1, 1]
        assert per_node(placed.place(1, 2)) == [1, 2]
        assert per_node(placed.place(1, 3)) == [2, 2]
        assert per_node(placed.place(1, 5)) == [3, 3]


def test_what_was_added_gives_its_room_back_and_the_first_group_keeps_its_own() -> None:
    with Placed("spread") as placed:
        first = placed.place(1, 2)
        placed.place(1, 3)
        assert len(groups()) == 2
        assert placed.place(1, 1) == first
        assert len(groups()) == 1
        again = placed.place(1, 3)
        assert {name: again[name] for name in first} == first
        assert len(again) == 4


def test_ray_alone_must_have_what_is_asked_for() -> None:
    with Placed("spread") as placed, pytest.raises(ResourceError, match="9 fast"):
        placed.places.place(Shape(1, 8), Shape(1, 8).ids(), NodeRoom({}, {}), on_gpu=False, elastic=False)


def test_a_successor_finds_the_places_and_another_cluster_of_the_name_removes_them() -> None:
    with Placed("spread") as first:
        before = first.place(1, 1)
        successor = RayPlaces(first.places._namespace, first.places._cluster_id, config("spread"))
        successor.place(Shape(1, 1), Shape(1, 1).ids(), NodeRoom({}, {}), on_gpu=False, elastic=True)
        assert {name: bundle.node for name, bundle in successor.look().items()} == before
        with Placed("spread") as other:
            other.place(1, 2)
            assert first.places.look() == {}
            assert len(groups()) == 1


def test_after_its_release_nothing_is_placed() -> None:
    with Placed("spread") as placed:
        placed.place(1, 2)
        placed.place(1, 3)
        placed.places.release()
        assert groups() == []
        with pytest.raises(UnavailableError, match="has ended"):
            placed.place(1, 3)
    assert groups() == []


def test_a_group_that_was_removed_is_made_again() -> None:
    async def run() -> None:
        launcher = RayLauncher(f"{NAMESPACE}app", config("spread"))
        shape = Shape(1, 1)
        await launcher.nodes()
        await launcher.place("id", shape, shape.ids(), NodeRoom({}, {}), on_gpu=False)
        for group in groups():
            group.remove()
        placement = await launcher.placement()
        await launcher.release()
        assert sorted(placement.where) == ["decode-0", "prefill-0"]

    asyncio.run(run())


def test_what_waits_is_named_and_placed_when_a_node_comes_and_again_when_that_has_gone(machines: Machines) -> None:
    waiting = dict.fromkeys(("prefill-0", "decode-0"), "waits for a node with 1 late")
    shape = Shape(1, 1)

    async def until(launcher: RayLauncher, nodes: set[str]) -> Placement:
        deadline = time.monotonic() + WITHIN_S
        while True:
            placement = await launcher.placement()
            found = {launcher._node_ids[node] for node in placement.where.values()}
            if found == nodes and len(placement.where) in (0, shape.instances):
                return placement
            assert time.monotonic() < deadline, placement
            await asyncio.sleep(0.1)

    async def run(launcher: RayLauncher) -> None:
        home, *_ = await launcher.nodes()
        await launcher.place("id", shape, shape.ids(), NodeRoom({}, {}), on_gpu=False)
        assert (await until(launcher, set())).waiting == waiting
        added = machines.add({"late": 2})
        placement = await until(launcher, {added.node_id})
        assert (placement.waiting, placement.nodes[0]) == ({}, home)
        machines.kill(added)
        placement = await until(launcher, set())
        assert (placement.waiting, len(placement.nodes)) == (waiting, len(NODES))
        another = machines.add({"late": 2})
        assert (await until(launcher, {another.node_id})).waiting == {}

    launched = RayLauncher(f"{NAMESPACE}app", config("spread", "late"))
    try:
        asyncio.run(run(launched))
    finally:
        asyncio.run(launched.release())


@ray.remote(num_cpus=0)
class Somebody:
    """Has a name, as a role or a supervisor's replica has one."""

    def answer(self) -> None:
        pass


def start(name: str, namespace: str) -> Any:
    somebody = Somebody.options(name=name, namespace=namespace).remote()  # type: ignore[attr-defined]
    ray.get(somebody.answer.remote())
    return somebody


def make_group(name: str) -> Any:
    group = placement_group([{"fast": 0.1}], name=name, lifetime="detached")
    assert group.wait(WITHIN_S)
    return group


def test_a_start_removes_groups_of_dead_clusters_and_of_no_others() -> None:
    namespaces = {name: f"{NAMESPACE}{name}" for name in ("dead", "led", "running", "app/else")}
    made = [make_group(group_name(namespace, "id", [["decode-0"]])) for namespace in namespaces.values()]
    made.append(make_group("somebody-else/id/decode-0"))
    living = [
        start("SERVE_REPLICA::led#Supervisor#abc", "serve"),
        start("decode-0", namespaces["running"]),
        start("scheduler-0", namespaces["app/else"]),
    ]
    try:
        with Placed("spread") as placed:
            placed.place(1, 1)
            left = {group.namespace for group in groups()}
        assert left == {f"{NAMESPACE}app", *(namespaces[name] for name in ("led", "running", "app/else"))}
        table = placement_group_table()
        assert table[made[-1].id.hex()]["state"] == "CREATED"
    finally:
        for group in made:
            remove_placement_group(group)
        for actor in living:
            ray.kill(actor)


def test_of_roles_that_no_supervisor_comes_for_the_last_removes_the_groups() -> None:
    namespace = f"{NAMESPACE}orphans"
    make_group(group_name(namespace, "id", [["prefill-0"], ["decode-0"]]))
    agent, prefill = start("node_agent-0", namespace), start("prefill-0", namespace)
    said: list[bool] = []
    waiting = threading.Thread(target=lambda: said.append(leave_nothing(namespace, "node_agent-0")))
    waiting.start()
    assert leave_nothing(namespace, "prefill-0") is False
    assert [group.namespace for group in groups()] == [namespace]
    ray.kill(prefill)
    waiting.join(WITHIN_S)
    assert said == [True]
    assert groups() == []
    ray.kill(agent)


def test_a_role_that_is_cut_off_removes_nothing_while_there_is_a_supervisor() -> None:
    namespace = f"{NAMESPACE}cut"
    group = make_group(group_name(namespace, "id", [["decode-0"]]))
    supervisor = start("SERVE_REPLICA::cut#Supervisor#abc", "serve")
    assert leave_nothing(namespace, "decode-0") is False
    assert [group.namespace for group in groups()] == [namespace]
    remove_placement_group(group)
    ray.kill(supervisor)


def test_another_cluster_could_have_what_groups_of_other_applications_leave(machines: Machines) -> None:
    def fast(places: RayPlaces) -> float:
        return sum(resources.get("fast", 0.0) for resources in places.could_give().values())

    other = RayPlaces(f"{NAMESPACE}other", secrets.token_hex(4), config("spread"))
    with Placed("spread") as placed:
        before = placed.place(1, 1)
        assert set(before.values()) <= placed.places.could_give().keys()
        assert (fast(placed.places), fast(other)) == (8.0, 6.0)
    assert fast(other) == 8.0
