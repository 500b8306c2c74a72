"""Several Ray nodes in namespaces of this test's own: prefill on one, decode on another; one is cut off, one killed.

Ray's traffic and ours are authenticated and encrypted. Everything runs on one cluster, in this order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.cluster.cli.live_command import busy_channels
from alignedserve.testing.models import make_model
from alignedserve.testing.reference import random_prompts
from support.certificates import Authority
from support.greedy_streams import Expected, Streamed, stream
from support.namespaces import why_not
from support.ray_nodes import GCS_PORT, RayNodes, ServedNodes
from support.requirements import needs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,  # without Ray: integration/test_nodes.py, test_shards.py, test_topologies.py
    pytest.mark.timeout(300),
    needs(why_not()),
]

LENGTHS = (60, 33, 140, 17, 100, 64)
NEW_TOKENS = 600  # a stream that begins first goes on while the last one begins, also on a fast machine
BLOCK_SIZE = 16
ADDRESSES = ("127.0.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.3")
PREFILL_NODE, DECODE_NODE = 0, 1
ON_DECODE_NODE = ("node_agent-1", "kv_pool-1", "decode-0")
SHORT_CUT_S = 3.0  # Ray gives a machine up after ten or so


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("nodes") / "model", seed=51, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return Expected.of(model, random_prompts(LENGTHS, vocab_size, seed=52), NEW_TOKENS)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    tls = Authority(tmp_path_factory.mktemp("tls")).environment("node", ADDRESSES)
    with RayNodes([{"prefill_node": 1}, {"decode_node": 1}], tls) as running:
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
        "kv_pool": {"size_gib": 0.1, "block_size": BLOCK_SIZE, "verify": True},
        "log": {"dir": str(nodes.folder / "logs")},
    }
    with ServedNodes(nodes, tree) as application:
        yield application


def run(served: ServedNodes, expected: Expected, *blows: Any) -> Streamed:
    """The streams, in whose middle the blows fall: their tokens are those of `transformers`."""

    def blow() -> None:
        for each in blows:
            each()

    streamed = asyncio.run(stream(served.grpc_address, expected, blow if blows else None))
    assert streamed.tokens == [list(answer) for answer in expected.answers]
    return streamed


def placed(served: ServedNodes) -> dict[str, str]:
    """The machine of each role that is ready."""
    return {r["id"]: r["node"].rpartition("-")[0] for r in served.status()["roles"] if r["state"] == "ready"}


def block_bytes(model: Path) -> int:
    shape = json.loads((model / "config.json").read_text())
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    return int(shape["num_hidden_layers"] * shape["num_key_value_heads"] * 2 * head_dim * BLOCK_SIZE * 4)


def test_prefill_is_on_one_node_decode_on_another_and_each_has_a_shard(served: ServedNodes) -> None:
    where = placed(served)
    gateway = next(role_id for role_id in where if role_id.startswith("gateway"))
    assert where == {
        "supervisor-0": "node-0",
        gateway: "node-0",
        "scheduler-0": "node-0",
        "node_agent-0": "node-0",
        "kv_pool-0": "node-0",
        "prefill-0": "node-0",
        "node_agent-1": "node-1",
        "kv_pool-1": "node-1",
        "decode-0": "node-1",
    }
    hosts = {role["id"]: role["address"].rpartition(":")[0] for role in served.status()["roles"]}
    assert hosts["prefill-0"] == ADDRESSES[1]
    assert hosts["decode-0"] == hosts["kv_pool-1"] == ADDRESSES[2]


def test_tokens_are_exact_and_kv_crosses_over_gloo_and_not_through_rays_object_store(
    nodes: RayNodes, served: ServedNodes, expected: Expected, model: Path
) -> None:
    stored = nodes.object_store_bytes()
    crossed, _ = nodes.switch.bytes_through(nodes.machines[DECODE_NODE])
    run(served, expected)

    ends = [(prompt, end) for prompt in expected.prompts for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)]
    full = len({tuple(prompt[:end]) for prompt, end in ends})  # a cached beginning crosses once
    needed = (full + sum(length % BLOCK_SIZE > 0 for length in LENGTHS)) * block_bytes(model)
    crossed = nodes.switch.bytes_through(nodes.machines[DECODE_NODE])[0] - crossed
    assert crossed >= needed
    after = nodes.object_store_bytes()
    assert set(after) == {"node-0", "node-1"}
    assert sum(after.values()) - sum(stored.values()) < needed / 100
    into = [channel for channel in busy_channels(served.metrics()) if channel["destination"].startswith("decode-0/")]
    moved = [channel for channel in into if channel["source"].startswith(("prefill-0/", "kv_pool-0"))]
    assert {channel["channel"] for channel in moved} == {"gloo"}
    assert sum(channel["bytes"] for channel in moved) >= needed


def test_no_process_has_memory_of_another_node(nodes: RayNodes, served: ServedNodes) -> None:
    first, second = (set(machine.shared_memory()) for machine in nodes.machines)
    assert first
    assert second
    assert not first & second


def test_strangers_get_nowhere(nodes: RayNodes, served: ServedNodes) -> None:
    """Ray and our roles refuse peers without a token or without TLS."""
    environment = {k: v for k, v in nodes.environment.items() if not k.startswith("RAY_AUTH")}
    environment |= {"RAY_ADDRESS": f"{nodes.head.address}:{GCS_PORT}", "RAY_AUTH_MODE": "disabled"}
    command = (sys.executable, "-m", "alignedserve.cluster.cli.main", "serve", "--model", "tiny")
    done = subprocess.run(
        nodes.head.inside(*command), env=environment, capture_output=True, text=True, timeout=90.0, check=False
    )
    assert done.returncode == 1
    assert "cannot be joined" in done.stdout + done.stderr

    address = next(role["address"] for role in served.status()["roles"] if role["id"] == "kv_pool-1")
    script = (
        "import socket, sys; host, port = sys.argv[1].split(':'); s = socket.create_connection((host, int(port)), 10)\n"
        "s.sendall(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n' + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))\n"
        "try: print(s.recv(1).hex())\n"
        "except ConnectionResetError: print()"
    )
    said = nodes.head.run(sys.executable, "-c", script, address, environment=dict(os.environ))
    assert said.strip() in ("", "15")  # nothing, or TLS's alert; HTTP/2 in the clear would begin with 00


def test_a_node_that_is_cut_off_for_a_moment_costs_no_request(
    nodes: RayNodes, served: ServedNodes, expected: Expected
) -> None:
    before, machine = placed(served), nodes.machines[DECODE_NODE]
    passed: list[tuple[int, int]] = []
    healed_s: list[float] = []

    def cut() -> None:
        nodes.switch.cut(machine)
        passed.append(nodes.switch.bytes_through(machine))
        time.sleep(SHORT_CUT_S)
        passed.append(nodes.switch.bytes_through(machine))
        healed_s.append(time.monotonic())
        nodes.switch.heal(machine)

    streamed = run(served, expected, cut)
    served.wait_ready(60.0)
    assert passed[0] == passed[1]  # clients may read late what came before the cut, so their pause may be shorter
    assert min(came[-1] for came in streamed.came_s) > healed_s[0]
    assert placed(served) == before
    served.check_integrity()


def test_a_supervisor_that_starts_while_a_node_is_silent_goes_on_with_its_processes(
    nodes: RayNodes, served: ServedNodes, expected: Expected
) -> None:
    """Ray reaches the node: it counts as alive."""
    before = {role["id"]: role["pid"] for role in served.status()["roles"]}
    machine, there = nodes.machines[DECODE_NODE], [before[role_id] for role_id in ON_DECODE_NODE]

    def goes_on_alone() -> bool:
        try:
            status = served.status()
        except httpx.HTTPError:
            return False
        pids = {role["id"]: role["pid"] for role in status["roles"]}
        silent = [line for line in status["degraded"] if line.startswith("node node-1-")]
        return pids.get("supervisor-0", before["supervisor-0"]) != before["supervisor-0"] and bool(silent)

    try:
        for pid in there:
            machine.kill(pid, signal.SIGSTOP)
        nodes.head.kill(before["supervisor-0"])
        nodes.wait(goes_on_alone, "no supervisor says that the node is silent", 60.0)
    finally:
        for pid in there:
            machine.kill(pid, signal.SIGCONT)
    served.wait_ready(60.0)
    nodes.wait(lambda: placed(served).keys() >= set(ON_DECODE_NODE), "not everybody is back", 60.0)
    after = {role["id"]: role["pid"] for role in served.status()["roles"]}
    assert [after[role_id] for role_id in ON_DECODE_NODE] == there
    run(served, expected)
    served.check_integrity()


def test_a_node_that_ray_has_given_up_is_another_one_when_it_is_back(
    nodes: RayNodes, served: ServedNodes, expected: Expected
) -> None:
    machine = nodes.machines[DECODE_NODE]

    def cut_for_good() -> None:
        nodes.switch.cut(machine)
        nodes.wait(lambda: machine.name not in nodes.alive(), "Ray still counts the machine that is cut off")
        nodes.switch.heal(machine)
        nodes.wait(lambda: not machine.pids("raylet"), "a raylet that Ray declared dead still runs")
        nodes.start_ray(DECODE_NODE)

    run(served, expected, cut_for_good)
    served.wait_ready(90.0)
    where = placed(served)
    assert (where["decode-0"], where["kv_pool-2"]) == ("node-1", "node-1")
    assert "kv_pool-1" not in where
    run(served, expected)
    served.check_integrity()


def test_a_node_that_is_killed_has_its_requests_answered_by_another(
    nodes: RayNodes, served: ServedNodes, expected: Expected
) -> None:
    before, third = placed(served), nodes.join({"decode_node": 1})
    run(served, expected, lambda: nodes.kill(DECODE_NODE))
    served.wait_ready(90.0)
    where = placed(served)
    assert where["decode-0"] == f"node-{third}"
    assert [name for name in where.keys() - before.keys() if name.startswith("kv_pool-")]  # the new node's shard
    assert "node-1" not in where.values()
    run(served, expected)
    served.check_integrity()
