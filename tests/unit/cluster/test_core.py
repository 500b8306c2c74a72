"""The supervisor's decisions as lists of events, without processes or a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.cluster.launch.processes import Sight
from alignedserve.cluster.supervisor.actions import Action, Fence, FenceGuest, Launch
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import Node, plan_roles
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.config import ClusterConfig, Config, KvPoolConfig, SupervisorConfig
from alignedserve.errors import ResourceError
from alignedserve.model import ModelInfo
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.scheduler.core.pairing import pair_up
from alignedserve.sizing import StorePlan
from support.fake_roles import MODEL

LIMITS = SupervisorConfig(heartbeat_s=1.0, fence_after_s=6.0, start_timeout_s=60.0, max_start_failures=3)
ALL = ("node_agent-0", "kv_pool-0", "scheduler-0", "prefill-0", "decode-0")
GIB = 1 << 30


def make_core(**cluster: int) -> SupervisorCore:
    config = Config(cluster=ClusterConfig(device="cpu", **cluster), supervisor=LIMITS)  # type: ignore[arg-type]
    return SupervisorCore(config, plan_roles(config, 0))


def hello(role_id: str, incarnation: int = 1) -> sv.RoleHello:
    role = role_id.rpartition("-")[0]
    return sv.RoleHello(process=pb.ProcessKey(role=role, id=role_id, incarnation=incarnation), pid=1000 + incarnation)


def beat(role_id: str, state: str = "ready") -> sv.Heartbeat:
    message = sv.Heartbeat(state=state)
    if role_id.startswith("node_agent"):
        message.gauges[MEMORY_GAUGE] = 4.0 * GIB
    if role_id.startswith(("prefill", "decode")):
        message.model_info = MODEL.to_json()
    return message


def bring_up(core: SupervisorCore, now: float = 0.0) -> None:
    core.begin(now)
    for role_id in core.roster.slots:
        assert core.joined(hello(role_id), now) is None
        core.heard(hello(role_id).process, beat(role_id), now)


def names(actions: list[Action]) -> list[tuple[str, str]]:
    return [("launch", a.planned.id) if isinstance(a, Launch) else ("fence", a.role_id) for a in actions]


def test_at_the_start_everything_that_does_not_run_is_launched() -> None:
    core = make_core()
    assert names(core.begin(0.0, ["kv_pool-0"])) == [("launch", role_id) for role_id in ALL if role_id != "kv_pool-0"]


def test_the_cluster_is_ready_when_every_instance_is_and_says_until_then_what_is_missing() -> None:
    core = make_core(decode=2)
    core.begin(0.0)
    assert core.state() == "starting"
    assert core.roster.missing() == ["node_agent", "kv_pool", "scheduler", "prefill", "decode"]
    for role_id in (*ALL, "decode-1"):
        core.joined(hello(role_id), 1.0)
        core.heard(hello(role_id).process, beat(role_id, "ready" if role_id != "decode-1" else "loading"), 1.0)
    assert core.roster.missing() == []
    assert core.roster.degraded() == ["decode-1: loading"]
    core.heard(hello("decode-1").process, beat("decode-1"), 2.0)
    assert core.state() == "ready"


def test_the_view_grows_with_changes_only_and_names_pairs_and_plan() -> None:
    core = make_core()
    bring_up(core)
    version = core.view().version
    core.heard(hello("decode-0").process, beat("decode-0"), 1.0)
    assert core.view().version == version
    core.heard(hello("decode-0").process, beat("decode-0", "draining"), 2.0)
    view = core.view()
    assert view.version > version
    assert [(pair.decode_id, pair.prefill_id) for pair in view.pairs] == [("decode-0", "prefill-0")]
    assert StorePlan.from_json(view.store_plan).pool == (GIB - 500) // MODEL.geometry(16).block_bytes


def test_an_older_incarnation_is_refused_and_its_heartbeats_say_nothing() -> None:
    core = make_core()
    bring_up(core)
    assert core.joined(hello("decode-0", 5), 1.0) is None
    refusal = core.joined(hello("decode-0", 4), 1.0)
    assert refusal is not None
    assert refusal.code == "stale"
    core.heard(hello("decode-0", 1).process, beat("decode-0", "failed"), 1.0)
    assert core.state() == "degraded"


def test_a_broken_stream_is_lost_at_once_fenced_after_a_while_and_replaced_once_dead() -> None:
    core = make_core()
    bring_up(core)
    core.broke(hello("prefill-0").process, 10.0)
    (lost,) = [peer for peer in core.view().peers if peer.state == "lost"]
    assert lost.process.id == "prefill-0"
    assert core.tick(10.1) == []
    (fence,) = core.tick(10.6)
    assert isinstance(fence, Fence)
    assert fence.hello is not None
    assert core.tick(12.0) == []  # no successor starts before the process is known to be dead
    assert names(core.ended("prefill-0", fence.generation, "killed", 12.5)) == [("launch", "prefill-0")]
    assert not [peer for peer in core.view().peers if peer.process.id == "prefill-0"]


def test_a_process_that_comes_back_in_time_is_left_alone() -> None:
    core = make_core()
    bring_up(core)
    core.broke(hello("prefill-0").process, 1.0)
    assert core.joined(hello("prefill-0"), 1.2) is None
    assert core.tick(2.0) == []
    assert core.state() == "ready"


def test_a_silent_process_is_fenced_but_not_when_it_was_the_supervisor_that_slept() -> None:
    core = make_core()
    bring_up(core)
    for second in range(1, 6):
        core.tick(float(second))
        for role_id in ALL[:-1]:
            core.heard(hello(role_id).process, beat(role_id), float(second))
    assert names(core.tick(6.5)) == [("fence", "decode-0")]

    slept = make_core()
    bring_up(slept)
    slept.tick(0.5)
    assert slept.tick(60.0) == []


def test_a_stopped_role_is_fenced_within_two_seconds_and_the_view_says_that_it_is() -> None:
    core = make_core()
    bring_up(core)
    stopped = {("decode-0", 1): Sight(stopped=True, traced=False, cpu_s=0.0), ("decode-0", 2): Sight(True, False, 0.0)}
    core.seen(stopped, 1.0)
    assert core.tick(1.5) == []
    assert not any(peer.fenced for peer in core.view().peers)
    assert names(core.tick(2.1)) == [("fence", "decode-0")]
    assert [peer.process.id for peer in core.view().peers if peer.fenced] == ["decode-0"]


def test_a_role_with_work_that_comes_no_further_is_fenced_though_its_heartbeats_go_on() -> None:
    core = make_core()
    bring_up(core)
    actions: list[Action] = []
    now = 0.0
    while not actions and now < 20.0:
        now += 1.0
        for role_id in ALL:
            stuck = beat(role_id)
            stuck.busy, stuck.progress = True, 5 if role_id == "prefill-0" else int(now)
            core.heard(hello(role_id).process, stuck, now)
        actions = core.tick(now)
    assert names(actions) == [("fence", "prefill-0")]
    assert now <= LIMITS.stall_after_s + 2.0


def test_a_gateway_that_hangs_is_ended_once_and_leaves_the_view_when_it_is_dead() -> None:
    core = make_core()
    bring_up(core)
    guest = sv.RoleHello(process=pb.ProcessKey(role="gateway", id="gateway-x", incarnation=9), pid=77)
    core.joined(guest, 0.0)
    core.heard(guest.process, sv.Heartbeat(state="ready"), 0.0)
    core.seen({("gateway-x", 9): Sight(stopped=True, traced=False, cpu_s=0.0)}, 0.5)
    assert core.tick(1.0) == []
    (fence,) = core.tick(1.6)
    assert isinstance(fence, FenceGuest)
    assert fence.hello.pid == 77
    assert core.tick(1.8) == []
    assert [peer.process.id for peer in core.view().peers if peer.fenced] == ["gateway-x"]
    assert core.process_ended(guest.process, "killed", 2.0) == []
    assert "gateway-x" not in [peer.process.id for peer in core.view().peers]


def test_a_gateway_within_the_supervisors_own_process_is_never_ended() -> None:
    core = make_core()
    bring_up(core)
    core.own_pid = 77
    guest = sv.RoleHello(process=pb.ProcessKey(role="gateway", id="gateway-x", incarnation=9), pid=77)
    core.joined(guest, 0.0)
    core.heard(guest.process, sv.Heartbeat(state="ready"), 0.0)
    assert not [action for action in core.tick(1.0) + core.tick(2.4) if isinstance(action, FenceGuest)]


def test_the_kernels_word_that_a_process_is_dead_counts_for_that_process_only() -> None:
    core = make_core()
    bring_up(core)
    assert core.process_ended(hello("decode-0", 2).process, "killed", 1.0) == []
    assert names(core.process_ended(hello("decode-0").process, "killed", 1.0)) == [("launch", "decode-0")]
    assert core.process_ended(hello("decode-0").process, "killed", 1.1) == []


def test_the_end_of_a_predecessor_is_not_held_against_its_successor() -> None:
    core = make_core()
    bring_up(core)
    generation = core.roster.slots["decode-0"].generation
    (launch,) = core.ended("decode-0", generation, "killed", 1.0)
    assert isinstance(launch, Launch)
    assert core.ended("decode-0", generation, "the launcher noticed it too", 1.1) == []
    assert core.roster.slots["decode-0"].generation == launch.generation == generation + 1


def test_dying_before_being_ready_too_often_fails_the_start_with_the_last_reason() -> None:
    core = make_core()
    core.begin(0.0)
    now = 0.0
    for attempt in range(1, 4):
        core.ended("scheduler-0", attempt, "its process ended with status 1", now)
        now += 5.0
        core.tick(now)
    assert core.state() == "failed"
    assert core.failure is not None
    assert "scheduler-0 failed to start 3 times" in core.failure.message
    assert "launch" not in [what for what, _ in names(core.tick(now + 100.0))]


def test_dying_again_and_again_after_the_start_is_answered_more_slowly_each_time_but_always() -> None:
    core = make_core()
    bring_up(core)
    now, waits = 1.0, []
    for _ in range(6):
        slot = core.roster.slots["decode-0"]
        core.ended("decode-0", slot.generation, "killed", now)
        waits.append(max(0.0, slot.launch_at - now))
        now += 31.0
        core.tick(now)
        core.joined(hello("decode-0", int(now)), now)
        core.heard(hello("decode-0", int(now)).process, beat("decode-0"), now)
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] > 2.0
    assert core.failure is None


@pytest.mark.parametrize("code", ["model_error", "unsupported_model", "insufficient_resources"])
def test_what_starting_again_cannot_mend_fails_the_start_at_once(code: str) -> None:
    core = make_core()
    core.begin(0.0)
    core.joined(hello("prefill-0"), 1.0)
    failed = sv.Heartbeat(state="failed", failure=pb.Failure(code=code, message="the file is broken"))
    assert names(core.heard(hello("prefill-0").process, failed, 1.0)) == [("fence", "prefill-0")]
    assert core.failure is not None
    assert (core.failure.code, core.failure.message) == (code, "the file is broken")


def test_a_pool_that_does_not_fit_fails_the_start_with_the_figures() -> None:
    config = Config(cluster=ClusterConfig(device="cpu"), kv_pool=KvPoolConfig(size_gib=100.0), supervisor=LIMITS)
    core = SupervisorCore(config, plan_roles(config, 0))
    bring_up(core)
    assert core.failure is not None
    assert "100.00 GiB" in core.failure.message
    assert "4.00 GiB" in core.failure.message


def test_a_start_that_takes_too_long_names_the_late_processes() -> None:
    core = make_core()
    core.begin(0.0)
    core.joined(hello("decode-0"), 1.0)
    now = 1.0
    while core.failure is None and now < 200.0:
        now += 1.0
        core.heard(hello("decode-0").process, sv.Heartbeat(state="loading"), now)
        core.tick(now)
    assert core.failure is not None
    assert "was not ready in time" in core.failure.message


def test_the_plan_of_an_earlier_supervisor_stands() -> None:
    core = make_core()
    core.planner.adopt(MODEL.to_json(), "the earlier plan")
    bring_up(core)
    assert core.view().store_plan == "the earlier plan"


def test_the_newest_prefill_instances_weights_are_those_of_the_view_and_others_are_named() -> None:
    core = make_core(prefill=2)
    bring_up(core)
    assert not core.degraded()
    first = core.view().model_info
    core.broke(hello("prefill-1").process, 1.0)
    core.ended("prefill-1", core.roster.slots["prefill-1"].generation, "killed", 1.0)
    core.joined(hello("prefill-1", 2), 2.0)
    newer = beat("prefill-1")
    newer.model_info = replace(MODEL, weights="changed", layers=MODEL.layers + 1).to_json()
    core.heard(hello("prefill-1", 2).process, newer, 2.0)
    assert ModelInfo.from_json(core.view().model_info) == replace(ModelInfo.from_json(first), weights="changed")
    for role_id in ("prefill-0", "decode-0"):  # they have the old ones, and go on
        core.heard(hello(role_id).process, beat(role_id), 3.0)
    assert ModelInfo.from_json(core.view().model_info).weights == "changed"
    assert [line.partition(":")[0] for line in core.degraded()] == ["prefill-0", "decode-0"]


def test_nothing_is_started_while_everything_is_being_ended() -> None:
    core = make_core()
    bring_up(core)
    core.end()
    assert core.ended("decode-0", 1, "ordered", 1.0) == []
    assert core.tick(100.0) == []


def test_while_gateways_drain_the_dead_are_replaced_and_processes_may_reconnect() -> None:
    core = make_core()
    bring_up(core)
    gateway = sv.RoleHello(process=pb.ProcessKey(role="gateway", id="gateway-x", incarnation=9), pid=77)
    core.joined(gateway, 0.0)
    core.heard(gateway.process, sv.Heartbeat(state="ready"), 0.0)
    core.end(30.0)
    core.broke(hello("prefill-0").process, 1.0)
    assert core.joined(hello("prefill-0"), 1.1) is None
    assert names(core.ended("decode-0", core.roster.slots["decode-0"].generation, "killed", 1.2)) == [
        ("launch", "decode-0")
    ]
    assert core.joined(hello("decode-0", 2), 2.0) is None
    core.heard(gateway.process, sv.Heartbeat(state="drained"), 2.5)
    assert core.ended("decode-0", core.roster.slots["decode-0"].generation, "killed", 3.0) == []
    assert core.joined(hello("decode-0", 3), 3.0) is not None


def test_when_the_grace_is_cut_short_nothing_is_started_any_more() -> None:
    core = make_core()
    bring_up(core)
    core.joined(sv.RoleHello(process=pb.ProcessKey(role="gateway", id="gateway-x", incarnation=9)), 0.0)
    core.end(30.0)
    core.end()
    assert core.ended("decode-0", 1, "killed", 1.0) == []


@pytest.mark.parametrize(
    ("prefill", "decode", "pairs"),
    [
        (1, 1, [("decode-0", "prefill-0")]),
        (3, 2, [("decode-0", "prefill-0"), ("decode-1", "prefill-1"), ("decode-0", "prefill-2")]),
        (2, 3, [("decode-0", "prefill-0"), ("decode-1", "prefill-1"), ("decode-2", "prefill-0")]),
    ],
)
def test_every_instance_has_a_pair(prefill: int, decode: int, pairs: list[tuple[str, str]]) -> None:
    assert pair_up(prefill, decode) == pairs
    assert make_core(prefill=prefill, decode=decode, prefetch=False).scaling.pairs == []


def test_instances_get_a_gpu_each_and_share_one_only_where_that_is_allowed() -> None:
    config = Config(cluster=ClusterConfig(prefill=1, decode=1))
    assert [role.device for role in plan_roles(config, 2) if role.on_gpu] == ["cuda:0", "cuda:1"]
    with pytest.raises(ResourceError, match="need 2 GPUs, but there are 1"):
        plan_roles(config, 1)
    shared = Config(cluster=ClusterConfig(prefill=1, decode=1, share_gpu=True))
    assert [role.device for role in plan_roles(shared, 1) if role.on_gpu] == ["cuda:0", "cuda:0"]
    with pytest.raises(ResourceError, match="no GPU"):
        plan_roles(Config(cluster=ClusterConfig(device="cuda")), 0)


def test_a_process_that_returns_on_a_lost_node_is_refused() -> None:
    core = make_core()
    home, other = Node("home"), Node("other", "10.0.0.2")
    core.settle(Placement((home, other), {"prefill-0": "home", "decode-0": "other"}), 0.0)
    core.begin(0.0)
    for role_id in core.roster.slots:
        node = "other" if role_id in ("decode-0", "node_agent-1", "kv_pool-1") else "home"
        said = hello(role_id)
        said.node_id = node
        assert core.joined(said, 0.0) is None

    core.located(Placement((home,), {"prefill-0": "home"}, {"decode-0": "waits"}), 10.0)
    back = hello("decode-0")
    back.node_id = "other"
    refused = core.joined(back, 11.0)
    assert refused is not None
    assert "node other was given up" in refused.message
    again = Node("another", "10.0.0.2")
    core.located(Placement((home, again), {"prefill-0": "home", "decode-0": "another"}), 12.0)
    assert core.joined(back, 13.0) is not None
    successor = hello("decode-0", 2)
    successor.node_id = "another"
    assert core.joined(successor, 14.0) is None
