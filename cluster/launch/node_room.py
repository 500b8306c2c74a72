"""Free host memory of nodes, and the nodes on which new instances fit.

All instances of a unit (`units.py`) run on one node, so the sum over nodes does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from alignedserve.cluster.launch.units import Unit
from alignedserve.memory import describe_bytes


class NodeRoom:
    """Free memory of each node, from which `choose` takes. A node that is not listed counts as full."""

    def __init__(self, free_bytes: Mapping[str, int], needed_bytes: Mapping[str, int]) -> None:
        """`free_bytes` by node; `needed_bytes` by instance, 0 for instances that are not listed."""
        self._free = dict(free_bytes)  # less the room that `choose` has taken
        self._needed = needed_bytes

    def needed(self, unit: Unit) -> int:
        return sum(self._needed.get(name, 0) for name in unit.instances)

    def fits(self, units: Iterable[Unit]) -> bool:
        """Whether all units fit on nodes: the largest first, each on the node with the least room left."""
        return _packs(self._free, [self.needed(unit) for unit in units])

    def choose(self, unit: Unit, others: Iterable[Unit], nodes: Sequence[str]) -> str | None:
        """Take room on the first of `nodes` that fits the unit and leaves room for `others`. None if there is none."""
        rest = [self.needed(other) for other in others]
        needed = self.needed(unit)
        for node in nodes:
            left = {**self._free, node: self._free.get(node, 0) - needed}
            if left[node] >= 0 and _packs(left, rest):
                self._free = left
                return node
        return None

    def renamed(self, names: Mapping[str, str]) -> NodeRoom:
        """A copy with renamed nodes. Nodes without a new name are left out."""
        return NodeRoom({names[node]: free for node, free in self._free.items() if node in names}, self._needed)

    def __str__(self) -> str:
        known = sorted(self._free.items())
        if len(known) == 1:
            node, free = known[0]
            return f"{describe_bytes(free)} is" + (f" available on node {node}" if node else " available")
        return ", ".join(f"{describe_bytes(free)} on node {node}" for node, free in known) + " are available"


def _packs(free_bytes: Mapping[str, int], needed: Iterable[int]) -> bool:
    left = sorted(free_bytes.values())
    for size in sorted(needed, reverse=True):
        if not size:
            break
        fitting = [number for number, free in enumerate(left) if free >= size]
        if not fitting:
            return False
        left[fitting[0]] -= size
        left.sort()
    return True
