"""What a changed configuration requires of a running cluster."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.cluster.launch.launcher import Running
from alignedserve.cluster.supervisor import redeploy
from alignedserve.cluster.supervisor.inheritance import inherit
from alignedserve.cluster.supervisor.plan import Node, Shape
from alignedserve.cluster.supervisor.redeploy import (
    ALL_ROLES,
    COUNTS,
    DEGREES,
    DIVIDES_MEMORY,
    ROLLED,
    SERVES,
    Change,
    compare,
    compare_all,
)
from alignedserve.config import Config
from alignedserve.config_sources import from_arguments, known_keys, to_tree
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import UnavailableError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv


def change(**arguments: Any) -> Change:
    return compare(Config(), from_arguments(arguments))


def test_an_unchanged_configuration_asks_for_nothing() -> None:
    assert change().is_none
    assert str(change()) == "everything goes on"


@pytest.mark.parametrize(
    "arguments",
    [
        {"gateway": {"max_queue": 7, "drain_s": 3.0}},
        {"model": {"chat_template": "own.jinja"}},
        {"traces": {"sample": 0.1}},
        {"cluster": {"ray_metrics": False}},
    ],
)
def test_what_gateways_alone_read_leaves_everything_else_as_it_is(arguments: dict[str, Any]) -> None:
    assert change(**arguments).is_none


def test_other_numbers_of_instances_scale() -> None:
    assert change(cluster={"decode": 2}) == Change(shape=Shape(1, 2))


def test_pages_of_metrics_need_a_rolling_restart_only() -> None:
    asked = change(cluster={"role_metrics": True})
    assert asked.replaced_for == ()
    assert asked.rolled == ALL_ROLES


def test_keys_of_the_scheduler_are_read_by_instances_too() -> None:
    assert change(scheduler={"min_batch_requests": 9}).rolled == {"scheduler", "decode", "prefill"}


def test_the_scheduler_reads_whether_there_is_a_prefix_cache() -> None:
    assert change(kv_pool={"prefix_cache": False}).rolled == {"scheduler", "decode", "prefill", "kv_pool"}


def test_other_degrees_replace_the_instances_one_after_the_other() -> None:
    assert change(decode={"tensor_parallel": 2}) == Change(rolled=frozenset({"decode"}))
    assert change(cluster={"pipeline_parallel": 2}) == Change(rolled=frozenset({"decode", "prefill"}))


def test_on_gpus_other_degrees_replace_the_cluster_since_bundles_and_caches_depend_on_them() -> None:
    new = from_arguments({"decode": {"tensor_parallel": 2}})
    assert compare(Config(), new, on_gpus=True) == Change(("decode.tensor_parallel",))
    assert compare_all([("decode", Config())], new, on_gpus=True).replaced_for == ("decode.tensor_parallel",)


def test_both_at_once() -> None:
    found = change(cluster={"prefill": 3}, decode={"overlap": "off"})
    assert found == Change(shape=Shape(3, 1), rolled=frozenset({"decode"}))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "path", "other"),
        ("model", "served_name", "other"),
        ("kv_pool", "size_gib", 2.0),
        ("kv_pool", "block_size", 32),
        ("scheduler", "max_batch_share", 0.3),
        ("cluster", "prefetch", False),
        ("engine", "attention", "torch"),
    ],
)
def test_other_stores_or_another_model_replace_the_cluster(section: str, key: str, value: Any) -> None:
    found = change(**{"cluster": {"decode": 2}} | {section: {key: value}})
    assert found.replaced_for == (f"{section}.{key}",)
    assert not found.rolled
    assert found.shape is None


def test_processes_of_several_configurations_are_asked_for_all_of_it() -> None:
    first = from_arguments({"decode": {"overlap": "off"}})
    second = from_arguments({"kv_pool": {"growth_reserve": 0.2}, "cluster": {"decode": 5}})
    found = compare_all([("decode", first), ("kv_pool", second), ("prefill", first)], Config())
    assert found == Change(rolled=frozenset({"decode", "kv_pool"}))


class Found:
    """A launcher of a running cluster with `decode` instances and a dead supervisor. It was started with one instance.
    Its last known configuration asked for `followed`; 0: it got none."""

    def __init__(self, decode: int, followed: int) -> None:
        tree = to_tree(Config().on_device("cpu"))
        dead = sv.Peer(process=pb.ProcessKey(role="supervisor", incarnation=1), address="127.0.0.1:1", node_id="home")
        view = sv.ClusterView(
            version=5,
            prefill=1,
            decode=decode,
            supervisor=dead,
            followed_prefill=min(followed, 1),
            followed_decode=followed,
        )
        self._found = [Running(RoleSettings("decode", f"decode-{n}", tree, "c", "t"), view) for n in range(decode)]

    async def find(self) -> list[Running]:
        return self._found

    async def nodes(self) -> list[Node]:
        return [Node("home")]


@pytest.mark.parametrize(
    ("decode", "followed", "configured", "shape"),
    [
        pytest.param(1, 1, 3, Shape(1, 3), id="changed without a leader"),
        pytest.param(2, 1, 1, None, id="scaled, and the file is as it was"),
        pytest.param(2, 1, 2, Shape(1, 2), id="scaled, and the file asks for it now"),
        pytest.param(1, 0, 3, None, id="the file's content is unknown"),
    ],
)
async def test_numbers_of_instances_are_compared_with_those_followed_last_where_no_supervisor_lives(
    decode: int, followed: int, configured: int, shape: Shape | None
) -> None:
    launcher: Any = Found(decode, followed)
    inheritance = await inherit(launcher, from_arguments({"cluster": {"decode": configured}}), "code")
    assert inheritance.change == Change(shape=shape)


def test_every_key_that_is_named_is_one() -> None:
    assert {*COUNTS, *SERVES, *ROLLED, *DEGREES, *DIVIDES_MEMORY} <= set(known_keys())


class Refusing:
    """A supervisor that fails the first `refusals` orders; with `ending`, its cluster is ending at the last one."""

    def __init__(self, refusals: int, *, ending: bool = False) -> None:
        self.core = SimpleNamespace(was_ready=True, paused=False, ending=False, failure=None, view_version=1)
        self.core.scaling = SimpleNamespace()
        self.orders: list[object] = []
        self._refusals, self._ending = refusals, ending

    async def scale(self, prefill: int, decode: int) -> None:
        self._take((prefill, decode))

    async def restart(self, roles: Collection[str]) -> None:
        self._take(set(roles))

    def _take(self, order: object) -> None:
        self.orders.append(order)
        if self._refusals:
            self._refusals -= 1
            self.core.ending = self._ending and not self._refusals
            raise UnavailableError("no node agent reported its free memory; try again in a moment")


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redeploy, "_at_rest", lambda core: True)
    monkeypatch.setattr(redeploy, "RETRY_S", 0.0)


@pytest.mark.usefixtures("at_rest")
@pytest.mark.parametrize(
    ("asked", "order"), [(Change(rolled=frozenset({"decode"})), {"decode"}), (Change(shape=Shape(1, 2)), (1, 2))]
)
async def test_what_is_refused_for_a_moment_is_tried_again(asked: Change, order: object) -> None:
    supervisor: Any = Refusing(2)
    await redeploy.follow(asked, supervisor)
    assert supervisor.orders == [order] * 3


@pytest.mark.usefixtures("at_rest")
async def test_a_cluster_that_ends_is_not_asked_again() -> None:
    supervisor: Any = Refusing(2, ending=True)
    with pytest.raises(UnavailableError):
        await redeploy.follow(Change(rolled=frozenset({"decode"})), supervisor)
    assert len(supervisor.orders) == 2
