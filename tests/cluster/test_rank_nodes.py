"""An instance whose stages are on two Ray nodes, in namespaces of this test's own, and what is lost with one of them.

Everything runs on one cluster, in this order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.testing.models import make_model
from alignedserve.testing.reference import random_prompts
from support.certificates import Authority
from support.greedy_streams import Expected, stream
from support.namespaces import why_not
from support.ray_nodes import RayNodes, ServedNodes
from support.requirements import needs
from support.started import ranks_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,  # without Ray: integration/test_rank_nodes.py
    pytest.mark.timeout(300),
    needs(why_not()),
]

LENGTHS = (60, 33, 140, 17)
NEW_TOKENS = 400
ADDRESSES = ("127.0.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("nodes") / "model", seed=61, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return Expected.of(model, random_prompts(LENGTHS, vocab_size, seed=62), NEW_TOKENS)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    tls = Authority(tmp_path_factory.mktemp("tls")).environment("node", ADDRESSES)
    with RayNodes([{"prefill_node": 1}, {"decode_node": 1}, {"decode_node": 1}], tls) as running:
        yield running


@pytest.fixture(scope="module")
def served(nodes: RayNodes, model: Path) -> Iterator[ServedNodes]:
    tree = {
        "model": {"path": str(model)},
        "cluster": {
            "device": "cpu",
            "threads": 1,
            "prefill_resources": "prefill_node=1",
            "decode_resources": "decode_node=1",
        },
        "decode": {"pipeline_parallel": 2, "nodes": 2},
        "kv_pool": {"size_gib": 0.1, "block_size": 16, "verify": True},
        "log": {"dir": str(nodes.folder / "logs")},
    }
    with ServedNodes(nodes, tree) as application:
        yield application


def run(served: ServedNodes, expected: Expected, blow: Callable[[], None] | None = None) -> None:
    """The streams, in whose middle the blow falls: their tokens are those of `transformers`."""
    streamed = asyncio.run(stream(served.grpc_address, expected, blow))
    assert streamed.tokens == [list(answer) for answer in expected.answers]


def decode(served: ServedNodes) -> dict[str, str]:
    return next(role for role in served.status()["roles"] if role["id"] == "decode-0")


def host_of(nodes: RayNodes, served: ServedNodes) -> tuple[int, int]:
    """The machine with the second stage, and the pid of its process there."""
    first = decode(served)["node"].rpartition("-")[0]
    number = next(
        n for n, machine in enumerate(nodes.machines) if n and machine.name in nodes.alive() and machine.name != first
    )
    (pid,) = nodes.machines[number].pids("RankHostActor").values()
    return number, pid


def test_stages_are_on_two_nodes_and_tokens_are_exact(nodes: RayNodes, served: ServedNodes, expected: Expected) -> None:
    number, pid = host_of(nodes, served)
    assert nodes.machines[number].name in decode(served)["holds"]
    assert len(ranks_of(pid)) == 1
    crossed = nodes.switch.bytes_through(nodes.machines[number])[0]
    run(served, expected)
    assert nodes.switch.bytes_through(nodes.machines[number])[0] > crossed
    served.check_integrity()


def rank_there(pid: int, served: ServedNodes) -> int:
    (rank,) = ranks_of(pid)
    return rank


def host_there(pid: int, served: ServedNodes) -> int:
    return pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [rank_there, host_there])
def test_what_is_lost_on_the_other_node_costs_no_token(
    nodes: RayNodes,
    served: ServedNodes,
    expected: Expected,
    victim: Callable[[int, ServedNodes], int],
    number: int,
) -> None:
    _, pid = host_of(nodes, served)
    run(served, expected, lambda: os.kill(victim(pid, served), number))

    def replaced() -> bool:
        with contextlib.suppress(StopIteration, ValueError):  # it is being started
            return host_of(nodes, served)[1] != pid
        return False

    # The answers may end before the supervisor finds that a process is stopped.
    nodes.wait(replaced, f"{pid} is still the process of the second stage", 60.0)
    served.wait_ready(60.0)
    served.check_integrity()


def test_a_node_that_is_cut_off_for_a_moment_costs_no_token(
    nodes: RayNodes, served: ServedNodes, expected: Expected
) -> None:
    number, _ = host_of(nodes, served)
    machine = nodes.machines[number]

    def cut() -> None:
        nodes.switch.cut(machine)
        time.sleep(3.0)
        nodes.switch.heal(machine)

    run(served, expected, cut)
    served.wait_ready(60.0)
    run(served, expected)
    served.check_integrity()


def test_a_node_with_stages_alone_has_an_agent_and_no_shard(nodes: RayNodes, served: ServedNodes) -> None:
    number, _ = host_of(nodes, served)
    there = [
        role["id"] for role in served.status()["roles"] if role["node"].startswith(f"{nodes.machines[number].name}-")
    ]
    assert [name.rpartition("-")[0] for name in there] == ["node_agent"]


def test_a_node_that_is_killed_gives_its_stage_to_another(
    nodes: RayNodes, served: ServedNodes, expected: Expected
) -> None:
    number, _ = host_of(nodes, served)
    third = nodes.join({"decode_node": 1})
    run(served, expected, lambda: nodes.kill(number))
    served.wait_ready(90.0)
    where = {decode(served)["node"].rpartition("-")[0], nodes.machines[host_of(nodes, served)[0]].name}
    assert nodes.machines[third].name in where
    assert nodes.machines[number].name not in where
    run(served, expected)
    served.check_integrity()
