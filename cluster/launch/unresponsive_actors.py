"""Identifies actors that do not answer a supervisor that has just started.

Their node may be unreachable for a moment. Ray reports when it is gone. Until then they count as running, and are
fenced like other silent processes. Ray knows an actor's name, node and pid; the views of answering processes give its
role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alignedserve.cluster.launch.actors import ACTORS
from alignedserve.cluster.launch.launcher import Running
from alignedserve.cluster.supervisor.handover import newest_view
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, SPARE, Node
from alignedserve.gateway.serve.ray_private import actor_record


@dataclass(frozen=True, slots=True)
class Silent:
    """An actor that runs according to Ray, but does not answer."""

    name: str
    actor: Any
    node: Node
    pid: int

    def identify(self, answered: Sequence[Running], device: str) -> Running | None:
        """The process in the actor; None if it is unknown. `answered` are the processes that answer. `device` is the
        device of instances whose device is unknown. Settings that roles share are taken from another process, of the
        same role if possible."""
        told = newest_view(answered)
        peers = [peer for peer in told.peers if (peer.node_id, peer.pid) == (self.node.node_id, self.pid)]
        role_id = peers[0].process.id if peers else self.name  # a spare that has taken a role keeps its name
        role = role_id.rpartition("-")[0]
        if not answered or (role == SPARE and not peers) or role not in ACTORS:
            return None
        if any(running.settings.id == role_id for running in answered):
            return None
        like = next((running.settings for running in answered if running.settings.role == role), answered[0].settings)
        sockets = [running.settings.agent_socket for running in answered if self.shares_node(running)]
        settings = replace(
            like,
            role=role,
            id=role_id,
            node_id=self.node.node_id,
            host=self.node.host,
            agent_socket=sockets[0] if sockets else "",
            device=(peers[0].device if peers else "") or (device if role in MODEL_ROLES else "cpu"),
            pinned=False,
            after=0,
        )
        return Running(settings, pid=self.pid)

    def shares_node(self, running: Running) -> bool:
        return running.settings.node_id == self.node.node_id


def look_at_silent(name: str, actor: Any, nodes: Mapping[str, Node]) -> Silent | None:
    """Ray's record of the actor; None if it runs on no live node. `nodes`: the live nodes, by Ray's id. Blocks."""
    record = actor_record(actor)
    node = nodes.get(record["Address"]["NodeID"]) if record.get("State") == "ALIVE" else None
    return Silent(name, actor, node, int(record["Pid"])) if node is not None else None
