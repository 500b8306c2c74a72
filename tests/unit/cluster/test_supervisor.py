"""The supervisor with real processes whose roles only join, over real gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.runtime_dir import runtime_dir
from alignedserve.cluster.supervisor.role_settings import role_settings
from alignedserve.config import GPU_PASS_TOKENS, ClusterConfig, Config, SupervisorConfig
from alignedserve.control.role import RoleHost
from alignedserve.control.rpc import open_channel
from alignedserve.errors import AlignedServeError, ModelError
from alignedserve.proc_stat import is_alive
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import node_agent_pb2 as na
from alignedserve.proto import node_agent_pb2_grpc as na_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

QUICK = SupervisorConfig(
    heartbeat_s=0.1, fence_after_s=1.0, stall_after_s=0.5, start_timeout_s=20.0, max_start_failures=2
)


def make_cluster(cluster: ClusterConfig | None = None, **environment: str) -> LocalCluster:
    config = Config(cluster=cluster or ClusterConfig(device="cpu"), supervisor=QUICK)
    return LocalCluster(config, environment=environment, module="support.fake_roles")


async def eventually(check: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.02)


async def test_what_the_device_decides_is_decided_for_every_role_and_for_the_stores() -> None:
    config = Config(cluster=ClusterConfig(device="auto", share_gpu=True), supervisor=QUICK)
    async with LocalCluster(config, gpus=1, module="support.fake_roles") as cluster:
        supervisor = cluster.supervisor
        slots = supervisor.core.roster.slots.values()
        settings = [role_settings(supervisor.core, s, supervisor._tree, supervisor.identity, "") for s in slots]
        told = [given.config["prefill"] for given in settings]
    assert {prefill["token_budget"] for prefill in told} == {GPU_PASS_TOKENS}
    assert supervisor.core.planner._config.prefill.pass_tokens == GPU_PASS_TOKENS


async def test_its_room_is_given_back_while_agents_live_whatever_fails_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        agent = cluster.supervisor.core.roster.slots["node_agent-0"]
        agent_at_release: list[bool] = []

        async def release() -> None:
            agent_at_release.append(agent.ready)

        async def fail(*_: object) -> None:
            raise RuntimeError("no process can be ended")

        monkeypatch.setattr(cluster.launcher, "release", release)
        with monkeypatch.context() as patch:
            patch.setattr(cluster.supervisor, "_end_slots", fail)
            with pytest.raises(RuntimeError, match="no process can be ended"):
                await cluster.supervisor.end_all()
        assert agent_at_release == [True]
    assert agent_at_release == [True, True]


async def test_a_started_cluster_has_every_role_ready_and_leaves_nothing_behind() -> None:
    async with make_cluster(ClusterConfig(device="cpu", prefill=2)) as cluster:
        await cluster.wait_ready(30)
        status = await cluster.status()
        pids = [peer.pid for peer in status.peers]
        roles = sorted(peer.process.id for peer in status.peers)
        view = cluster.view()
        folder = Path(cluster.agent_socket).parent
        assert folder.is_dir()
    expected = ["decode-0", "kv_pool-0", "node_agent-0", "prefill-0", "prefill-1", "scheduler-0", "supervisor-0"]
    assert roles == expected
    assert (status.state, list(status.missing), list(status.degraded)) == ("ready", [], [])
    assert 'alignedserve_fake_up{instance="decode-0"} 1.0' in status.metrics
    assert view.store_plan
    assert view.model_info
    assert [(pair.decode_id, pair.prefill_id) for pair in view.pairs] == [
        ("decode-0", "prefill-0"),
        ("decode-0", "prefill-1"),
    ]
    assert not [pid for pid in pids if pid != os.getpid() and is_alive(pid)]
    assert not folder.exists()


# SIGUSR1 makes a fake role block its event loop; SIGUSR2 makes it have work and no progress.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1, signal.SIGUSR2])
async def test_a_role_that_dies_or_hangs_is_replaced_in_a_new_incarnation(number: signal.Signals) -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        before = cluster.peer("decode-0")
        plan = cluster.view().store_plan
        cluster.kill("decode-0", number)
        after = await cluster.wait_restarted("decode-0", before.process.incarnation, 15)
        assert after.pid != before.pid
        assert not is_alive(before.pid)
        assert cluster.view().store_plan == plan
        await cluster.wait_ready(5)


async def test_a_worker_whose_steps_take_long_is_not_taken_for_hung() -> None:
    async with make_cluster(FAKE_DECODE="step=60") as cluster:
        await cluster.wait_ready(30)
        before = cluster.peer("decode-0")
        cluster.kill("decode-0", signal.SIGUSR2)
        slot = cluster.supervisor.core.roster.slots["decode-0"]
        await eventually(lambda: slot.member is not None and slot.member.beat.busy)
        await asyncio.sleep(3 * QUICK.stall_after_s)
        assert cluster.peer("decode-0") == before


async def test_a_stopped_node_agent_is_replaced_and_does_not_hold_up_the_others() -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        agent, pool = cluster.peer("node_agent-0"), cluster.peer("kv_pool-0")
        cluster.kill("node_agent-0", signal.SIGSTOP)
        cluster.kill("kv_pool-0", signal.SIGSTOP)
        begun = time.monotonic()
        await cluster.wait_restarted("kv_pool-0", pool.process.incarnation, 15)
        await cluster.wait_restarted("node_agent-0", agent.process.incarnation, 15)
        assert time.monotonic() - begun < 10.0


async def test_a_dead_node_agent_is_replaced_and_does_not_hold_up_the_others() -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        agent, pool = cluster.peer("node_agent-0"), cluster.peer("kv_pool-0")
        cluster.kill("node_agent-0")
        cluster.kill("kv_pool-0")
        await cluster.wait_restarted("node_agent-0", agent.process.incarnation, 15)
        await cluster.wait_restarted("kv_pool-0", pool.process.incarnation, 15)


async def test_an_older_incarnation_and_a_stranger_are_refused() -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        refusals: list[str] = []
        for key in (
            pb.ProcessKey(role="decode", id="decode-0", incarnation=7),
            pb.ProcessKey(role="decode", id="decode-9", incarnation=time.time_ns()),
            pb.ProcessKey(role="prefill", id="decode-0", incarnation=time.time_ns()),
        ):
            host = RoleHost(
                key, "", cluster.supervisor.address, cluster.token, sv.Heartbeat, lambda view: None, refusals.append
            )
            seen = len(refusals)
            host.start()
            await eventually(lambda seen=seen: len(refusals) > seen)  # type: ignore[misc]
            await host.close()
        assert "newer incarnation" in refusals[0]
        await cluster.wait_ready(5)


async def test_the_node_agent_ends_no_process_that_is_not_of_this_cluster() -> None:
    stranger = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        async with make_cluster() as cluster:
            await cluster.wait_ready(30)
            channel = open_channel(cluster.address("node_agent-0"), cluster.token)
            end = na_grpc.NodeAgentStub(channel).EndProcess
            unknown = pb.ProcessKey(role="decode", id="decode-9", incarnation=time.time_ns())
            for key in (unknown, cluster.peer("decode-0").process):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await end(na.EndProcessRequest(process=key, pid=stranger.pid), timeout=10)
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert is_alive(stranger.pid)
            await channel.close()
    finally:
        stranger.kill()
        await stranger.wait()


async def test_a_gateway_may_join_and_leaves_the_view_when_it_is_gone() -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        key = pb.ProcessKey(role="gateway", id="gateway-x", incarnation=time.time_ns())
        views: list[sv.ClusterView] = []
        host = RoleHost(
            key, "127.0.0.1:1", cluster.supervisor.address, cluster.token, sv.Heartbeat, views.append, lambda r: None
        )
        host.start()
        await eventually(lambda: any(peer.process == key for peer in cluster.view().peers))
        await eventually(lambda: bool(views))
        await host.close()
        await eventually(lambda: not any(peer.process == key for peer in cluster.view().peers), 3)


GUEST = """
import asyncio, sys, time
from alignedserve.control.role import RoleHost
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

async def join(address, token):
    key = pb.ProcessKey(role="gateway", id="gateway-x", incarnation=time.time_ns())
    beat = sv.Heartbeat(state="ready")
    host = RoleHost(key, "127.0.0.1:1", address, token, lambda: beat, lambda view: None, print, node_id="local")
    host.start()
    await asyncio.sleep(600)

asyncio.run(join(*sys.argv[1:]))
"""


async def test_a_gateway_that_is_stopped_is_killed_and_leaves_the_view() -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        command = (sys.executable, "-c", GUEST, cluster.supervisor.address, cluster.token)
        guest = await asyncio.create_subprocess_exec(*command)

        def in_view() -> bool:
            return any(peer.process.id == "gateway-x" and peer.state == "ready" for peer in cluster.view().peers)

        try:
            await eventually(in_view, 20)
            guest.send_signal(signal.SIGSTOP)
            assert await asyncio.wait_for(guest.wait(), 10) == -signal.SIGKILL
            await eventually(lambda: not in_view(), 5)
        finally:
            if guest.returncode is None:
                guest.kill()
                await guest.wait()


async def test_a_model_that_cannot_be_loaded_fails_the_cluster_at_once_with_its_reason() -> None:
    async with make_cluster(FAKE_PREFILL="fail=model_error") as cluster:
        with pytest.raises(ModelError, match="prefill-0 was told to fail"):
            await cluster.wait_ready(20)
        assert (await cluster.status()).state == "failed"


async def test_a_role_that_keeps_dying_before_it_is_ready_fails_the_cluster() -> None:
    async with make_cluster(FAKE_KV_POOL="exit=0.1") as cluster:
        with pytest.raises(AlignedServeError, match="kv_pool-0 failed to start 2 times"):
            await cluster.wait_ready(20)


async def test_a_supervisors_successor_goes_on_with_the_processes_it_finds() -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        pids, version = cluster.pids, cluster.view().version
        plan = cluster.view().store_plan
        await cluster.restart_supervisor()
        await cluster.wait_ready(10)
        assert cluster.pids == pids
        assert cluster.view().version > version
        assert cluster.view().store_plan == plan


async def test_a_supervisors_successor_goes_on_to_an_end_that_was_asked_for() -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        pids = cluster.pids
        await cluster.supervisor.Stop(pb.Empty(), cast(Any, None))
        await asyncio.sleep(0.5)  # until every role has heard of it
        await cluster.restart_supervisor()
        async with asyncio.timeout(20.0):
            await cluster.supervisor.stop_asked.wait()
        assert cluster.supervisor.core.was_ready
        assert cluster.view().ending
        assert cluster.pids == pids


async def test_a_supervisor_that_is_closed_starts_nothing_when_a_process_ends() -> None:
    async with make_cluster() as cluster:
        await cluster.wait_ready(30)
        old, before = cluster.supervisor, cluster.peer("decode-0")
        await cluster.restart_supervisor()
        await cluster.wait_ready(10)
        launches: list[str] = []
        old._spawn = lambda work: launches.append(work.close() or "spawned")  # type: ignore[assignment,func-returns-value]
        cluster.kill("decode-0")
        await cluster.wait_restarted("decode-0", before.process.incarnation, 15)
        assert launches == []


async def test_a_role_whose_supervisors_port_belongs_to_another_process_by_now_ends_itself() -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and never answers
        key = pb.ProcessKey(role="decode", id="decode-0", incarnation=1)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        host = RoleHost(
            key, "", address, "x", sv.Heartbeat, lambda view: None, ended.put, heartbeat_s=0.02, orphan_after_s=0.3
        )
        host.start()
        assert "there was no supervisor" in await asyncio.wait_for(ended.get(), 3)
        await host.close()


async def test_only_calls_with_the_clusters_token_are_answered() -> None:
    async with make_cluster() as cluster:
        channel = open_channel(cluster.supervisor.address, "wrong")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sv_grpc.SupervisorStub(channel).GetStatus(pb.Empty(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()


def test_the_runtime_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALIGNEDSERVE_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_dir() == tmp_path / "alignedserve"
    assert runtime_dir().stat().st_mode & 0o777 == 0o700
