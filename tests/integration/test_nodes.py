"""A cluster on two nodes of this machine: each has its own address, agent and shard; one that dies is replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.supervisor.plan import Node
from alignedserve.config import ClusterConfig, Config, SupervisorConfig
from alignedserve.errors import UnavailableError
from alignedserve.proc_stat import is_alive

QUICK = SupervisorConfig(heartbeat_s=0.1, fence_after_s=1.0, stall_after_s=0.5, start_timeout_s=20.0)
NODES = (Node("node-0", "127.0.0.1"), Node("node-1", "127.0.0.2"))
APART = {"prefill-0": "node-0", "decode-0": "node-1"}


def make_cluster(placed: dict[str, str], prefill: int = 1, decode: int = 1) -> LocalCluster:
    config = Config(cluster=ClusterConfig(device="cpu", prefill=prefill, decode=decode), supervisor=QUICK)
    return LocalCluster(config, nodes=NODES, placed=placed, module="support.fake_roles")


async def eventually(check: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.02)


def nodes_of(cluster: LocalCluster) -> dict[str, str]:
    return {peer.process.id: peer.node_id for peer in cluster.view().peers}


def pools_of(cluster: LocalCluster) -> dict[str, str]:
    return {shard.pool_id: shard.node_id for shard in cluster.view().pools}


@pytest.mark.slow
async def test_each_node_has_its_own_agent_shard_and_address() -> None:
    async with make_cluster(APART) as cluster:
        await cluster.wait_ready(30)
        assert pools_of(cluster) == {"kv_pool-0": "node-0", "kv_pool-1": "node-1"}
        assert nodes_of(cluster) == {
            "node_agent-0": "node-0",
            "kv_pool-0": "node-0",
            "scheduler-0": "node-0",
            "prefill-0": "node-0",
            "node_agent-1": "node-1",
            "kv_pool-1": "node-1",
            "decode-0": "node-1",
        }
        hosts = {peer.process.id: peer.address.rpartition(":")[0] for peer in cluster.view().peers}
        assert {hosts[role_id] for role_id, node in nodes_of(cluster).items() if node == "node-1"} == {"127.0.0.2"}
        assert {hosts[role_id] for role_id, node in nodes_of(cluster).items() if node == "node-0"} == {"127.0.0.1"}
        sockets = [Path(cluster.supervisor.core.nodes.agent_socket(node.node_id)) for node in NODES]
        assert [path.name for path in sockets] == ["agent-0.sock", "agent-1.sock"]
        assert all(path.is_socket() for path in sockets)
    assert not any(path.parent.exists() for path in sockets)


async def test_a_process_is_ended_by_the_agent_of_its_own_node() -> None:
    async with make_cluster(APART) as cluster:
        await cluster.wait_ready(30)
        before = cluster.peer("decode-0")
        cluster.supervisor.core.broke(before.process, time.monotonic())
        after = await cluster.wait_restarted("decode-0", before.process.incarnation, 15)
        assert (after.node_id, is_alive(before.pid)) == ("node-1", False)


async def test_a_node_that_dies_takes_its_shard_with_it_and_its_instances_start_elsewhere() -> None:
    async with make_cluster({}, prefill=2, decode=2) as cluster:
        await cluster.wait_ready(30)
        assert sorted(node for role_id, node in nodes_of(cluster).items() if role_id[:6] == "decode") == [
            "node-0",
            "node-1",
        ]
        pids = {role_id: pid for role_id, pid in cluster.pids.items() if nodes_of(cluster)[role_id] == "node-1"}
        await cluster.launcher.kill_node("node-1")
        await eventually(lambda: set(pools_of(cluster)) == {"kv_pool-0"})
        assert cluster.supervisor.core.state() == "degraded"
        await cluster.wait_ready(30)
        assert set(nodes_of(cluster).values()) == {"node-0"}
        assert not any(is_alive(pid) for pid in pids.values())


async def test_an_instance_that_waits_for_a_node_is_named_and_a_node_that_joins_is_a_new_one() -> None:
    placed = dict(APART)
    async with make_cluster(placed) as cluster:
        await cluster.wait_ready(30)
        await cluster.launcher.kill_node("node-1")
        await eventually(lambda: "decode-0: waits for node node-1" in cluster.supervisor.core.degraded())
        status = await cluster.status()
        assert (status.state, list(status.missing)) == ("degraded", ["decode"])
        with pytest.raises(UnavailableError, match="waits for node node-1"):
            await cluster.wait_ready(0.5)
        placed["decode-0"] = "node-2"
        cluster.launcher.add_node(Node("node-2", "127.0.0.2"))
        await cluster.wait_ready(30)
        assert pools_of(cluster) == {"kv_pool-0": "node-0", "kv_pool-2": "node-2"}


async def test_a_supervisors_successor_knows_the_nodes_and_gives_no_number_twice() -> None:
    placed = dict(APART)
    async with make_cluster(placed) as cluster:
        await cluster.wait_ready(30)
        pids, nodes, pools = cluster.pids, nodes_of(cluster), pools_of(cluster)
        await cluster.restart_supervisor()
        await cluster.wait_ready(15)
        assert (cluster.pids, nodes_of(cluster), pools_of(cluster)) == (pids, nodes, pools)
        assert cluster.view().next_node == 2
        await cluster.launcher.kill_node("node-1")
        await eventually(lambda: set(pools_of(cluster)) == {"kv_pool-0"})
        await cluster.restart_supervisor()
        placed["decode-0"] = "node-2"
        cluster.launcher.add_node(Node("node-2", "127.0.0.2"))
        await cluster.wait_ready(30)
        assert "kv_pool-2" in pools_of(cluster)
