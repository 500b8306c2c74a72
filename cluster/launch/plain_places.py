"""Places instances on nodes without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import Node


class PlainPlaces:
    """An instance stays on its node as long as the node exists."""

    def __init__(self, nodes: Sequence[Node], fixed: Mapping[str, str]) -> None:
        """`nodes` is the caller's list, which may change; the first is the supervisor's. `fixed`: nodes by instance."""
        self._nodes = nodes
        self._fixed = fixed
        self._where: dict[str, str] = {}  # the node of each placed instance and part, as of the last `placement`
        self._instances: dict[str, Sequence[str]] = {}  # ids of instances and of their parts, from the last `place`

    def place(self, instances: Mapping[str, Sequence[str]]) -> None:
        """Place these instances, and no others. Each has the ids of what it has on further nodes."""
        self._instances = dict(instances)

    def placement(self) -> Placement:
        alive = [node.node_id for node in self._nodes]
        wanted = [each for name, parts in self._instances.items() for each in (name, *parts)]
        self._where = {name: self._where[name] for name in wanted if self._where.get(name) in alive}
        where, parts_on, waiting = {}, {}, {}
        for name, parts in self._instances.items():
            lacking = [each for each in (name, *parts) if not self._find(each, (name, *parts), alive)]
            if lacking:
                waiting[name] = f"waits for node {self._fixed[lacking[0]]}"
                continue
            where[name] = self._where[name]
            if parts:
                parts_on[name] = [self._where[part] for part in parts]
        return Placement(tuple(self._nodes), where, waiting, parts=parts_on)

    def _find(self, name: str, together: Sequence[str], alive: Sequence[str]) -> bool:
        """Whether it has a node: the one that is fixed for it, or one where nothing of its instance is, if there is."""
        if name in self._where:
            return True
        fixed = self._fixed.get(name)
        if fixed is None:
            on, ours = list(self._where.values()), [self._where.get(each) for each in together]
            self._where[name] = min(alive, key=lambda node_id: (ours.count(node_id), on.count(node_id)))
        elif fixed in alive:
            self._where[name] = fixed
        return name in self._where

    def node_of(self, name: str) -> str | None:
        """The node of a placed instance or part."""
        return self._where.get(name)
