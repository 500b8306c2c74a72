"""The last resort of a full pool, dropping KV to prefill it again: it is counted and reported."""

from __future__ import annotations

from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.plan import plan_roles
from alignedserve.config import ClusterConfig, Config
from alignedserve.gateway.health import judge
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.scheduler.core import events as ev
from alignedserve.scheduler.core.actions import GiveUpPins, ReportLost
from alignedserve.scheduler.core.alarm import ALARM_S
from alignedserve.scheduler.core.pool_relief import PATIENCE_TICKS
from support.core_cell import CoreCell, decode_report, key, only


def crowded_cell() -> CoreCell:
    """One request decodes, another waits in the pool, and the pool has no free block."""
    cell = CoreCell(pool=20, cache=30)
    cell.wait("runs", 30)
    cell.do(ev.Joined("d0", (key("runs"),)))
    cell.do(decode_report("d0", 30, free=0, running=1, shortest=30, longest=30, batch_id=1))
    cell.wait("waits", 30)
    cell.do(ev.PoolReported("pool", 20, 0))
    return cell


def wait_for_blocks(cell: CoreCell, times: int, waits: int = 8) -> list[ReportLost]:
    lost: list[ReportLost] = []
    for _ in range(times):
        report = decode_report("d0", 30, free=0, running=1, shortest=30, longest=30, batch_id=1, waits=waits)
        lost += only(cell.do(report, after_s=0.1), ReportLost)
    return lost


def test_the_last_resort_comes_after_a_while_is_counted_and_alarmed_and_the_alarm_ends() -> None:
    cell = crowded_cell()
    assert not wait_for_blocks(cell, PATIENCE_TICKS)
    assert cell.core.alarm(cell.now_s) == ""
    report = decode_report("d0", 30, free=0, running=1, shortest=30, longest=30, batch_id=1, waits=8)
    actions = [action for _ in range(2) for action in cell.do(report, after_s=0.1)]
    assert set(only(actions, GiveUpPins)) == {GiveUpPins("")}  # the only shard
    (lost,) = only(actions, ReportLost)
    assert lost.keys == (key("waits"),)
    assert cell.core.dropped_for_room == 1
    alarm = cell.core.alarm(cell.now_s)
    assert "dropped 1 times in the last minute" in alarm
    assert "20 blocks" in alarm
    assert cell.core.alarm(cell.now_s + ALARM_S - 1.0) == alarm
    assert cell.core.alarm(cell.now_s + ALARM_S + 1.0) == ""


def test_what_a_process_is_alarmed_about_degrades_the_cluster_for_as_long_as_it_says_so() -> None:
    config = Config(cluster=ClusterConfig(device="cpu"))
    core = SupervisorCore(config, plan_roles(config, 0))
    core.begin(0.0)
    for role in plan_roles(config, 0):
        process = pb.ProcessKey(role=role.role, id=role.id, incarnation=1)
        core.joined(sv.RoleHello(process=process), 0.0)
        core.heard(process, sv.Heartbeat(state="ready"), 0.0)
    scheduler = pb.ProcessKey(role="scheduler", id="scheduler-0", incarnation=1)
    for alarms, state in (["the pool is too small"], "degraded"), ([], "ready"):
        version = core.view_version
        core.heard(scheduler, sv.Heartbeat(state="ready", alarms=alarms), 1.0)
        assert core.view_version > version
        assert core.state() == core.status("c").state == state
        expected = [f"scheduler-0: {alarm}" for alarm in alarms]
        assert core.status("c").degraded == expected
        health = judge(core.view(), config.cluster, joined=True, scheduler_up=True, model_known=True)
        assert (health.missing, list(health.degraded)) == ((), expected)


def test_evictions_that_wait_for_the_pools_process_cost_no_kv() -> None:
    cell = crowded_cell()
    cell.do(ev.InstanceLost("kv_pool", "pool"))
    assert not wait_for_blocks(cell, 5 * PATIENCE_TICKS)
    assert sum(cell.states().values()) == 2
    cell.do(ev.InstanceJoined("kv_pool", "pool"))
    cell.do(ev.PoolReported("pool", 20, 0))
    assert wait_for_blocks(cell, PATIENCE_TICKS + 2)  # now they wait for room
