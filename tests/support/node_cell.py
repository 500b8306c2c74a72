"""A supervisor core on two nodes, and its roles' messages, for tests of placement."""

from __future__ import annotations

from alignedserve.cluster.supervisor.actions import Action, Launch
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import Node, Shape, plan_processes
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.config import ClusterConfig, Config, SupervisorConfig
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from support.fake_roles import MODEL

LIMITS = SupervisorConfig(heartbeat_s=1.0, fence_after_s=5.0, start_timeout_s=60.0, orphan_after_s=60.0)
GIB = 1 << 30
HOME, OTHER, THIRD = Node("home", "10.0.0.1", 2), Node("other", "10.0.0.2", 2), Node("third", "10.0.0.3", 2)
APART = {"prefill-0": "home", "decode-0": "other"}
MEMORY = {"node_agent-0": 8 * GIB, "node_agent-1": 4 * GIB}


class Cell:
    """A core on two nodes, and its roles' messages. Tests change `where`, and report it with `locate`."""

    def __init__(self, prefill: int = 1, decode: int = 1, where: dict[str, str] | None = None, **cluster: str) -> None:
        settings = {"device": "cpu", **cluster}
        self.config = Config(
            cluster=ClusterConfig(prefill=prefill, decode=decode, **settings),  # type: ignore[arg-type]
            supervisor=LIMITS,
        )
        self.shape = Shape(prefill, decode)
        self.where = dict(APART if where is None else where)
        self.nodes = [HOME, OTHER]
        self.now = 0.0
        self.core = self.new_core()
        self.core.settle(self.placement(), 0.0)
        self.incarnations: dict[str, int] = {}

    def new_core(self) -> SupervisorCore:
        planned = plan_processes(self.config, self.config.cluster.device, self.shape)
        return SupervisorCore(self.config, planned, shape=self.shape, agent_socket=lambda node, n: f"/agent-{n}.sock")

    def placement(self) -> Placement:
        alive = {node.node_id for node in self.nodes}
        wanted = [role_id for _, role_id in self.shape.ids()]
        where = {name: self.where[name] for name in wanted if self.where.get(name) in alive}
        waiting = {name: "waits for a node with 1 GPU" for name in wanted if name not in where}
        return Placement(tuple(self.nodes), where, waiting)

    def locate(self) -> list[Action]:
        return self.core.located(self.placement(), self.now)

    def hello(self, role_id: str, node_id: str = "") -> sv.RoleHello:
        key = pb.ProcessKey(role=role_id.rpartition("-")[0], id=role_id, incarnation=self.incarnations[role_id])
        slot = self.core.roster.slots.get(role_id)
        at = node_id or (slot.planned.node_id if slot is not None else "")
        return sv.RoleHello(process=key, pid=self.incarnations[role_id], node_id=at)

    def bring_up(self, role_id: str) -> None:
        self.incarnations[role_id] = self.incarnations.get(role_id, 0) + 1
        assert self.core.joined(self.hello(role_id), self.now) is None
        self.say(role_id)

    def say(self, role_id: str) -> list[Action]:
        beat = sv.Heartbeat(state="ready")
        if role_id in MEMORY:
            beat.gauges[MEMORY_GAUGE] = float(MEMORY[role_id])
        if role_id.startswith(("prefill", "decode")):
            beat.model_info = MODEL.to_json()
        return self.core.heard(self.hello(role_id).process, beat, self.now)

    def start(self) -> None:
        self.core.begin(self.now)
        for role_id in list(self.core.roster.slots):
            self.bring_up(role_id)
        assert self.core.state() == "ready"

    def pass_time(self, seconds: float, silent: set[str] = frozenset()) -> list[Action]:  # type: ignore[assignment]
        """Each process sends a heartbeat once a second, except those on silent nodes."""
        actions: list[Action] = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            for slot in list(self.core.roster.slots.values()):
                heard = slot.member is not None and slot.member.hello.node_id not in silent and self.now % 1.0 == 0.0
                if heard and slot.phase == "joined":
                    actions += self.say(slot.planned.id)
            actions += self.core.tick(self.now)
        return actions

    def pools(self) -> dict[str, str]:
        return {shard.pool_id: shard.node_id for shard in self.core.view().pools}


def launched(actions: list[Action]) -> dict[str, str]:
    return {action.planned.id: action.planned.node_id for action in actions if isinstance(action, Launch)}
