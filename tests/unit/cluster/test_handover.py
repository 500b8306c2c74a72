"""Take-over between two live supervisors, with real processes whose roles only join."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
import pytest_asyncio

from alignedserve.cluster import app
from alignedserve.cluster.app import SupervisorDeployment
from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.local import LocalCluster
from alignedserve.cluster.records import Record
from alignedserve.cluster.supervisor import handover, placing, redeploy
from alignedserve.cluster.supervisor.handover import newer_leader
from alignedserve.cluster.supervisor.inheritance import Inheritance, inherit
from alignedserve.cluster.supervisor.plan import PlannedRole, Shape
from alignedserve.cluster.supervisor.redeploy import ALL_ROLES, Change
from alignedserve.cluster.supervisor.supervisor import Supervisor
from alignedserve.config import (
    ClusterConfig,
    Config,
    GatewayConfig,
    KvPoolConfig,
    ModelConfig,
    SchedulerConfig,
    SupervisorConfig,
)
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError, ModelError, ResourceError, UnavailableError
from alignedserve.proto import supervisor_pb2 as sv

# The supervisors run in this process, which a node agent would end if a supervisor were silent this long.
QUICK = SupervisorConfig(heartbeat_s=0.1, fence_after_s=60.0, stall_after_s=1.0, start_timeout_s=20.0)
CONFIG = Config(cluster=ClusterConfig(device="cpu"), supervisor=QUICK)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(CONFIG, module="support.fake_roles") as running:
        await running.supervisor.close()
        running.supervisor = await lead(running, Inheritance(running.supervisor.identity), CONFIG)
        await settled(running)
        yield running


async def lead(cluster: LocalCluster, inheritance: Inheritance, config: Config) -> Supervisor:
    """A supervisor as under Ray Serve: another may take over from it."""
    supervisor = Supervisor(config, cluster.launcher, inheritance.identity, replaceable=True)
    supervisor.code = "1"
    supervisor.predecessor = inheritance.predecessor
    await supervisor.start(inheritance.change)
    return supervisor


async def settled(cluster: LocalCluster) -> None:
    """Every role is ready, and knows the leading supervisor."""
    await cluster.wait_ready(30)
    async with asyncio.timeout(10.0):
        while not all(  # noqa: ASYNC110
            running.view.supervisor.address == cluster.supervisor.address for running in await cluster.launcher.find()
        ):
            await asyncio.sleep(0.02)


async def hand_over(cluster: LocalCluster, config: Config, code: str = "1") -> Inheritance:
    old = cluster.supervisor
    inheritance = await inherit(cluster.launcher, config, code)
    assert old.core.paused
    cluster.supervisor = await lead(cluster, inheritance, config)
    await asyncio.wait_for(old.wait_left(), 5.0)
    assert old.left_to == cluster.supervisor.address
    await old.close()
    await settled(cluster)
    return inheritance


async def test_every_role_goes_to_the_successor_and_none_restarts(cluster: LocalCluster) -> None:
    pids = dict(cluster.pids)
    inheritance = await hand_over(cluster, replace(CONFIG, gateway=GatewayConfig(max_queue=9)))
    assert inheritance.change.is_none
    assert cluster.pids == pids


async def test_a_changed_key_restarts_the_roles_that_read_it(cluster: LocalCluster) -> None:
    changed = replace(CONFIG, scheduler=SchedulerConfig(min_batch_requests=9))
    inheritance = await inherit(cluster.launcher, changed, "1")
    assert inheritance.change == Change(rolled=frozenset({"scheduler", "prefill", "decode"}))


async def test_numbers_of_instances_are_compared_with_what_the_predecessor_was_told(cluster: LocalCluster) -> None:
    more = replace(CONFIG, cluster=replace(CONFIG.cluster, decode=2))
    await hand_over(cluster, more)
    async with asyncio.timeout(20.0):
        while "decode-1" not in cluster.pids:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await settled(cluster)
    assert (await inherit(cluster.launcher, more, "1")).change.is_none  # although decode-0 was started for one instance


async def test_other_code_replaces_every_process(cluster: LocalCluster) -> None:
    assert (await inherit(cluster.launcher, CONFIG, "2")).change.rolled == ALL_ROLES


async def test_a_successor_that_does_not_come_again_is_not_waited_for(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cluster.peer("scheduler-0").process.incarnation
    inheritance = await inherit(cluster.launcher, CONFIG, "1")
    assert inheritance.predecessor is not None
    cluster.kill("scheduler-0")
    assert cluster.supervisor.core.paused
    monkeypatch.setattr(handover, "PAUSE_S", 0.2)
    await inheritance.predecessor.pause()  # from now on
    await cluster.wait_restarted("scheduler-0", before, 20.0)
    assert not cluster.supervisor.core.paused


async def test_a_start_that_is_left_to_a_successor_which_does_not_come_is_done_by_its_predecessor(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, before = asyncio.Event(), asyncio.Event(), cluster.peer("decode-0").process.incarnation

    async def prepare(settings: RoleSettings, *, again: bool = False) -> RoleSettings:
        if settings.id != "decode-0" or goes_on.is_set():
            return settings
        begun.set()
        await goes_on.wait()
        return replace(settings, rank_hosts=["127.0.0.1:1"])

    monkeypatch.setattr(cluster.launcher, "prepare", prepare)
    monkeypatch.setattr(handover, "PAUSE_S", 1.0)
    cluster.kill("decode-0")
    await asyncio.wait_for(begun.wait(), 10.0)
    asked = asyncio.create_task(inherit(cluster.launcher, CONFIG, "1"))
    async with asyncio.timeout(10.0):
        while not cluster.supervisor.core.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    goes_on.set()
    await asked
    await cluster.wait_restarted("decode-0", before, 10.0)
    assert not cluster.supervisor.core.paused


async def test_what_was_begun_is_finished_before_the_successor_is_answered(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, begun, may_go_on = cluster.launcher.launch, asyncio.Event(), asyncio.Event()

    async def slow(settings: RoleSettings, spare_id: str = "", *, again: bool = False) -> None:
        begun.set()
        await may_go_on.wait()
        await launch(settings, spare_id, again=again)

    monkeypatch.setattr(cluster.launcher, "launch", slow)
    cluster.kill("scheduler-0")
    await asyncio.wait_for(begun.wait(), 10.0)
    asked = asyncio.create_task(inherit(cluster.launcher, CONFIG, "1"))
    done, _ = await asyncio.wait([asked], timeout=2 * handover.ASK_TIMEOUT_S)
    assert not done  # it has asked again by now
    may_go_on.set()
    inheritance = await asked
    assert "scheduler-0" in cluster.pids
    cluster.supervisor, old = await lead(cluster, inheritance, CONFIG), cluster.supervisor
    pid = cluster.pids["scheduler-0"]
    await old.close()
    await settled(cluster)
    assert cluster.pids["scheduler-0"] == pid


async def test_a_paused_supervisor_places_nothing_and_takes_no_order(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed, supervisor = list[list[str]](), cluster.supervisor

    async def place(
        cluster_id: str, shape: Shape, ids: Sequence[tuple[str, str]], room: NodeRoom, *, on_gpu: bool
    ) -> None:
        placed.append([role_id for _, role_id in ids])

    monkeypatch.setattr(placing, "NODES_LOOK_S", 0.02)
    inheritance = await inherit(cluster.launcher, CONFIG, "1")
    assert inheritance.predecessor is not None
    monkeypatch.setattr(cluster.launcher, "place", place)
    supervisor.core.roster.add(PlannedRole("decode", "decode-7"))
    with pytest.raises(UnavailableError, match="try again in a few seconds"):
        await supervisor.scale(decode=2)
    with pytest.raises(UnavailableError, match="try again in a few seconds"):
        await supervisor.restart(("scheduler",))
    await asyncio.sleep(0.5)
    assert supervisor.core.paused
    assert (placed, supervisor.core.scaling.shape.decode, supervisor.core.rolling.running) == ([], 1, False)
    monkeypatch.setattr(handover, "PAUSE_S", 0.2)
    await inheritance.predecessor.pause()  # the pause restarts, and no successor follows
    async with asyncio.timeout(30.0):
        while not placed:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    supervisor.core.roster.remove("decode-7")
    assert placed[0] == ["prefill-0", "decode-0", "decode-7"]


async def test_a_size_that_roles_have_not_heard_of_is_the_successors_too(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.supervisor, "_publish", lambda: None)
    await cluster.supervisor.scale(decode=2)
    await hand_over(cluster, CONFIG)
    assert cluster.supervisor.core.scaling.shape.decode == 2
    assert "decode-1" in cluster.pids


async def test_a_size_that_the_predecessor_was_deployed_with_and_has_not_begun_is_the_successors(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, at_rest = replace(CONFIG, cluster=replace(CONFIG.cluster, decode=2)), redeploy._at_rest
    monkeypatch.setattr(redeploy, "_at_rest", lambda core: False)
    await hand_over(cluster, more)
    has_not_begun = cluster.supervisor.core
    monkeypatch.setattr(redeploy, "_at_rest", lambda core: core is not has_not_begun and at_rest(core))
    inheritance = await hand_over(cluster, replace(more, gateway=GatewayConfig(max_queue=9)))
    assert inheritance.change == Change(shape=Shape(1, 2))
    async with asyncio.timeout(20.0):
        while "decode-1" not in cluster.pids:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await settled(cluster)


async def test_a_size_that_a_supervisor_has_not_begun_before_it_dies_is_its_successors(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, at_rest = replace(CONFIG, cluster=replace(CONFIG.cluster, decode=2)), redeploy._at_rest
    monkeypatch.setattr(redeploy, "_at_rest", lambda core: False)
    await hand_over(cluster, more)
    await cluster.supervisor.close()
    monkeypatch.setattr(redeploy, "_at_rest", at_rest)
    inheritance = await inherit(cluster.launcher, more, "1")
    assert (inheritance.predecessor, inheritance.change) == (None, Change(shape=Shape(1, 2)))
    cluster.supervisor = await lead(cluster, inheritance, more)
    async with asyncio.timeout(20.0):
        while not all(running.view.followed_decode == 2 for running in await cluster.launcher.find()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await cluster.supervisor.close()
    assert (await inherit(cluster.launcher, more, "1")).change.is_none
    cluster.supervisor = await lead(cluster, Inheritance(inheritance.identity), more)
    assert cluster.supervisor.core.scaling.shape.decode == 2


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        (replace(CONFIG, model=ModelConfig(path="./no-such-model")), ModelError),
        (replace(CONFIG, kv_pool=KvPoolConfig(size_gib=1 << 20)), ResourceError),
        (replace(CONFIG, cluster=ClusterConfig(device="cuda")), ResourceError),
    ],
)
async def test_the_leader_hears_nothing_of_a_cluster_that_could_not_start(
    cluster: LocalCluster, changed: Config, refused: type[AlignedServeError]
) -> None:
    with pytest.raises(refused):
        await inherit(cluster.launcher, changed, "1")
    assert not cluster.supervisor.core.paused
    other = await inherit(cluster.launcher, replace(CONFIG, kv_pool=KvPoolConfig(size_gib=0.5)), "1")
    assert other.change.replaced_for == ("kv_pool.size_gib",)


async def test_a_rolling_restart_of_real_processes(cluster: LocalCluster) -> None:
    before = dict(cluster.pids)
    await cluster.supervisor.restart(("kv_pool", "scheduler", "node_agent"))
    async with asyncio.timeout(30.0):
        while cluster.supervisor.core.rolling.running:
            await cluster.supervisor.wait_changed(0.2)
    assert cluster.supervisor.core.rolling.state.failure == ""
    assert {name for name, pid in cluster.pids.items() if before[name] != pid} == {
        "kv_pool-0",
        "scheduler-0",
        "node_agent-0",
    }


async def test_a_predecessor_that_is_slow_is_asked_again(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = Supervisor.HandOver, list[str]()

    async def slow(self: Supervisor, request: sv.HandOverRequest, context: object) -> sv.HandOverReply:
        asked.append(request.address)
        if asked.count(request.address) == 1:
            await asyncio.sleep(60.0)
        return await answer(self, request, context)  # type: ignore[arg-type]

    monkeypatch.setattr(Supervisor, "HandOver", slow)
    await hand_over(cluster, CONFIG)  # to a slow supervisor
    assert asked == []
    monkeypatch.setattr(handover, "ASK_TIMEOUT_S", 0.5)
    await hand_over(cluster, CONFIG)
    assert asked == ["", "", cluster.supervisor.address, cluster.supervisor.address]


async def test_a_predecessor_that_never_answers_is_given_up_and_one_that_has_ended_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "ASK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(handover, "ASK_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        predecessor = handover.Predecessor(sv.Peer(address=f"127.0.0.1:{silent.getsockname()[1]}"), "token")
        began = time.monotonic()
        assert await predecessor.pause() is None
        assert not predecessor.ended
        assert time.monotonic() - began > handover.ASK_S
        assert not await predecessor.leave_to("127.0.0.1:1")
    assert await predecessor.leave_to("127.0.0.1:1")
    assert predecessor.ended


async def ignore_a_cancel() -> None:
    """Ignores cancellation twice, as Python 3.11's `asyncio.wait_for` sometimes makes a loop do."""
    for _ in range(2):
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            continue


async def test_a_predecessor_whose_end_takes_long_has_let_its_roles_go(cluster: LocalCluster) -> None:
    """Otherwise the roles would stay with it, and the waiting successor would end them."""
    pids, old = dict(cluster.pids), cluster.supervisor
    ignoring = old._spawn(ignore_a_cancel())
    inheritance = await inherit(cluster.launcher, CONFIG, "1")
    cluster.supervisor = await lead(cluster, inheritance, CONFIG)
    await settled(cluster)  # the old supervisor has not begun to close
    assert cluster.pids == pids
    async with asyncio.timeout(5.0):
        await old.close()
    assert ignoring.done()
    assert cluster.pids == pids


async def test_roles_of_a_predecessor_that_hangs_once_it_has_answered_come_all_the_same(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, old = dict(cluster.pids), cluster.supervisor
    monkeypatch.setattr(old, "_let_roles_go", lambda: None)
    cluster.supervisor = await lead(cluster, await inherit(cluster.launcher, CONFIG, "1"), CONFIG)
    await settled(cluster)
    assert cluster.pids == pids
    monkeypatch.undo()
    await old.close()


async def test_one_that_is_succeeded_while_it_looks_whether_it_is_ends_nothing(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, old = dict(cluster.pids), cluster.supervisor

    async def look(self: object) -> bool:
        inheritance = await inherit(cluster.launcher, CONFIG, "1")
        cluster.supervisor = await lead(cluster, inheritance, CONFIG)
        return False

    monkeypatch.setattr(SupervisorDeployment.func_or_class, "_is_succeeded", look)  # type: ignore[attr-defined]
    await end(cluster, old)
    await settled(cluster)
    assert cluster.pids == pids


async def test_a_supervisor_that_was_not_told_can_see_that_a_newer_one_leads(cluster: LocalCluster) -> None:
    old = cluster.supervisor
    assert await newer_leader(cluster.launcher, old.core.incarnation) == ""
    await hand_over(cluster, CONFIG)
    assert await newer_leader(cluster.launcher, old.core.incarnation) == cluster.supervisor.address
    assert await newer_leader(cluster.launcher, cluster.supervisor.core.incarnation) == ""


async def end(cluster: LocalCluster, supervisor: Supervisor) -> None:
    """End it as Ray Serve ends a supervisor's replica after the application was deleted."""
    kind: Any = SupervisorDeployment.func_or_class  # type: ignore[attr-defined]
    replica = SimpleNamespace(
        _config=supervisor.config,
        _launcher=cluster.launcher,
        _identity=supervisor.identity,
        _supervisor=supervisor,
        _record=Record(supervisor.identity.cluster_id, "", 0, 0.0),
        _tasks=[],
        _ended=False,
        _begun=asyncio.Event(),
    )
    replica._begun.set()
    for name in ("_is_replaced", "_is_succeeded", "_see_guests_off"):
        setattr(replica, name, partial(getattr(kind, name), replica))
    with patch.object(app, "is_deleted", return_value=True):
        await kind.__del__(replica)


async def test_one_that_was_not_told_ends_no_cluster_that_a_newer_one_leads(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once Ray Serve considers a successor up, the old supervisor can see it. Without one, it ends the cluster."""
    pids, join, old = dict(cluster.pids), Supervisor.Join, cluster.supervisor

    async def slow(self: Supervisor, requests: Any, context: Any) -> AsyncIterator[sv.RoleOrder]:
        await asyncio.sleep(1.0)
        async for order in join(self, requests, context):
            yield order

    inheritance = await inherit(cluster.launcher, CONFIG, "1")
    assert inheritance.predecessor is not None
    monkeypatch.setattr(inheritance.predecessor, "leave_to", AsyncMock(return_value=False))
    monkeypatch.setattr(Supervisor, "Join", slow)
    cluster.supervisor = await lead(cluster, inheritance, CONFIG)
    await end(cluster, old)
    await settled(cluster)
    assert cluster.pids == pids
    await end(cluster, cluster.supervisor)
    assert cluster.pids == {}
