"""Where Ray places instances: a placement group with a bundle for each unit (ADR 37), found again by its name.

The first group spreads all units of the start over nodes. Units that are added later have a group each, which is
removed with them. An instance that is spread over nodes has a group with its parts. `ray_groups.py` has the groups'
names, and removes groups that no supervisor releases.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.launch.ray_groups import Group, group_name, groups, handle, remove_abandoned
from alignedserve.cluster.launch.units import Unit, gpu_share, in_pairs, plan_units, resources_of, with_parts
from alignedserve.cluster.supervisor.plan import Shape
from alignedserve.config import Config
from alignedserve.errors import ResourceError, UnavailableError
from alignedserve.ranks.degrees import part_number
from alignedserve.scheduler.core.pairing import pair_up

SETTLE_S = 0.5  # Ray needs milliseconds if there is room


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle of a group. `node` is Ray's id of its node; empty: not placed yet."""

    group: str
    index: int
    instances: tuple[str, ...]
    resources: Mapping[str, float]
    node: str


class RayPlaces:
    """All methods block. `namespace` is the cluster's own in Ray; `cluster_id` distinguishes it from predecessors."""

    def __init__(self, namespace: str, cluster_id: str, config: Config) -> None:
        self._namespace = namespace
        self._cluster_id = cluster_id
        self._config = config
        self._bundles: dict[str, Bundle] = {}  # by instance, as of the last `look`
        self._changing = threading.Lock()  # held by `place` and `release`
        self._released = False  # `release` was called; for good
        self._swept = False  # groups of dead clusters have been removed, at the first `place`

    def place(
        self, shape: Shape, ids: Sequence[tuple[str, str]], room: NodeRoom, *, on_gpu: bool, elastic: bool
    ) -> None:
        """Create a bundle for each of these instances, and remove other groups as a whole.

        `room`: the host memory of nodes, by Ray's ids; `elastic`: further nodes may join. Raises ResourceError if
        resources are missing and no node can join; UnavailableError after `release`.
        """
        with self._changing:
            if self._released:
                raise UnavailableError("this cluster has ended, and reserves no more room")
            if not self._swept:
                remove_abandoned(but=self._namespace)
                self._swept = True
            self._place(shape, ids, room, on_gpu=on_gpu, elastic=elastic)

    def _place(
        self, shape: Shape, ids: Sequence[tuple[str, str]], room: NodeRoom, *, on_gpu: bool, elastic: bool
    ) -> None:
        ids = with_parts(self._config, ids)
        wanted = {role_id for _, role_id in ids}
        for group in groups():
            if group.namespace == self._namespace and not (self._owns(group) and group.instances & wanted):
                group.remove()  # of a dead cluster, or of removed instances
        self.look()
        new = [(role, role_id) for role, role_id in ids if role_id not in self._bundles]
        if not new:
            return
        nodes = [node for node in ray.nodes() if node["Alive"]]
        gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        share = gpu_share(self._config, shape, gpus) if on_gpu else 0.0
        could_give = max(int(node.get("GPU", 0)) for node in self.could_give().values())
        units = plan_units(self._config, new, share, could_give)
        if not elastic:
            _require([node["Resources"] for node in nodes], units)
        units, spread = self._spread_groups(units)
        for together in spread:
            self._create(together, strategy="SPREAD")
        if not self._bundles and units:
            self._create(units, strategy="SPREAD")
        elif units:
            self._add(units, shape, {node["NodeID"]: node["Resources"] for node in nodes}, room, on_gpu=on_gpu)
        self._settle(new)

    def _spread_groups(self, units: Sequence[Unit]) -> tuple[list[Unit], list[list[Unit]]]:
        """Units of instances on one node each; and a group for each other unit, with the parts on further nodes."""
        alone, groups = [], []
        for unit in units:
            if any(map(part_number, unit.instances)):
                continue
            of = {part for name in unit.instances for part in self._config.spread(name.rpartition("-")[0]).parts(name)}
            parts = [other for other in units if of.intersection(other.instances)]
            if parts:
                groups.append([unit, *parts])
            else:
                alone.append(unit)
        grouped = {name for group in groups for unit in group for name in unit.instances}
        orphans = [unit for unit in units if any(map(part_number, unit.instances)) and not grouped & {*unit.instances}]
        return [*alone, *orphans], groups

    def look(self) -> Mapping[str, Bundle]:
        """The current bundle of each instance."""
        found: dict[str, Bundle] = {}
        for group in filter(self._owns, groups()):
            for index, instances in enumerate(group.units):
                node = group.entry["bundles_to_node_id"].get(index, "") if group.entry["state"] != "PENDING" else ""
                bundle = Bundle(group.identity, index, instances, group.entry["bundles"][index], node)
                found.update(dict.fromkeys(instances, bundle))
        self._bundles = found  # atomic, because `options` reads it in another thread
        return found

    def options(self, role: str, role_id: str) -> dict[str, Any]:
        """Ray options of an actor of an instance, or of its part on a further node: its bundle, and its share of it.

        Raises UnavailableError if the instance has no bundle now.
        """
        bundle = self._bundles.get(role_id)
        if bundle is None:
            raise UnavailableError(f"Ray has no room for {role_id} now")
        ranks = sum(self._config.spread(name.rpartition("-")[0]).ranks_of(name) for name in bundle.instances)
        asked = resources_of(self._config, role, _share(bundle.resources.get("GPU", 0.0), ranks), role_id)
        own: dict[str, Any] = {"num_cpus": asked.pop("CPU", 0), "num_gpus": asked.pop("GPU", 0)}
        if "memory" in asked:
            own["memory"] = asked.pop("memory")
        strategy = PlacementGroupSchedulingStrategy(handle(bundle.group), bundle.index)
        return {**own, "resources": asked, "scheduling_strategy": strategy}

    def could_give(self) -> dict[str, dict[str, float]]:
        """Resources of each node, by Ray's id, for a cluster that replaces this one: all that others do not use."""
        nodes = {node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
        for group in groups():
            if group.namespace == self._namespace or group.entry["state"] == "PENDING":
                continue
            for index, node in group.entry["bundles_to_node_id"].items():
                if node in nodes:
                    nodes[node] = _less(nodes[node], [group.entry["bundles"][index]])
        return nodes

    def release(self) -> None:
        """Release all room for good. Nothing can be placed after that."""
        with self._changing:
            self._released = True
            for group in filter(self._owns, groups()):
                group.remove()

    def _owns(self, group: Group) -> bool:
        return (group.namespace, group.cluster_id) == (self._namespace, self._cluster_id)

    def _add(
        self,
        units: Sequence[Unit],
        shape: Shape,
        nodes: Mapping[str, Mapping[str, float]],
        room: NodeRoom,
        *,
        on_gpu: bool,
    ) -> None:
        """Create a group for each unit. Nodes with enough resources left come first; among them the nodes of paired
        units, then the nodes with the fewest units, as far as `room` allows. If other clusters use a node's resources,
        Ray chooses another node."""
        paired = in_pairs(self._config, on_gpu=on_gpu)
        bundles = {(bundle.group, bundle.index): bundle for bundle in self._bundles.values()}
        taken = [(bundle.node, bundle.resources) for bundle in bundles.values()]
        for number, unit in enumerate(units):
            partners = self._partners(unit, shape) if paired else set()
            used = Counter(where for where, _ in taken)
            lacking = {
                node
                for node, had in nodes.items()
                if not unit.fits(_less(had, [own for where, own in taken if where == node]))
            }
            wished = sorted(nodes, key=lambda node: (node in lacking, node not in partners, used[node]))
            target = room.choose(unit, units[number + 1 :], wished) or room.choose(unit, (), wished) or wished[0]
            taken.append((target, unit.resources))
            self._create([unit], strategy="STRICT_PACK", _soft_target_node_id=target)

    def _partners(self, unit: Unit, shape: Shape) -> set[str]:
        """The nodes of the instances that the unit is paired with."""
        pairs = [pair for pair in pair_up(shape.prefill, shape.decode) if set(pair) & set(unit.instances)]
        return {self._bundles[name].node for pair in pairs for name in pair if name in self._bundles}

    def _create(self, units: Sequence[Unit], **options: Any) -> None:
        name = group_name(self._namespace, self._cluster_id, [unit.instances for unit in units])
        placement_group([dict(unit.resources) for unit in units], name=name, lifetime="detached", **options)

    def _settle(self, instances: Sequence[tuple[str, str]]) -> None:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            found = self.look()
            if all(role_id in found and found[role_id].node for _, role_id in instances):
                return
            time.sleep(0.01)


def _share(gpus: float, ranks: int) -> float:
    """The share of a GPU for each rank of a bundle. Ray cannot split a share of less than one over several GPUs."""
    if gpus <= 1.0:
        return int(1000 * gpus / ranks) / 1000
    return min(1.0, int(1000 / -(-ranks // int(gpus))) / 1000)


def _less(had: Mapping[str, float], taken: Iterable[Mapping[str, float]]) -> dict[str, float]:
    left = dict(had)
    for resources in taken:
        for name, amount in resources.items():
            left[name] = left.get(name, 0.0) - amount
    return left


def _require(nodes: Sequence[Mapping[str, float]], units: Sequence[Unit]) -> None:
    """Raises ResourceError if all nodes together have less of a resource than the units need."""
    for name in sorted({name for unit in units for name in unit.resources}):
        asked = sum(unit.resources.get(name, 0.0) for unit in units)
        had = sum(node.get(name, 0.0) for node in nodes)
        if asked > had:
            raise ResourceError(
                f"the instances need {asked:g} {name} (cluster.prefill_resources, cluster.decode_resources), but this "
                f"Ray cluster has only {had:g}, and no further node can join it; lower the requirements, or use a Ray "
                "cluster with RAY_ADDRESS"
            )
