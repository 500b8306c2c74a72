"""The supervisor's decisions about the number of instances, as lists of events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from alignedserve.cluster.supervisor.core import Action, End, Fence, Launch, SupervisorCore
from alignedserve.cluster.supervisor.plan import PlannedRole, Shape, plan_roles
from alignedserve.cluster.supervisor.scaling import DRAIN_LIMIT_S
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.config import ClusterConfig, Config, SupervisorConfig
from alignedserve.device_memory import DeviceMemory
from alignedserve.errors import ConfigError, ResourceError, UnavailableError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from support.fake_roles import MODEL

LIMITS = SupervisorConfig(heartbeat_s=1.0, fence_after_s=6.0, start_timeout_s=60.0, max_start_failures=2)
GIB = 1 << 30
PLENTY = 1 << 50


def key(role_id: str, incarnation: int = 1) -> pb.ProcessKey:
    return pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=incarnation)


class Cell:
    """A core whose roles report what the test scripts."""

    def __init__(self, prefill: int = 1, decode: int = 1, gpus: int = 0, *, share_gpu: bool = False) -> None:
        device = "cuda" if gpus else "cpu"
        cluster = ClusterConfig(device=device, prefill=prefill, decode=decode, share_gpu=share_gpu)
        self.config = Config(cluster=cluster, supervisor=LIMITS)
        self.core = SupervisorCore(self.config, plan_roles(self.config, gpus), gpus=gpus)
        self.now = 0.0
        self.core.begin(0.0)
        for role_id in list(self.core.roster.slots):
            self.bring_up(role_id)
        assert self.core.state() == "ready"

    def bring_up(self, role_id: str, incarnation: int = 1) -> None:
        assert self.core.joined(sv.RoleHello(process=key(role_id, incarnation), pid=1000), self.now) is None
        self.say(role_id, "ready", incarnation=incarnation)

    def say(
        self, role_id: str, state: str, drained: Iterable[str] = (), incarnation: int = 1, **more: pb.Failure
    ) -> list[Action]:
        beat = sv.Heartbeat(state=state, drained=drained, **more)
        if role_id.startswith("node_agent"):
            beat.gauges[MEMORY_GAUGE] = 4.0 * GIB
        if role_id.startswith(("prefill", "decode")):
            beat.model_info = MODEL.to_json()
            beat.gauges.update(DeviceMemory(role_id, "", 8 * GIB, 8 * GIB).gauges())
        return self.core.heard(key(role_id, incarnation), beat, self.now)

    def scale(self, prefill: int = 0, decode: int = 0, available_bytes: int = PLENTY) -> list[Action]:
        return self.core.scale(prefill, decode, {"": available_bytes}, self.now)

    def ended(self, role_id: str) -> list[Action]:
        return self.core.ended(role_id, self.core.roster.slots[role_id].generation, "ended", self.now)

    def pairs(self) -> list[tuple[str, str]]:
        return [(pair.decode_id, pair.prefill_id) for pair in self.core.view().pairs]


def launched(actions: list[Action]) -> list[PlannedRole]:
    return [action.planned for action in actions if isinstance(action, Launch)]


def test_growing_launches_what_is_missing_and_pairs_it_without_parting_a_pair() -> None:
    cell = Cell(prefill=2)
    assert cell.pairs() == [("decode-0", "prefill-0"), ("decode-0", "prefill-1")]
    assert [role.id for role in launched(cell.scale(decode=2))] == ["decode-1"]
    assert cell.pairs() == [("decode-0", "prefill-0"), ("decode-0", "prefill-1"), ("decode-1", "prefill-1")]
    assert cell.core.state() == "degraded"
    cell.bring_up("decode-1")
    status = cell.core.status("c")
    assert (status.state, status.prefill, status.decode, status.scale_failure.message) == ("ready", 2, 2, "")


def test_an_instance_that_goes_ends_only_when_it_and_the_scheduler_hold_nothing_for_it() -> None:
    cell = Cell(decode=2)
    assert cell.scale(decode=1) == []
    view = cell.core.view()
    assert (list(view.draining), view.decode, ("decode-1", "prefill-0") in cell.pairs()) == (["decode-1"], 1, True)
    assert cell.core.state() == "ready"
    assert cell.say("decode-1", "draining") == []
    assert cell.say("scheduler-0", "ready", ["decode-1"]) == []
    assert cell.say("scheduler-0", "ready") == []
    assert cell.say("decode-1", "drained") == []
    assert cell.say("scheduler-0", "ready", ["decode-1"]) == [End("decode-1")]
    assert cell.say("scheduler-0", "ready", ["decode-1"]) == []
    assert cell.ended("decode-1") == []
    assert "decode-1" not in cell.core.roster.slots
    assert cell.pairs() == [("decode-0", "prefill-0")]
    assert not cell.core.view().draining


def test_one_that_dies_while_it_drains_is_not_replaced() -> None:
    cell = Cell(prefill=2)
    cell.scale(prefill=1)
    assert cell.ended("prefill-1") == []
    assert "prefill-1" not in cell.core.roster.slots


def test_one_that_does_not_end_or_does_not_drain_is_fenced() -> None:
    cell = Cell(decode=3)
    cell.scale(decode=1)
    cell.say("decode-1", "drained")
    cell.say("scheduler-0", "ready", ["decode-1"])
    fenced: list[tuple[str, float]] = []
    while cell.now < DRAIN_LIMIT_S + 10:
        cell.now += 1.0
        states = {role_id: "draining" if role_id == "decode-2" else "ready" for role_id in cell.core.roster.slots}
        actions = [action for role_id, state in states.items() for action in cell.say(role_id, state)]
        actions += cell.core.tick(cell.now)
        fenced += [(action.role_id, cell.now) for action in actions if isinstance(action, Fence)]
    assert [role_id for role_id, _ in fenced] == ["decode-1", "decode-2"]
    assert fenced[0][1] < 20 < DRAIN_LIMIT_S < fenced[1][1]


def test_an_instance_that_is_not_there_yet_just_goes() -> None:
    cell = Cell()
    cell.scale(decode=3)
    cell.bring_up("decode-1")
    (fence,) = cell.scale(decode=2)
    assert isinstance(fence, Fence)
    assert fence.role_id == "decode-2"


def test_a_new_instance_that_cannot_start_takes_the_change_back_with_its_reason() -> None:
    cell = Cell()
    cell.scale(prefill=2, decode=2)
    cell.bring_up("prefill-1")
    assert [role.id for role in launched(cell.ended("decode-1"))] == []
    cell.now += 10.0
    assert [role.id for role in launched(cell.core.tick(cell.now))] == ["decode-1"]
    cell.ended("decode-1")
    status = cell.core.status("c")
    assert (status.prefill, status.decode) == (1, 1)
    assert "decode-1 failed to start: ended" in status.scale_failure.message
    assert "decode-1" not in cell.core.roster.slots
    assert list(cell.core.view().draining) == ["prefill-1"]
    assert cell.core.failure is None


def test_what_has_come_about_is_not_taken_back_when_an_instance_dies_later() -> None:
    cell = Cell()
    cell.scale(decode=2)
    cell.bring_up("decode-1")
    for _ in range(4):
        cell.ended("decode-1")
        cell.now += 40.0
        cell.core.tick(cell.now)
    assert cell.core.scaling.shape == Shape(1, 2)


def test_what_is_said_late_of_a_process_that_has_gone_is_not_said_of_its_namesake() -> None:
    cell = Cell(decode=2)
    old = cell.core.roster.slots["decode-1"].generation
    cell.scale(decode=1)
    cell.ended("decode-1")
    (launch,) = cell.scale(decode=2)
    assert isinstance(launch, Launch)
    assert launch.generation == old + 1
    assert cell.core.ended("decode-1", old, "the launcher noticed it too", cell.now) == []
    assert "decode-1" in cell.core.roster.slots


@pytest.mark.parametrize(
    ("prefill", "decode", "error", "said"),
    [
        (1025, 0, ConfigError, "between 1 and 1024"),
        (0, 3, ResourceError, r"2 more instances need [0-9.]+ MiB .* only 100.0 MiB"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    prefill: int, decode: int, error: type[Exception], said: str
) -> None:
    cell = Cell()
    with pytest.raises(error, match=said):
        cell.scale(prefill, decode, available_bytes=100 << 20)
    assert cell.core.scaling.shape == Shape(1, 1)
    assert len(cell.core.roster.slots) == 5


def test_a_second_change_waits_until_those_that_go_have_gone_and_none_is_made_at_the_start_or_the_end() -> None:
    cell = Cell(decode=2)
    cell.scale(decode=1)
    with pytest.raises(UnavailableError, match="decode-1 must end"):
        cell.scale(decode=2)
    ending = Cell()
    ending.core.end()
    with pytest.raises(UnavailableError, match="ending"):
        ending.scale(decode=2)


def test_new_instances_take_the_unused_gpus_and_no_more() -> None:
    cell = Cell(gpus=3)
    assert [role.device for role in launched(cell.scale(prefill=2))] == ["cuda:2"]
    with pytest.raises(ResourceError, match="need 4 GPUs, but there are 3"):
        cell.scale(decode=2)
    shared = Cell(decode=3, gpus=2, share_gpu=True)
    with pytest.raises(ResourceError, match="divided for 2 at the start"):
        shared.scale(decode=4)


def test_a_successor_goes_on_with_what_everyone_was_told() -> None:
    first = Cell(decode=1)
    first.scale(prefill=2, decode=3)
    for role_id in ("prefill-1", "decode-1", "decode-2"):
        first.bring_up(role_id)
    first.scale(decode=2)
    told = first.core.view()

    shape = Shape(told.prefill, told.decode)
    planned = plan_roles(first.config, 0, shape)
    core = SupervisorCore(first.config, planned, shape=shape)
    found = [slot.planned for slot in first.core.roster.slots.values()]
    core.scaling.adopt(told, [replace(role) for role in found], 0.0)
    assert core.begin(0.0, [role.id for role in found]) == []
    assert core.scaling.shape == Shape(2, 2)
    assert list(core.view().draining) == ["decode-2"]
    assert [(pair.decode_id, pair.prefill_id) for pair in core.view().pairs] == first.pairs()
    for role in found:
        core.joined(sv.RoleHello(process=key(role.id), pid=1), 0.0)
        state = "drained" if role.id == "decode-2" else "ready"
        drained = ["decode-2"] if role.id == "scheduler-0" else []
        actions = core.heard(key(role.id), sv.Heartbeat(state=state, drained=drained), 0.0)
    assert core.tick(0.1) == []
    assert actions == [] or actions == [End("decode-2")]
    assert core.roster.slots["decode-2"].phase == "ending"
