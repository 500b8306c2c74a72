"""A rolling restart in a small world: processes obey, and at most one of each kind is missing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from alignedserve.cluster.supervisor.actions import Action, End, Fence, Launch
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.managed_process import Phase
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import Node, PlannedRole, plan_roles
from alignedserve.cluster.supervisor.rolling import ORDER, PATIENCE_S, ROOM_S
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.config import ClusterConfig, Config, GatewayConfig, SupervisorConfig
from alignedserve.control.supervisor_client import restart_json
from alignedserve.errors import ConfigError, UnavailableError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from support.fake_roles import MODEL

LIMITS = SupervisorConfig(heartbeat_s=1.0, fence_after_s=6.0, start_timeout_s=60.0)
PLENTY = 1 << 50
ORDERED_NS = 1000
STEP_S = 0.5


class World:
    """`broken` processes never become ready again. `log` has the processes that ended and started, in order. The first
    processes started at `first_ns`, by the clocks of their nodes."""

    def __init__(
        self,
        decode: int = 1,
        gateways: Collection[str] = ("gateway-a",),
        own: int = 1,
        first_ns: int = 1,
        spares: int = 0,
    ) -> None:
        limits = replace(LIMITS, spares=spares)
        config = Config(cluster=ClusterConfig(device="cpu", decode=decode), supervisor=limits)
        self.core = SupervisorCore(config, plan_roles(config, 0))
        self.core.incarnation = own
        self.now = 100.0
        self.log: list[str] = []
        self.broken: set[str] = set()
        self.old_spares_used = 0
        self.node_id = ""
        self._next = ORDERED_NS + 1
        self.core.begin(self.now)
        for number, role_id in enumerate((*self.core.roster.slots, *gateways)):
            self.join(role_id, first_ns + number)
        assert self.core.state() == "ready"

    def join(self, role_id: str, incarnation: int) -> list[Action]:
        key = pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=incarnation)
        assert self.core.joined(sv.RoleHello(process=key, pid=7, node_id=self.node_id), self.now) is None
        return self.beat(role_id, key)

    def beat(self, role_id: str, key: pb.ProcessKey) -> list[Action]:
        draining = self.core.view().draining
        beat = sv.Heartbeat(state="drained" if role_id in draining else "ready")
        if role_id == "scheduler-0":
            beat.drained.extend(draining)
        if role_id == "node_agent-0":
            beat.gauges[MEMORY_GAUGE] = 4.0 * (1 << 30)
        if key.role in ("prefill", "decode"):
            beat.model_info = MODEL.to_json()
        return self.core.heard(key, beat, self.now)

    def order(self, *roles: str, available_bytes: int = PLENTY) -> None:
        self.do(self.core.restart(roles or ORDER, {self.node_id: available_bytes}, self.now, ORDERED_NS))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                slot = self.core.roster.slots[action.planned.id]
                self.old_spares_used += bool(self.core.take_spare(slot, self.now)) and self._is_old_spare
                self.do(self._launch(action.planned.id, action.generation))
            elif isinstance(action, End | Fence):
                self.log.append(f"-{action.role_id}")
                slot = self.core.roster.slots[action.role_id]
                self.do(self.core.ended(action.role_id, slot.generation, "it was told to", self.now))

    def _launch(self, role_id: str, generation: int) -> list[Action]:
        if role_id in self.broken:
            return self.core.ended(role_id, generation, "no memory", self.now)
        self.log.append(f"+{role_id}")
        self._next += 1
        return self.join(role_id, self._next)

    def run(self, seconds: float = 30.0) -> None:
        until = self.now + seconds
        while self.now < until and self.core.rolling.running:
            self.now += STEP_S
            for member, _ in self.core.roster.members():
                self.do(self.beat(member.key.id, member.key))
            self._serve()
            self.do(self.core.tick(self.now))
            self.check()

    def _serve(self) -> None:
        """Ray Serve ends the gateways that report themselves unhealthy, and starts others."""
        for name in list(self.core.rolling.state.retiring):
            if name in self.core.roster.guests:
                self.log += [f"-{name}", "+gateway"]
                self.core.roster.drop_guest(name, "it was retired")
                self._next += 1
                self.join(f"gateway-{self._next}", self._next)

    def check(self) -> None:
        """At most one process at a time is not ready."""
        away = [slot.planned.id for slot in self.core.roster.slots.values() if not slot.ready]
        assert len(away) <= 1, away

    @property
    def _is_old_spare(self) -> bool:
        """Whether the first spare has not been replaced yet."""
        return "-spare-0" not in self.log

    @property
    def state(self) -> sv.Restart:
        return self.core.rolling.state


def progress(world: World) -> tuple[int, int]:
    """The processes to replace and those that were replaced, as `alignedserve restart` shows them."""
    own = sv.Peer(process=pb.ProcessKey(role="supervisor", id="supervisor", incarnation=world.core.incarnation))
    status = world.core.status("c")
    told = restart_json(status.restart, [*status.peers, own])
    return told["processes"], told["replaced"]


def test_everything_is_replaced_once_and_in_order() -> None:
    world = World(decode=2, gateways=("gateway-a", "gateway-b"))
    world.order()
    assert progress(world) == (9, 0)
    world.run()
    assert progress(world) == (9, 8)  # the supervisor is left
    instances = ["+decode-2", "-decode-0", "+decode-0", "-decode-1", "+decode-1", "-decode-2"]
    instances += ["+prefill-1", "-prefill-0", "+prefill-0", "-prefill-1"]
    single = [f"{sign}{role}-0" for role in ("kv_pool", "scheduler", "node_agent") for sign in "-+"]
    gateways = ["-gateway-a", "+gateway", "-gateway-b", "+gateway"]
    assert world.log == [*instances, *single, *gateways]
    assert (world.state.done, world.core.rolling.supervisor_due) == (False, True)
    assert world.core.status("c").restart.doing == "the supervisor is replaced"


def test_no_role_goes_on_in_a_spare_that_is_older_than_the_order() -> None:
    world = World(spares=1)
    assert world.core.roster.ready_spare() is not None
    world.log.clear()
    world.order("kv_pool", "scheduler")
    world.run()
    singles = ["-kv_pool-0", "+kv_pool-0", "-scheduler-0", "+scheduler-0"]
    assert [entry for entry in world.log if "spare" not in entry] == singles
    assert world.log[0] == "-spare-0"
    assert (world.state.done, world.state.failure) == (True, "")
    assert world.old_spares_used == 0


@pytest.mark.parametrize("skew_ns", [-500, 500], ids=["behind", "ahead"])
def test_clocks_of_other_nodes_do_not_say_which_process_is_old(skew_ns: int) -> None:
    """With skewed clocks, a successor seems to have started before the order, or an old process after it."""
    world = World(decode=2, first_ns=ORDERED_NS + skew_ns - 100)
    world._next = ORDERED_NS + skew_ns
    world.order("decode", "node_agent", "gateway")
    world.run()
    instances = ["+decode-2", "-decode-0", "+decode-0", "-decode-1", "+decode-1", "-decode-2"]
    assert world.log == [*instances, "-node_agent-0", "+node_agent-0", "-gateway-a", "+gateway"]
    assert (world.state.done, world.state.failure) == (True, "")


@pytest.mark.parametrize("heir_ns", [ORDERED_NS - 100, ORDERED_NS + 100], ids=["behind", "ahead"])
def test_the_supervisors_successor_is_new_whatever_its_clock_says(heir_ns: int) -> None:
    world = World(own=ORDERED_NS + 50)
    world.order("supervisor")
    world.run(2.0)
    assert world.core.rolling.supervisor_due
    heir = World(own=heir_ns)
    heir.core.rolling.adopt(world.core.view(), heir.now)
    heir.run()
    assert (heir.state.done, heir.core.rolling.supervisor_due) == (True, False)


def test_one_that_was_launched_before_the_order_and_joins_after_it_is_replaced() -> None:
    world = World()
    world.now += 10.0  # or it would have failed to start twice
    launch = world.core.ended("scheduler-0", world.core.roster.slots["scheduler-0"].generation, "killed", world.now)
    world.order("scheduler")
    world.do(launch)
    world.run()
    assert world.log == ["+scheduler-0", "-scheduler-0", "+scheduler-0"]
    assert world.state.done


def test_the_supervisors_successor_goes_on_and_finds_that_it_is_done() -> None:
    world = World()
    world.order("scheduler", "supervisor")
    world.run()
    heir = World(own=ORDERED_NS + 9)
    heir.core.rolling.adopt(world.core.view(), heir.now)
    heir.core.heard(heir.core.roster.slots["scheduler-0"].member.key, sv.Heartbeat(state="ready"), heir.now)  # type: ignore[union-attr]
    heir.run()
    assert heir.state.done
    assert not heir.core.rolling.supervisor_due
    assert heir.state.failure == ""


def test_without_room_for_one_more_an_instance_drains_first() -> None:
    world = World()
    world.order("decode", available_bytes=1 << 20)
    world.run()
    assert world.log == ["-decode-0", "+decode-0"]
    assert world.state.done


def full(world: World) -> World:
    """Put the world on one full node of a Ray cluster that others may join."""
    world.node_id = "n0"
    where = dict.fromkeys((role_id for _, role_id in world.core.scaling.shape.ids()), "n0")
    placement = Placement((Node("n0"),), where, {"decode-2": "waits", "prefill-1": "waits"}, elastic=True)
    world.core.settle(placement, world.now)
    return world


def test_one_more_that_finds_no_place_is_not_waited_for() -> None:
    world = full(World(decode=2))
    world.order("decode", "prefill")
    world.run(2 * ROOM_S + 15.0)
    assert world.log == [
        f"{sign}{name}-{n}" for name, n in (("decode", 0), ("decode", 1), ("prefill", 0)) for sign in "-+"
    ]
    assert (world.state.done, world.state.failure, list(world.state.surplus)) == (True, "", [])
    assert (world.core.scaling.shape.prefill, world.core.scaling.shape.decode) == (1, 2)
    assert world.core.scaling.failure == ""
    assert world.core.state() == "ready"


def test_a_successor_gives_up_one_more_that_had_no_process() -> None:
    world = full(World(decode=2))
    world.order("decode")
    world.run(2.0)
    view = world.core.view()
    assert (view.decode, world.state.doing) == (3, "decode-2 starts")
    heir = full(World(decode=3, own=ORDERED_NS + 9))
    heir.core.roster.remove("decode-2")
    heir.core.roster.add(PlannedRole("decode", "decode-2", "cpu"))
    heir.core.rolling.adopt(view, heir.now)
    assert heir.core.scaling.shape.decode == 2
    assert heir.core.roster.all_ready()
    heir.do(heir.core.tick(heir.now))
    assert heir.core.view().decode == 3  # and tries again
    assert "decode-2" in heir.core.roster.slots


def test_only_the_roles_asked_for_are_touched() -> None:
    world = World()
    world.order("kv_pool")
    world.run()
    assert world.log == ["-kv_pool-0", "+kv_pool-0"]


def test_a_second_order_and_a_change_of_size_are_refused_meanwhile() -> None:
    world = World()
    world.order()
    with pytest.raises(UnavailableError, match="under way"):
        world.order("decode")
    with pytest.raises(UnavailableError, match="under way"):
        world.core.scale(0, 3, {"": PLENTY}, world.now)
    world.run()
    assert world.core.scaling.shape.decode == 1


def test_what_is_no_role_is_refused() -> None:
    world = World()
    with pytest.raises(ConfigError, match="unknown role 'worker'"):
        world.order("worker")
    assert world.state.done


def test_what_does_not_start_again_stops_it_with_the_reason_and_nothing_else_is_touched() -> None:
    world = World()
    world.broken = {"scheduler-0"}
    world.order("scheduler", "node_agent")
    world.run()
    assert world.state.done
    assert world.state.failure == "scheduler-0 does not start: no memory"
    assert "-node_agent-0" not in world.log


def test_one_more_that_cannot_start_stops_it_before_any_other_has_gone() -> None:
    world = World()
    world.broken = {"decode-1"}
    world.order("decode")
    world.run(120.0)
    assert world.state.done
    assert "decode-1" in world.state.failure
    assert world.log == []
    assert world.core.scaling.shape.decode == 1


def test_a_gateway_that_serve_does_not_replace_stops_it_after_a_while() -> None:
    world = World(gateways=())
    world.join("gateway-a", 1)
    world.order("gateway")
    world._serve = lambda: None  # type: ignore[method-assign]
    world.run(LIMITS.start_timeout_s + GatewayConfig().drain_s + PATIENCE_S + 5.0)
    assert world.state.done
    assert "gateway-a drains for" in world.state.failure


def test_nothing_is_decided_while_a_successor_takes_over() -> None:
    world = World()
    world.core.paused = True
    assert world.core.ended("decode-0", world.core.roster.slots["decode-0"].generation, "killed", world.now) == []
    assert world.core.roster.slots["decode-0"].phase is Phase.WAITING
    prefill = world.core.roster.slots["prefill-0"].member
    assert prefill is not None
    assert world.core.heard(prefill.key, sv.Heartbeat(state="failed"), world.now) == []
    scheduler = world.core.roster.slots["scheduler-0"]
    scheduler.draining_since, scheduler.used = world.now, False
    assert world.core.heard(prefill.key, sv.Heartbeat(state="ready"), world.now) == []
    scheduler.draining_since = None
    world.core.paused = False
    assert [action.planned.id for action in world.core.tick(world.now) if isinstance(action, Launch)] == ["decode-0"]
