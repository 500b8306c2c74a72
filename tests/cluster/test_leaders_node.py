"""The node with the supervisor and the scheduler goes, drained or killed; the cluster and its streams go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.testing.models import make_model
from alignedserve.testing.reference import random_prompts
from support.greedy_streams import Expected, stream
from support.namespaces import why_not
from support.ray_nodes import RayNodes, ServedNodes
from support.requirements import needs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    needs(why_not()),
]

DRAIN_S = 1.0  # 30 unless said; in both cases less than what Serve gives the supervisor to end
INSTANCES = ("prefill-0", "decode-0")
LEADERS = ("supervisor-0", "scheduler-0")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes([{}, {"leader": 1}], {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S)}) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("drained") / "model", seed=61)


@pytest.fixture(scope="module")
def served(nodes: RayNodes, model: Path) -> Iterator[ServedNodes]:
    tree = {
        "model": {"path": str(model)},
        "cluster": {"device": "cpu", "threads": 1, "prefill_resources": "head=1", "decode_resources": "head=1"},
        "kv_pool": {"size_gib": 0.1},
    }
    with ServedNodes(nodes, tree, supervisor="leader") as application:
        yield application


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return Expected.of(model, random_prompts((60, 33, 17), vocab_size, seed=62), 300)


def lose_leader(served: ServedNodes, expected: Expected, lose: Callable[[int], None]) -> None:
    """The instances' processes go on, and another node has the supervisor and the scheduler."""
    nodes = served.nodes
    before = {role["id"]: role for role in served.status()["roles"]}
    leading = len(nodes.machines) - 1
    assert {before[name]["node"].rpartition("-")[0] for name in LEADERS} == {f"node-{leading}"}
    heir = nodes.join({"leader": 1})

    def blow() -> None:
        lose(leading)
        nodes.wait(lambda: not nodes.machines[leading].pids("raylet"), "the machine does not end")

    streamed = asyncio.run(stream(served.grpc_address, expected, blow))
    assert streamed.tokens == [list(answer) for answer in expected.answers]
    served.wait_ready(90.0)
    after = {role["id"]: role for role in served.status()["roles"] if role["state"] == "ready"}
    assert {after[name]["node"].rpartition("-")[0] for name in LEADERS} == {f"node-{heir}"}
    assert [after[name]["pid"] for name in INSTANCES] == [before[name]["pid"] for name in INSTANCES]
    served.check_integrity()


def test_a_node_that_is_drained_takes_nothing_else_with_it(
    nodes: RayNodes, served: ServedNodes, expected: Expected
) -> None:
    """`ray start --block` drains its node on a SIGTERM; the cluster is not the supervisor's to end."""
    lose_leader(served, expected, nodes.shut_down)


def test_nor_does_one_that_is_killed(nodes: RayNodes, served: ServedNodes, expected: Expected) -> None:
    lose_leader(served, expected, nodes.kill)
