"""The settings that the supervisor starts a role's process with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignedserve.cluster.launch.launcher import Running
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.cluster.supervisor.managed_process import Slot
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, Node, resolve_device
from alignedserve.config import Config
from alignedserve.control.runtime import RoleSettings


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a cluster. A supervisor's successor keeps it."""

    cluster_id: str
    token: str = field(repr=False)


def role_settings(
    core: SupervisorCore, slot: Slot, tree: Mapping[str, Any], identity: Identity, supervisor_address: str
) -> RoleSettings:
    """The settings of the role in `slot`, on its node. `tree`: the configuration."""
    node = core.nodes.node(slot.planned.node_id)
    return RoleSettings(
        role=slot.planned.role,
        id=slot.planned.id,
        config=tree,
        cluster_id=identity.cluster_id,
        token=identity.token,
        node_id=node.node_id,
        host=node.host,
        agent_socket=core.nodes.agent_socket(node.node_id),
        supervisor_address=supervisor_address,
        device=slot.device or slot.planned.device,
        pinned=bool(slot.device),
        after=core.roster.newest(),
    )


def device_of(config: Config, nodes: list[Node], found: Sequence[Running]) -> str:
    """Device of new instances, "cpu" or "cuda": that of running ones, otherwise the configured one."""
    if any(running.settings.role in MODEL_ROLES and running.settings.device.startswith("cuda") for running in found):
        return "cuda"
    return resolve_device(config, max(node.gpus for node in nodes))
