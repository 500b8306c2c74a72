"""Warm spares: started once everything else is ready, they take a dead process's role, and are replaced."""

from __future__ import annotations

import signal
import sys

import pytest

from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.supervisor.actions import Action, Launch
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.plan import SPARE, plan_roles
from alignedserve.config import ClusterConfig, Config, KvPoolConfig, SupervisorConfig
from alignedserve.errors import ResourceError
from alignedserve.proc_stat import is_alive
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.sizing import SPARE_BYTES, plan_stores
from support.fake_roles import MODEL

CLUSTER = ClusterConfig(device="cpu")


def make_core(spares: int) -> SupervisorCore:
    config = Config(cluster=CLUSTER, supervisor=SupervisorConfig(spares=spares))
    return SupervisorCore(config, plan_roles(config, 0))


def come_up(core: SupervisorCore, role_id: str, now: float, incarnation: int = 1, device: str = "cpu") -> None:
    key = pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=incarnation)
    assert core.joined(sv.RoleHello(process=key, pid=1, device=device), now) is None
    core.heard(key, sv.Heartbeat(state="ready"), now)


def launches(core: SupervisorCore, actions: list[Action], now: float) -> list[tuple[str, str]]:
    """The started roles, and the spare that each takes."""
    slots = [core.roster.slots[action.planned.id] for action in actions if isinstance(action, Launch)]
    return [(slot.planned.id, core.take_spare(slot, now)) for slot in slots]


def bring_up(core: SupervisorCore, now: float = 0.0) -> None:
    core.begin(now)
    for role_id, slot in core.roster.slots.items():
        if slot.planned.role != SPARE:
            come_up(core, role_id, now)


def test_spares_start_when_everything_else_is_ready_and_no_role_waits_for_them() -> None:
    core = make_core(spares=2)
    assert [role_id for role_id, _ in launches(core, core.begin(0.0), 0.0) if role_id.startswith(SPARE)] == []
    for role_id in ("node_agent-0", "kv_pool-0", "scheduler-0", "prefill-0"):
        come_up(core, role_id, 1.0)
        assert core.tick(1.0) == []
    come_up(core, "decode-0", 1.2)
    assert (core.state(), launches(core, core.tick(1.3), 1.3)) == ("ready", [("spare-0", ""), ("spare-1", "")])
    assert core.state() == "ready"


def test_a_dead_role_goes_to_a_spare_and_the_next_spare_starts_when_the_successor_is_ready() -> None:
    core = make_core(spares=1)
    bring_up(core)
    core.tick(0.1)
    come_up(core, "spare-0", 1.0)
    dead = core.roster.slots["decode-0"]
    assert launches(core, core.ended("decode-0", dead.generation, "killed", 2.0), 2.0) == [("decode-0", "spare-0")]
    assert SPARE not in [peer.process.role for peer in core.view().peers]
    assert launches(core, core.tick(2.1), 2.1) == []
    come_up(core, "decode-0", 2.2, incarnation=2)
    assert launches(core, core.tick(2.3), 2.3) == [("spare-0", "")]


def test_the_end_of_a_process_that_was_a_spare_does_not_touch_the_next_spare() -> None:
    core = make_core(spares=1)
    bring_up(core)
    core.tick(0.1)
    come_up(core, "spare-0", 1.0)
    first = core.roster.slots["spare-0"].generation
    generation = core.roster.slots["decode-0"].generation
    assert launches(core, core.ended("decode-0", generation, "killed", 2.0), 2.0) == [("decode-0", "spare-0")]
    assert core.ended("spare-0", first, "the process that is decode-0 now", 2.1) == []
    come_up(core, "decode-0", 2.2, incarnation=2)
    core.tick(2.3)
    come_up(core, "spare-0", 3.0, incarnation=2)
    assert core.ended("spare-0", first, "the process that was decode-0", 3.1) == []
    assert core.roster.ready_spare() is not None


def test_without_a_ready_spare_and_for_an_agent_a_process_is_started() -> None:
    core = make_core(spares=1)
    bring_up(core)
    core.tick(0.1)
    assert launches(core, core.ended("decode-0", 1, "killed", 1.0), 1.0) == [("decode-0", "")]
    come_up(core, "decode-0", 1.1, incarnation=2)
    come_up(core, "spare-0", 1.2)
    assert launches(core, core.ended("node_agent-0", 1, "killed", 2.0), 2.0) == [("node_agent-0", "")]


def test_a_successor_takes_the_device_of_its_predecessor() -> None:
    core = make_core(spares=1)
    bring_up(core)
    come_up(core, "decode-0", 1.0, incarnation=2, device="cuda:3")
    core.ended("decode-0", core.roster.slots["decode-0"].generation, "killed", 2.0)
    assert core.roster.slots["decode-0"].device == "cuda:3"


def test_the_memory_of_spares_is_not_given_to_stores() -> None:
    def pool_blocks(spares: int, memory_bytes: int = 8 << 30) -> int:
        config = Config(cluster=CLUSTER, supervisor=SupervisorConfig(spares=spares))
        return plan_stores(config, MODEL, memory_bytes).pool

    block_bytes = MODEL.geometry(16).block_bytes
    assert pool_blocks(0) - pool_blocks(4) == pytest.approx(SPARE_BYTES / block_bytes, abs=1)
    config = Config(cluster=CLUSTER, supervisor=SupervisorConfig(spares=4), kv_pool=KvPoolConfig(size_gib=1.0))
    with pytest.raises(ResourceError, match="4 warm spare"):
        plan_stores(config, MODEL, 2 << 30)


# ---- as processes


async def test_a_spare_becomes_the_worker_in_the_same_process_and_another_takes_its_place() -> None:
    limits = SupervisorConfig(heartbeat_s=0.1, fence_after_s=1.0, start_timeout_s=30.0, spares=1)
    config = Config(cluster=CLUSTER, supervisor=limits)
    async with LocalCluster(config, module="support.fake_roles") as cluster:
        await cluster.wait_ready(30)
        await cluster.wait_spares(1)
        spare, before = cluster.peer("spare-0"), cluster.peer("decode-0")
        cluster.kill("decode-0", signal.SIGSTOP)
        after = await cluster.wait_restarted("decode-0", before.process.incarnation, 15)
        assert after.pid == spare.pid
        assert after.process.incarnation > spare.process.incarnation
        assert not is_alive(before.pid)
        await cluster.wait_spares(1)
        assert cluster.peer("spare-0").pid != spare.pid
        await cluster.restart_supervisor()  # it finds the spare in its new role
        await cluster.wait_ready(15)
        await cluster.wait_spares(1)
        assert cluster.peer("decode-0").pid == spare.pid
        killed = cluster.peer("spare-0").process.incarnation
        cluster.kill("spare-0")
        await cluster.wait_restarted("spare-0", killed, 15)
        pids = cluster.pids
    assert not [role_id for role_id, pid in pids.items() if is_alive(pid)]


def test_a_spare_imports_all_that_workers_need_and_touches_no_gpu() -> None:
    import subprocess

    code = """
import sys
from alignedserve.cluster.launch.spare import _import_roles
_import_roles()
import torch
ours = ["prefill_worker.loop", "decode_worker.loop", "kv_pool.pool", "scheduler.core"]
wanted = ["transformers", *(f"alignedserve.{name}" for name in ours)]
print([name for name in wanted if name not in sys.modules], torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[0] == "[] False"
