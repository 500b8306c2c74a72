"""Hung or slow: conclusions from heartbeats and from the kernel's figures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from alignedserve.cluster.launch.processes import Sight, look_at
from alignedserve.cluster.node.supervisor_guard import SupervisorGuard
from alignedserve.cluster.node.watchdog import Watchdog
from alignedserve.cluster.supervisor.hang_detector import LOADING, STOPPED_S, HangDetector
from alignedserve.cluster.supervisor.managed_process import ManagedProcess
from alignedserve.config import SupervisorConfig
from alignedserve.proc_stat import is_alive, started_ticks
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

LIMITS = SupervisorConfig(heartbeat_s=1.0, fence_after_s=6.0, stall_after_s=4.0)


def ready(progress: int = 0, *, busy: bool = False, step_s: float = 0.0) -> sv.Heartbeat:
    return sv.Heartbeat(state="ready", progress=progress, busy=busy, step_s=step_s)


def sight(*, stopped: bool = False, traced: bool = False, cpu_s: float = 0.0) -> Sight:
    return Sight(stopped, traced, cpu_s)


def first_verdict(beats: list[sv.Heartbeat], until_s: float = 100.0) -> float | None:
    """When the process counts as hung: one heartbeat a second, the last one repeated."""
    hang_detector, now = HangDetector(0.0), 0.0
    while now < until_s:
        now += 1.0
        beat = beats[min(int(now) - 1, len(beats) - 1)]
        hang_detector.heard(beat, now)
        if hang_detector.verdict(beat, LIMITS, now):
            return now
    return None


def test_a_stopped_process_counts_as_hung_after_a_second_and_not_when_it_goes_on_before() -> None:
    hang_detector, beat = HangDetector(0.0), ready()
    hang_detector.seen(sight(stopped=True), 1.0)
    assert hang_detector.verdict(beat, LIMITS, 1.0 + STOPPED_S / 2) == ""
    hang_detector.seen(sight(), 1.6)
    hang_detector.seen(sight(stopped=True), 1.8)
    assert hang_detector.verdict(beat, LIMITS, 1.7 + STOPPED_S) == ""
    assert "stopped" in hang_detector.verdict(beat, LIMITS, 1.9 + STOPPED_S)


def test_a_process_under_a_debugger_is_left_alone() -> None:
    hang_detector = HangDetector(0.0)
    hang_detector.seen(sight(traced=True), 1.0)
    assert hang_detector.verdict(ready(busy=True), LIMITS, 1000.0) == ""


def test_work_without_progress_is_a_hang_and_no_work_is_none() -> None:
    assert first_verdict([ready(7, busy=True)]) == pytest.approx(LIMITS.stall_after_s + 1.0, abs=1.0)
    assert first_verdict([ready(7, busy=False)]) is None
    assert first_verdict([ready(n, busy=True) for n in range(100)]) is None


def test_a_slow_worker_is_given_ten_times_its_longest_step() -> None:
    assert first_verdict([ready(7, busy=True, step_s=3.0)]) == pytest.approx(31.0, abs=1.0)
    slow = [ready(n // 20, busy=True, step_s=3.0) for n in range(100)]
    assert first_verdict(slow) is None


def test_silence_of_one_that_is_ready_is_a_hang_even_where_it_is_computing() -> None:
    hang_detector = HangDetector(0.0)
    for second in range(1, 8):
        hang_detector.seen(sight(cpu_s=second), float(second))
    assert hang_detector.verdict(ready(), LIMITS, 5.9) == ""
    assert "sent no heartbeat" in hang_detector.verdict(ready(), LIMITS, 6.5)


def test_one_that_loads_may_be_silent_as_long_as_it_uses_the_processor() -> None:
    loading, hang_detector = sv.Heartbeat(state="loading"), HangDetector(0.0)
    for second in range(1, 60):
        hang_detector.seen(sight(cpu_s=second), float(second))
        assert hang_detector.verdict(loading, LIMITS, float(second)) == ""
    idle_since, patience = 59.0, LOADING * LIMITS.fence_after_s
    hang_detector.seen(sight(cpu_s=59.0), idle_since + patience)
    assert hang_detector.verdict(loading, LIMITS, idle_since + patience - 1.0) == ""
    assert "is idle" in hang_detector.verdict(loading, LIMITS, idle_since + patience + 1.0)


def test_time_in_which_the_observer_slept_counts_for_no_process() -> None:
    hang_detector, beat = HangDetector(0.0), ready(busy=True)
    hang_detector.heard(beat, 1.0)
    hang_detector.forgive(50.0, 51.0)
    assert hang_detector.verdict(beat, LIMITS, 52.0) == ""
    assert hang_detector.verdict(beat, LIMITS, 57.5) != ""


# ---- real processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def peer_of(process: subprocess.Popen[bytes]) -> sv.Peer:
    key = pb.ProcessKey(role="supervisor", id="supervisor-0", incarnation=time.time_ns())
    return sv.Peer(process=key, pid=process.pid, node_id="here")


async def look_until_dead(guard: SupervisorGuard, pid: int, heard_at: float | None, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        await guard.look(heard_at if heard_at is not None else time.monotonic())
        if not is_alive(pid):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_supervisor_that_is_stopped_is_ended_by_the_nodes_agent(sleeper: subprocess.Popen[bytes]) -> None:
    guard = SupervisorGuard("here", LIMITS)
    guard.on_view(sv.ClusterView(supervisor=peer_of(sleeper)))
    assert not await look_until_dead(guard, sleeper.pid, None, STOPPED_S + 0.5)
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert await look_until_dead(guard, sleeper.pid, None, 10.0)


async def test_a_supervisor_that_says_nothing_is_ended_and_one_of_another_node_is_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    limits = SupervisorConfig(heartbeat_s=0.05, fence_after_s=0.5)
    elsewhere = SupervisorGuard("there", limits)
    elsewhere.on_view(sv.ClusterView(supervisor=peer_of(sleeper)))
    assert not await look_until_dead(elsewhere, sleeper.pid, time.monotonic(), 1.0)
    guard = SupervisorGuard("here", limits)
    guard.on_view(sv.ClusterView(supervisor=peer_of(sleeper)))
    assert await look_until_dead(guard, sleeper.pid, time.monotonic(), 10.0)


async def test_the_watchdog_sees_a_process_stop_go_on_and_end(sleeper: subprocess.Popen[bytes]) -> None:
    dead: asyncio.Queue[pb.ProcessKey] = asyncio.Queue()
    watchdog = Watchdog(dead.put_nowait)
    # As if the clock had jumped forward an hour since the start: the process is not identified by the time.
    key = pb.ProcessKey(role="decode", id="decode-0", incarnation=time.time_ns() - 3600 * 10**9)
    ticks = started_ticks(sleeper.pid)
    member = ManagedProcess(
        sv.RoleHello(process=key, pid=sleeper.pid, node_id="here", started_ticks=ticks), HangDetector(0.0), 0.0
    )
    watchdog.follow("elsewhere", [member])
    assert watchdog.look() == {}
    watchdog.follow("here", [member])
    name = (key.id, key.incarnation)
    for number, stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        os.kill(sleeper.pid, number)
        deadline = time.monotonic() + 10.0
        while watchdog.look()[name].stopped is not stopped:
            assert time.monotonic() < deadline
            await asyncio.to_thread(time.sleep, 0.01)
    sleeper.kill()
    assert await asyncio.wait_for(dead.get(), 10.0) == key
    assert watchdog.look() == {}
    watchdog.close()


async def test_a_number_that_belongs_to_a_later_process_is_not_looked_at(sleeper: subprocess.Popen[bytes]) -> None:
    watchdog = Watchdog(lambda key: None)
    key = pb.ProcessKey(role="decode", id="decode-0", incarnation=time.time_ns())
    ended = started_ticks(sleeper.pid) - 1
    hello = sv.RoleHello(process=key, pid=sleeper.pid, node_id="here", started_ticks=ended)
    watchdog.follow("here", [ManagedProcess(hello, HangDetector(0.0), 0.0)])
    assert watchdog.look() == {}
    watchdog.close()


def test_a_process_that_has_ended_is_not_seen(sleeper: subprocess.Popen[bytes]) -> None:
    assert look_at(sleeper.pid) is not None
    sleeper.kill()
    sleeper.wait()
    assert look_at(sleeper.pid) is None
