"""The node with the supervisor is drained, as `ray start --block` does on a SIGTERM: the cluster is not its to end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from alignedserve.testing.greedy_streams import Expected, stream
from alignedserve.testing.models import make_model
from alignedserve.testing.namespaces import why_not
from alignedserve.testing.ray_nodes import RayNodes, ServedNodes
from alignedserve.testing.reference import random_prompts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(reason := why_not()), reason=reason),
]

DRAINED = 1
DRAIN_S = 1.0  # 30 unless said; in both cases less than what Serve gives the supervisor to end
INSTANCES = ("prefill-0", "decode-0")


def test_the_cluster_goes_on_without_the_node_that_its_supervisor_was_on(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model", seed=61)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    expected = Expected.of(model, random_prompts((60, 33, 17), vocab_size, seed=62), 300)
    on_head = {"prefill_resources": "head=1", "decode_resources": "head=1"}
    tree = {
        "model": {"path": str(model)},
        "cluster": {"device": "cpu", "threads": 1, **on_head},
        "kv_pool": {"size_gib": 0.1},
    }
    drain = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_S)}
    with RayNodes([{}, {"leader": 1}], drain) as nodes, ServedNodes(nodes, tree, supervisor="leader") as served:
        before = {role["id"]: role for role in served.status()["roles"]}
        assert before["supervisor-0"]["node"].startswith("node-1")
        third = nodes.join({"leader": 1})

        def drained() -> None:
            nodes.shut_down(DRAINED)
            nodes.wait(lambda: not nodes.machines[DRAINED].pids("raylet"), "the machine does not end")

        streamed = asyncio.run(stream(served.grpc_address, expected, drained))
        assert streamed.tokens == [list(answer) for answer in expected.answers]
        served.wait_ready(90.0)
        after = {role["id"]: role for role in served.status()["roles"] if role["state"] == "ready"}
        assert after["supervisor-0"]["node"].startswith(f"node-{third}")
        assert [after[name]["pid"] for name in INSTANCES] == [before[name]["pid"] for name in INSTANCES]
        served.check_integrity()
