"""Ray's placement groups of ours: by their names, whose they are and for whom; and how those of dead clusters go.

They are detached, since a cluster outlives a supervisor that is replaced. In the end the supervisor releases them;
where it was killed and has no successor, the last of its roles does (`leave_nothing`); where all were killed, the next
supervisor that starts in this Ray cluster, of whatever application (`remove_abandoned`).
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

NAMESPACE = "alignedserve-"  # an application's own in Ray, with its name
LEAVE_S = 10.0  # in which the others of a cluster without a supervisor have ended, too
LOOK_S = 0.25
_LIVING = ("PENDING", "PREPARED", "CREATED", "RESCHEDULING")
_SERVE = "serve"  # its namespace
_SUPERVISOR = "SERVE_REPLICA::{}#Supervisor#"  # a replica's name begins so, with its application's


@dataclass(frozen=True, slots=True)
class Group:
    """A group of ours. `entry` is what Ray's table has of it."""

    identity: str
    namespace: str
    cluster_id: str
    units: tuple[tuple[str, ...], ...]
    entry: Mapping[str, Any]

    @property
    def instances(self) -> frozenset[str]:
        return frozenset(name for unit in self.units for name in unit)

    def remove(self) -> None:
        """Give its room back. Ray kills whoever still runs in it."""
        remove_placement_group(handle(self.identity))


def group_name(namespace: str, cluster_id: str, units: Iterable[Iterable[str]]) -> str:
    return f"{namespace}/{cluster_id}/{'+'.join(','.join(unit) for unit in units)}"


def groups() -> list[Group]:
    """All groups of ours that take room, or wait for it, in this Ray cluster."""
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
    """Remove the groups of clusters, of whatever application, that have neither a supervisor nor a role any more; those
    in the namespace `but` are left out."""
    if not (found := [group for group in groups() if group.namespace != but]):
        return
    living = Living.now()
    for group in found:
        if not living.has_supervisor(group.namespace) and not living.roles(group.namespace):
            logger.warning("placement group %s goes: its cluster is dead", group.entry["name"])
            group.remove()


def leave_nothing(namespace: str, name: str) -> bool:
    """For a role that ends since there is no supervisor: the last of its cluster removes its groups. Returns whether
    this one did. Blocks, for `LEAVE_S` at most. `name` is the role's own in Ray.

    They all end at about the same moment. One of them waits for the others, which wait for nobody.
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
    """Agents come first: one that ends without a supervisor ends the others of its node."""
    return not name.startswith("node_agent"), name


@dataclass(frozen=True, slots=True)
class Living:
    """The named actors of a Ray cluster, by namespace: roles are in their application's, supervisors in Serve's."""

    names: Mapping[str, frozenset[str]]

    @classmethod
    def now(cls) -> Living:
        found: dict[str, set[str]] = {}
        for entry in ray.util.list_named_actors(all_namespaces=True):
            found.setdefault(entry["namespace"], set()).add(entry["name"])
        return cls({namespace: frozenset(names) for namespace, names in found.items()})

    def roles(self, namespace: str) -> frozenset[str]:
        return self.names.get(namespace, frozenset())

    def has_supervisor(self, namespace: str) -> bool:
        begins = _SUPERVISOR.format(namespace.removeprefix(NAMESPACE))
        return any(name.startswith(begins) for name in self.names.get(_SERVE, ()))
