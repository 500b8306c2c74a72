"""The nodes of a cluster: their numbers, their node agents and shards, and the processes on them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.cluster.runtime_dir import socket_number
from alignedserve.cluster.supervisor.managed_process import Phase, Slot
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, Node, PlannedRole
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.config import Config
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.ranks.degrees import device_of, devices_in

logger = logging.getLogger(__name__)

NODE_ROLES = ("node_agent", "kv_pool")  # roles of which a node with instances has one each

RETURN_S = 10.0  # a new connection may take five seconds per attempt
GONE_KEPT = 128  # processes of nodes that were lost earlier have ended themselves long ago


@dataclass(frozen=True, slots=True)
class Placement:
    """A launcher's answer: the nodes, the supervisor's own first, and the places of instances.

    `where` has the node of each instance, by id; `waiting` has a reason for each instance without a node.
    """

    nodes: tuple[Node, ...]
    where: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    elastic: bool = False
    """Further nodes may join."""
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The further nodes of each placed instance that is spread over several, in order."""


class NodeBook:
    """Changes the roster's slots: each used node has a node agent until it is gone for good, and a shard if an instance
    has its first rank there.

    Nodes are numbered in the order of their first use. Numbers are never reused. Before the first placement there is
    one node without a name.
    """

    def __init__(
        self, config: Config, roster: Roster, gpus: int = 0, socket: Callable[[Node, int], str] | None = None
    ) -> None:
        """`socket` names the Unix socket of a node's agent, by the node and its number."""
        self._config, self._roster = config, roster
        self._socket = socket or (lambda node, number: "")
        self._placement: Placement | None = None  # the launcher's last answer; None before the first
        self._nodes = {"": Node("", gpus=gpus)}  # all nodes of the last placement, by id, the supervisor's own first
        self._numbers: dict[str, int] = {}  # of used nodes, by node id, until they are gone
        self._sockets: dict[str, str] = {}  # of their node agents, by node id
        self._with_shard: set[str] = set()  # nodes that have one, or are to have one
        self._back_at: dict[str, float] = {}  # when unreachable nodes came back; infinite: they still are unreachable
        self._expected_at: dict[str, float] = {}  # since when processes of the node are expected, without a heartbeat
        self.next_number = 0  # of the next node that is used; only grows
        self.gone: dict[str, None] = {}
        """The last `GONE_KEPT` used nodes that are gone for good, in order, even if their processes come back."""

    # ---- queries

    @property
    def home(self) -> Node:
        """The supervisor's own node."""
        return next(iter(self._nodes.values()))

    def node(self, node_id: str) -> Node:
        return self._nodes.get(node_id) or Node(node_id)

    def number(self, node_id: str) -> int | None:
        """The node's number; None if the cluster does not use it."""
        return self._numbers.get(node_id)

    def agent_socket(self, node_id: str) -> str:
        """The socket of the node's agent; empty if it has none."""
        return self._sockets.get(node_id, "")

    @property
    def elastic(self) -> bool:
        return self._placement is not None and self._placement.elastic

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return sum(node.gpus for node in self._nodes.values())

    def unused(self) -> list[Node]:
        """Nodes on which the cluster has neither a node agent nor a shard yet."""
        return [node for node in self._nodes.values() if node.node_id not in self._numbers]

    def waiting(self) -> list[str]:
        """A line for each instance without a node."""
        said = self._placement.waiting if self._placement is not None else {}
        return [f"{role_id}: {why}" for role_id, why in sorted(said.items()) if role_id in self._roster.slots]

    def expect(self, node_id: str, now: float) -> None:
        """Expect processes on the node, which an earlier supervisor or the launcher reported."""
        self._expected_at[node_id] = now

    def follow(self, quiet_s: float, now: float) -> None:
        """Update which other nodes are reachable: a process there sent a message in the last `quiet_s` seconds."""
        heard: dict[str, float] = {}
        for member, _ in self._roster.members():
            node_id = member.hello.node_id
            heard[node_id] = max(heard.get(node_id, 0.0), member.hang_detector.heard_at)
            self._expected_at.pop(node_id, None)
        heard |= self._expected_at
        heard.pop(self.home.node_id, None)
        for node_id, heard_at in heard.items():
            if now - heard_at > quiet_s:
                self._back_at[node_id] = math.inf
            elif self._back_at.get(node_id) == math.inf:
                self._back_at[node_id] = now

    def is_cut_off(self, node_id: str, now: float) -> bool:
        """Whether another node is unreachable, or was a moment ago, because its processes need some time to return."""
        return self._placement is not None and now - self._back_at.get(node_id, -math.inf) < RETURN_S

    def silent(self) -> list[str]:
        """A line for each unreachable node."""
        return [
            f"node {node_id} does not answer" for node_id in self._numbers if self._back_at.get(node_id) == math.inf
        ]

    def pools(self) -> list[sv.PoolShard]:
        slots = [slot.planned for slot in self._roster.slots.values() if slot.planned.role == "kv_pool"]
        return [
            sv.PoolShard(pool_id=role.id, node_id=role.node_id, agent_socket=self.agent_socket(role.node_id))
            for role in slots
        ]

    def nodes_of(self, planned: PlannedRole) -> Sequence[str] | None:
        """The nodes of a placed instance in the order of its ranks; None while they are unknown."""
        if self._placement is None:
            return [planned.node_id] * self._config.spread(planned.role).nodes
        nodes = [planned.node_id, *self._placement.parts.get(planned.id, ())]
        return nodes if len(nodes) == self._config.spread(planned.role).nodes else None

    def planned(self, slot: Slot) -> PlannedRole | None:
        """The role with the node and the device of its next process; None while it has no node."""
        planned = slot.planned
        if self._placement is None or planned.role in NODE_ROLES:
            return planned
        node_id = self._placement.where.get(planned.id) if planned.role in MODEL_ROLES else self.home.node_id
        if node_id is None or node_id == planned.node_id:
            return None if node_id is None else planned
        device = self.free_device(planned.role, node_id) if planned.on_gpu else planned.device
        return replace(planned, node_id=node_id, device=device)

    def free_device(self, role: str, node_id: str = "") -> str:
        """The GPUs of the node with the fewest ranks, one for each rank that an instance has on its first node."""
        planned = [slot.planned for slot in self._roster.slots.values()]
        here = [other.device for other in planned if other.on_gpu and other.node_id == node_id]
        used = [gpu for device in here for gpu in devices_in(device)]
        gpus = sorted(range(max(1, self.node(node_id).gpus)), key=lambda number: used.count(f"cuda:{number}"))
        return device_of(gpus[: len(self._config.spread(role).ranks(0))])

    # ---- changes

    def adopt(self, view: sv.ClusterView, found: Collection[tuple[PlannedRole, str]]) -> None:
        """Take over an earlier supervisor's view, and running roles with the sockets of their node agents. Used nodes
        keep their numbers, whatever still runs there, and lost nodes stay excluded."""
        known: list[tuple[str, int | None, str]] = [
            (shard.node_id, _number(shard.pool_id), shard.agent_socket) for shard in view.pools
        ]
        for role, socket in found:
            number = _number(role.id) if role.role in NODE_ROLES else socket_number(socket)
            known.append((role.node_id, number, socket))
        self._forget(view.gone_nodes)
        self._with_shard |= {shard.node_id for shard in view.pools}
        self._with_shard |= {role.node_id for role, _ in found if role.role == "kv_pool"}
        for node_id, number, socket in known:
            if number is not None and node_id not in self.gone:
                self._numbers[node_id] = number
                told = self._sockets.get(node_id, "")
                self._sockets[node_id] = socket or told or self._socket(self.node(node_id), number)
        self.next_number = max((view.next_node, *(number + 1 for number in self._numbers.values())))

    def take_in(self, placement: Placement) -> list[str]:
        """Apply the current nodes. Returns the used nodes that are gone."""
        self._placement = placement
        self._nodes = {node.node_id: node for node in placement.nodes}
        lost = [node_id for node_id in self._numbers if node_id not in self._nodes]
        for node_id in lost:
            logger.warning("node %s is gone", node_id)
            for role in NODE_ROLES:
                role_id = f"{role}-{self._numbers[node_id]}"
                if role_id in self._roster.slots:
                    self._roster.remove(role_id)
            del self._numbers[node_id], self._sockets[node_id]
            self._with_shard.discard(node_id)
            self._back_at.pop(node_id, None)
            self._expected_at.pop(node_id, None)
        self._forget(lost)
        return lost

    def _forget(self, nodes: Iterable[str]) -> None:
        self.gone.update(dict.fromkeys(nodes))
        for node_id in list(self.gone)[:-GONE_KEPT]:
            del self.gone[node_id]

    def open(self, now: float) -> list[PlannedRole]:
        """Plan a node agent for each node with ranks, and a shard for each with an instance's first one, if it has none
        yet. Returns these roles.
        """
        if self._placement is None:
            return []
        wanted = [slot.planned.id for slot in self._roster.slots.values() if slot.planned.role in MODEL_ROLES]
        where = self._placement.where
        placed = dict.fromkeys(where[role_id] for role_id in wanted if role_id in where)
        self._with_shard.update(placed)
        further = [node_id for role_id in wanted for node_id in self._placement.parts.get(role_id, ())]
        added = []
        for node_id in dict.fromkeys([*placed, *further, *self._numbers]):
            if node_id not in self._numbers:
                self._numbers[node_id] = self.next_number
                self._sockets[node_id] = self._socket(self.node(node_id), self.next_number)
                self.next_number += 1
            for role in NODE_ROLES if node_id in self._with_shard else NODE_ROLES[:1]:
                planned = PlannedRole(role, f"{role}-{self._numbers[node_id]}", node_id=node_id)
                if planned.id not in self._roster.slots:
                    self._roster.add(planned).launch_at = now
                    added.append(planned)
        if added:
            self._roster.sort()
        return added

    def on(self, node_id: str) -> list[Slot]:
        """Slots whose processes are on the node."""
        return [
            slot
            for slot in self._roster.slots.values()
            if slot.phase is not Phase.WAITING and node_id in (slot.planned.node_id, _seen_on(slot))
        ]


def _number(role_id: str) -> int:
    """The number of the node of a role in `NODE_ROLES`."""
    return int(role_id.rpartition("-")[2])


def _seen_on(slot: Slot) -> str:
    return slot.member.hello.node_id if slot.member is not None else ""
