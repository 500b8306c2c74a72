"""The machines that a cluster is on: how they are numbered, what each has of its own, and what runs where."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from alignedserve.cluster.runtime_dir import socket_number
from alignedserve.cluster.supervisor.managed_process import Phase, Slot
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, Node, PlannedRole
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

NODE_ROLES = ("node_agent", "kv_pool")  # which each node has for itself that instances are on

RETURN_S = 10.0  # a connection that is opened anew tries for five seconds at a time
GONE_KEPT = 128  # processes of nodes that went before these have ended themselves long ago


@dataclass(frozen=True, slots=True)
class Placement:
    """What a launcher says: the machines that there are, the supervisor's own first, and where instances are to run.

    `where` has the node of each instance, by id; `waiting` what those wait for that have none yet.
    """

    nodes: tuple[Node, ...]
    where: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    elastic: bool = False
    """Nodes may come that nobody has heard of yet."""


class NodeBook:
    """Changes the roster's slots: each node that is used has an agent and a shard, until it is gone for good.

    Nodes are numbered as they are first used, and no number is given twice. Before the first placement there is one
    node, which has no name.
    """

    def __init__(self, roster: Roster, gpus: int = 0, socket: Callable[[Node, int], str] | None = None) -> None:
        """`socket` names the Unix socket of a node's agent, by the node and its number."""
        self._roster = roster
        self._socket = socket or (lambda node, number: "")
        self._placement: Placement | None = None
        self._nodes = {"": Node("", gpus=gpus)}
        self._numbers: dict[str, int] = {}
        self._sockets: dict[str, str] = {}
        self._back_at: dict[str, float] = {}  # of nodes that were out of contact; infinite: they still are
        self._expected_at: dict[str, float] = {}  # since when somebody of the node is waited for, and none was heard
        self.next_number = 0
        self.gone: dict[str, None] = {}
        """The last `GONE_KEPT` nodes that were used and count as ended for good, whoever comes back, in their order."""

    # ---- what is known

    @property
    def home(self) -> Node:
        """The supervisor's own node."""
        return next(iter(self._nodes.values()))

    def node(self, node_id: str) -> Node:
        return self._nodes.get(node_id) or Node(node_id)

    def number(self, node_id: str) -> int | None:
        """None where the cluster has nothing of its own on the node."""
        return self._numbers.get(node_id)

    def agent_socket(self, node_id: str) -> str:
        """Of the node's agent; empty where it has none."""
        return self._sockets.get(node_id, "")

    @property
    def elastic(self) -> bool:
        return self._placement is not None and self._placement.elastic

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return sum(node.gpus for node in self._nodes.values())

    def unused(self) -> list[Node]:
        """Those on which the cluster has neither an agent nor a shard yet."""
        return [node for node in self._nodes.values() if node.node_id not in self._numbers]

    def waiting(self) -> list[str]:
        """Instances that have no node, a line each."""
        said = self._placement.waiting if self._placement is not None else {}
        return [f"{role_id}: {why}" for role_id, why in sorted(said.items()) if role_id in self._roster.slots]

    def expect(self, node_id: str, now: float) -> None:
        """Somebody runs there, as an earlier supervisor or the launcher said, who has yet to be heard of."""
        self._expected_at[node_id] = now

    def follow(self, quiet_s: float, now: float) -> None:
        """Look which of the other nodes are in contact: somebody there was heard in the last so many seconds."""
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
        """Whether another node is out of contact, or was a moment ago: its processes need some time to come back."""
        return self._placement is not None and now - self._back_at.get(node_id, -math.inf) < RETURN_S

    def silent(self) -> list[str]:
        """The nodes that are out of contact, a line each."""
        return [
            f"node {node_id} does not answer" for node_id in self._numbers if self._back_at.get(node_id) == math.inf
        ]

    def pools(self) -> list[sv.PoolShard]:
        slots = [slot.planned for slot in self._roster.slots.values() if slot.planned.role == "kv_pool"]
        return [
            sv.PoolShard(pool_id=role.id, node_id=role.node_id, agent_socket=self.agent_socket(role.node_id))
            for role in slots
        ]

    def planned(self, slot: Slot) -> PlannedRole | None:
        """The role, with the node and the device of its next process; None while there is no node for it."""
        planned = slot.planned
        if self._placement is None or planned.role in NODE_ROLES:
            return planned
        node_id = self._placement.where.get(planned.id) if planned.role in MODEL_ROLES else self.home.node_id
        if node_id is None or node_id == planned.node_id:
            return None if node_id is None else planned
        device = self.free_device(node_id) if planned.on_gpu else planned.device
        return replace(planned, node_id=node_id, device=device)

    def free_device(self, node_id: str = "") -> str:
        """The GPU of the node that the fewest instances are on."""
        planned = [slot.planned for slot in self._roster.slots.values()]
        used = [role.device for role in planned if role.on_gpu and role.node_id == node_id]
        return min((f"cuda:{number}" for number in range(max(1, self.node(node_id).gpus))), key=used.count)

    # ---- what changes

    def adopt(self, view: sv.ClusterView, found: Iterable[tuple[PlannedRole, str]]) -> None:
        """What an earlier supervisor told everyone, and roles that run, with the sockets of their nodes' agents: nodes
        that are used keep their numbers, whatever runs there still, and those that have gone stay away."""
        known: list[tuple[str, int | None, str]] = [
            (shard.node_id, _number(shard.pool_id), shard.agent_socket) for shard in view.pools
        ]
        for role, socket in found:
            number = _number(role.id) if role.role in NODE_ROLES else socket_number(socket)
            known.append((role.node_id, number, socket))
        self._forget(view.gone_nodes)
        for node_id, number, socket in known:
            if number is not None and node_id not in self.gone:
                self._numbers[node_id] = number
                told = self._sockets.get(node_id, "")
                self._sockets[node_id] = socket or told or self._socket(self.node(node_id), number)
        self.next_number = max((view.next_node, *(number + 1 for number in self._numbers.values())))

    def take_in(self, placement: Placement) -> list[str]:
        """What there is now. Returns the nodes that were used and have gone."""
        self._placement = placement
        self._nodes = {node.node_id: node for node in placement.nodes}
        lost = [node_id for node_id in self._numbers if node_id not in self._nodes]
        for node_id in lost:
            logger.warning("node %s has gone", node_id)
            for role in NODE_ROLES:
                role_id = f"{role}-{self._numbers[node_id]}"
                if role_id in self._roster.slots:
                    self._roster.remove(role_id)
            del self._numbers[node_id], self._sockets[node_id]
            self._back_at.pop(node_id, None)
            self._expected_at.pop(node_id, None)
        self._forget(lost)
        return lost

    def _forget(self, nodes: Iterable[str]) -> None:
        self.gone.update(dict.fromkeys(nodes))
        for node_id in list(self.gone)[:-GONE_KEPT]:
            del self.gone[node_id]

    def open(self, now: float) -> list[PlannedRole]:
        """Give every node that instances are to be on, and that has none yet, an agent and a shard. Returns these."""
        if self._placement is None:
            return []
        wanted = [slot.planned.id for slot in self._roster.slots.values() if slot.planned.role in MODEL_ROLES]
        placed = dict.fromkeys(self._placement.where[role_id] for role_id in wanted if role_id in self._placement.where)
        added = []
        for node_id in [*placed, *self._numbers]:
            if node_id not in self._numbers:
                self._numbers[node_id] = self.next_number
                self._sockets[node_id] = self._socket(self.node(node_id), self.next_number)
                self.next_number += 1
            for role in NODE_ROLES:
                planned = PlannedRole(role, f"{role}-{self._numbers[node_id]}", node_id=node_id)
                if planned.id not in self._roster.slots:
                    self._roster.add(planned).launch_at = now
                    added.append(planned)
        if added:
            self._roster.sort()
        return added

    def on(self, node_id: str) -> list[Slot]:
        """Those whose processes are on the node."""
        return [
            slot
            for slot in self._roster.slots.values()
            if slot.phase is not Phase.WAITING and node_id in (slot.planned.node_id, _seen_on(slot))
        ]


def _number(role_id: str) -> int:
    """Of the node that the role is one of `NODE_ROLES` of."""
    return int(role_id.rpartition("-")[2])


def _seen_on(slot: Slot) -> str:
    return slot.member.hello.node_id if slot.member is not None else ""
