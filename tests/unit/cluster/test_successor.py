"""A supervisor's successor finds a stopped process, and ends it before it starts a replacement."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from alignedserve.cluster.launch.launcher import Running
from alignedserve.cluster.launch.processes import Sight
from alignedserve.cluster.node.supervisor_guard import AGENT_FIRST_S, guard_supervisor
from alignedserve.cluster.supervisor.actions import Fence, FenceGuest, Launch
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.handover import known_processes
from alignedserve.cluster.supervisor.hang_detector import STOPPED_S
from alignedserve.cluster.supervisor.plan import plan_roles
from alignedserve.config import ClusterConfig, Config
from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.errors import ConfigError
from alignedserve.proc_stat import is_alive
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

ROLES = ("node_agent-0", "kv_pool-0", "scheduler-0", "prefill-0", "decode-0")
STOPPED = Sight(stopped=True, traced=False, cpu_s=0.0)


def told(*, pid: int = 100) -> sv.ClusterView:
    """The predecessor's last view: all roles ready, and a gateway."""
    peers = [
        sv.Peer(
            process=pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=7),
            pid=pid + number,
            node_id="here",
            address=f"127.0.0.1:{number + 1}",
            state="ready",
        )
        for number, role_id in enumerate((*ROLES, "gateway-9"))
    ]
    return sv.ClusterView(peers=peers, was_ready=True)


def successor(view: sv.ClusterView) -> SupervisorCore:
    config = Config(cluster=ClusterConfig(device="cpu"))
    core = SupervisorCore(config, plan_roles(config, 0))
    core.has_served = view.was_ready
    found = [
        Running(RoleSettings(peer.process.role, peer.process.id, {}, "c", "t", node_id="here"), view, peer.pid)
        for peer in view.peers
        if peer.process.role != "gateway"
    ]
    core.expect(known_processes(found, view), 0.0)
    assert core.begin(0.0, ROLES) == []
    return core


def test_one_that_is_found_stopped_is_ended_by_its_pid_before_another_is_started() -> None:
    core = successor(told())
    actions = []
    for quarter in range(1, 9):
        core.seen({("node_agent-0", 7): STOPPED, ("gateway-9", 7): STOPPED}, quarter / 4)
        actions += core.tick(quarter / 4)
    fence, guest = actions
    assert isinstance(fence, Fence)
    assert (fence.role_id, fence.hello.pid if fence.hello else 0) == ("node_agent-0", 100)
    assert isinstance(guest, FenceGuest)
    assert guest.hello.pid == 105
    assert core.process_ended(guest.hello.process, "it is dead", 2.0) == []
    assert not core.roster.found_guests
    (launch,) = core.process_ended(cast(sv.RoleHello, fence.hello).process, "it is dead", 3.0)
    assert isinstance(launch, Launch)
    assert launch.planned.id == "node_agent-0"


def test_a_role_that_joins_again_is_ready_at_once_and_no_peer_leaves_it_for_a_moment() -> None:
    core = successor(told())
    for role_id in ROLES:
        key = pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=7)
        assert core.joined(sv.RoleHello(process=key, pid=1, node_id="here"), 1.0) is None
    assert {peer.state for peer in core.view().peers} == {"ready"}


def test_what_fails_after_the_cluster_was_ready_once_is_no_failed_start() -> None:
    core, now = successor(told()), 1.0
    for attempt in range(2 * core.config.supervisor.max_start_failures):
        slot = core.roster.slots["node_agent-0"]
        key = pb.ProcessKey(role="node_agent", id="node_agent-0", incarnation=10 + attempt)
        core.joined(sv.RoleHello(process=key, pid=1, node_id="here"), now)
        failed = sv.Heartbeat(state="failed", failure=pb.Failure(code=ConfigError.code, message="the socket is taken"))
        core.heard(key, failed, now)
        core.ended("node_agent-0", slot.generation, "it failed", now)
        now += 100.0
        core.tick(now)
    assert core.failure is None
    assert core.state() != "failed"


def test_an_unreported_pid_is_that_of_a_process_that_started_before_now() -> None:
    running = Running(RoleSettings("decode", "decode-0", {}, "c", "t", node_id="here"), pid=9)
    peer = running.peer(told(), 55)
    assert peer is not None
    assert (peer.pid, peer.process.incarnation, peer.state) == (9, 55, "")
    assert Running(running.settings).peer(told(), 55) is None


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


async def test_a_supervisor_that_was_stopped_with_the_agent_is_ended_by_any_other_role(
    sleeper: subprocess.Popen[bytes],
) -> None:
    key = pb.ProcessKey(role="supervisor", id="supervisor-0", incarnation=time.time_ns())
    view = sv.ClusterView(supervisor=sv.Peer(process=key, pid=sleeper.pid, node_id="here"))
    role: Any = SimpleNamespace(
        settings=SimpleNamespace(node_id="here"), config=Config(), host=SimpleNamespace(view=view)
    )
    guarding = asyncio.create_task(guard_supervisor(cast(RoleServer, role)))
    try:
        await asyncio.sleep(0.5)
        os.kill(sleeper.pid, signal.SIGSTOP)
        begun_s = time.monotonic()
        while is_alive(sleeper.pid):
            assert time.monotonic() - begun_s < 20.0
            await asyncio.sleep(0.05)
        assert time.monotonic() - begun_s > STOPPED_S + AGENT_FIRST_S / 2  # the agent comes first
    finally:
        guarding.cancel()
