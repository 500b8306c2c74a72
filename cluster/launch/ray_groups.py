"""AlignedServe's placement groups in Ray: their names, and the removal of groups of dead clusters.

The groups are detached, because a cluster outlives a supervisor that is replaced. At the end the supervisor releases
them. If it was killed and has no successor, the last process of the cluster does (`leave_nothing`). If all were killed,
the next supervisor that starts in this Ray cluster does, of any application (`remove_abandoned`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

logger = logging.getLogger(__name__)

NAMESPACE = "alignedserve-"  # prefix of an application's namespace in Ray
RANKS = "ranks:"  # begins the names of actors that have ranks of an instance on a further node; no roles
LEAVE_S = 10.0  # time within which the other processes of a cluster without a supervisor end, too
LOOK_S = 0.25
_LIVING = ("PENDING", "PREPARED", "CREATED", "RESCHEDULING")
_SERVE = "serve"  # its namespace
_SUPERVISOR = "SERVE_REPLICA::{}#Supervisor#"  # prefix of the replica's name, with the application's name


@dataclass(frozen=True, slots=True)
class Group:
    """A placement group of AlignedServe. `entry` is its entry in Ray's table."""

    identity: str
    namespace: str
    cluster_id: str
    units: tuple[tuple[str, ...], ...]
    entry: Mapping[str, Any]

    @property
    def instances(self) -> frozenset[str]:
        return frozenset(name for unit in self.units for name in unit)

    def remove(self) -> None:
        """Remove the group and release its room. Ray kills actors that still run in it."""
        remove_placement_group(handle(self.identity))


def group_name(namespace: str, cluster_id: str, units: Iterable[Iterable[str]]) -> str:
    return f"{namespace}/{cluster_id}/{'+'.join(','.join(unit) for unit in units)}"


def groups() -> list[Group]:
    """All groups of AlignedServe in this Ray cluster that have room or wait for it."""
    found = []
    for identity, entry in placement_group_table().items():
        parts = entry["name"].rsplit("/", 2)  # an application's name may have a slash
        if entry["state"] in _LIVING and len(parts) == 3 and parts[0].startswith(NAMESPACE):
            units = tuple(tuple(unit.split(",")) for unit in parts[2].split("+"))
            found.append(Group(identity, parts[0], parts[1], units, entry))
    return found


def handle(identity: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(identity)))


def remove_abandoned(but: str) -> None:
    """Remove the groups of clusters of any application that have no processes any more. Groups in the namespace `but`
    are kept."""
    if not (found := [group for group in groups() if group.namespace != but]):
        return
    living = Living.now()
    for group in found:
        if not living.has_supervisor(group.namespace) and not living.roles(group.namespace):
            logger.warning("removing placement group %s: its cluster is dead", group.entry["name"])
            group.remove()


def leave_nothing(namespace: str, name: str) -> bool:
    """For a process that ends because it has no supervisor: the last one of its cluster removes the groups.

    Returns whether this process did. Blocks for at most `LEAVE_S`. `name` is its own name in Ray. All processes end at
    about the same time. One of them waits for the others, which do not wait.
    """
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline:
        living = Living.now()
        others = living.roles(namespace) - {name}
        if living.has_supervisor(namespace) or min((name, *others), key=_lasting) != name:
            return False
        if not others:
            for group in groups():
                if group.namespace == namespace:
                    group.remove()
            return True
        time.sleep(LOOK_S)
    return False


def _lasting(name: str) -> tuple[bool, str]:
    """Sort key: node agents first, because a node agent without a supervisor ends the other processes of its node."""
    return not name.startswith("node_agent"), name


@dataclass(frozen=True, slots=True)
class Living:
    """The named actors of a Ray cluster, by namespace. Roles are in their application's, supervisors in Serve's."""

    names: Mapping[str, frozenset[str]]

    @classmethod
    def now(cls) -> Living:
        found: dict[str, set[str]] = {}
        for entry in ray.util.list_named_actors(all_namespaces=True):
            found.setdefault(entry["namespace"], set()).add(entry["name"])
        return cls({namespace: frozenset(names) for namespace, names in found.items()})

    def roles(self, namespace: str) -> frozenset[str]:
        return frozenset(name for name in self.names.get(namespace, ()) if not name.startswith(RANKS))

    def has_supervisor(self, namespace: str) -> bool:
        begins = _SUPERVISOR.format(namespace.removeprefix(NAMESPACE))
        return any(name.startswith(begins) for name in self.names.get(_SERVE, ()))
