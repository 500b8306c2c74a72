"""Places instances on nodes without Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import Node


class PlainPlaces:
    """An instance stays on its node as long as the node exists."""

    def __init__(self, nodes: Sequence[Node], fixed: Mapping[str, str]) -> None:
        """`nodes` is the caller's list, which may change; the first is the supervisor's. `fixed`: nodes by instance."""
        self._nodes = nodes
        self._fixed = fixed
        self._where: dict[str, str] = {}  # the node of each placed instance, as of the last `placement`
        self._instances: tuple[str, ...] = ()  # ids of instances, from the last `place`

    def part(self, part_id: str, near: str) -> str | None:
        """The node of a part of an instance (`Spread.parts`) that is on node `near`: another one if there is any.

        None while the one that is fixed for it does not exist.
        """
        alive = [node.node_id for node in self._nodes]
        if part_id in self._fixed:
            return self._fixed[part_id] if self._fixed[part_id] in alive else None
        others = [node_id for node_id in alive if node_id != near] or alive
        on = list(self._where.values())
        return min(others, key=on.count)

    def place(self, instances: Iterable[str]) -> None:
        """Place these instances, and no others."""
        self._instances = tuple(instances)

    def placement(self) -> Placement:
        alive = [node.node_id for node in self._nodes]
        self._where = {name: self._where[name] for name in self._instances if self._where.get(name) in alive}
        waiting = {}
        for name in self._instances:
            fixed = self._fixed.get(name)
            if name in self._where:
                continue
            if fixed is None:
                on = list(self._where.values())
                self._where[name] = min(alive, key=on.count)
            elif fixed in alive:
                self._where[name] = fixed
            else:
                waiting[name] = f"waits for node {fixed}"
        return Placement(tuple(self._nodes), dict(self._where), waiting)
