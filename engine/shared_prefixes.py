"""Which requests of a pass begin with the same blocks, so that attention over these can be computed once for all.

One shared prefix a group, as BatchLLM (`arXiv:2412.03594`) has it. Block ids are compared, never tokens, so a group is
found without knowing why its blocks are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MOST_NESTED = 32  # levels of prefixes within prefixes that are looked at


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """The first `blocks` blocks of the requests `members` (their indices) are the same."""

    members: tuple[int, ...]
    blocks: int


def find_groups(firsts: np.ndarray, blocks_of: Callable[[int], np.ndarray], least_saved: float) -> list[SharedGroup]:
    """The groups that save most reads, each at least `least_saved` blocks that are not read again.

    `blocks_of`: the blocks of a request that can be shared: full ones, not written in the pass. `firsts` `[requests]`:
    each one's first such block; negative: none. Costs some 10 µs if all of them differ.
    """
    order = np.argsort(firsts, kind="stable")
    ordered = firsts[order]
    ends = np.flatnonzero(np.diff(ordered, append=-1))  # the last of each run of equal blocks
    sizes = np.diff(ends, prepend=-1)
    if not len(sizes) or sizes.max() < 2:
        return []
    groups: list[SharedGroup] = []
    for end, size in zip(ends.tolist(), sizes.tolist(), strict=True):
        if size > 1 and ordered[end] >= 0:
            members = order[end + 1 - size : end + 1]
            table = _padded([blocks_of(member) for member in members.tolist()])
            search = _Search(least_saved)
            search.take(_tree(table, np.arange(size), 0, MOST_NESTED), 0, None)
            groups += [SharedGroup(tuple(np.sort(members[rows]).tolist()), blocks) for blocks, rows in search.groups]
    return groups


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """`[rows, longest + 1]`; what lies after a row's end differs from all others."""
    width = max(map(len, rows)) + 1
    table = np.repeat(-1 - np.arange(len(rows), dtype=np.int64)[:, None], width, axis=1)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """Rows of which all agree on `depth` blocks, and not on more. `alone`: those that are in none of the parts."""

    depth: int
    alone: list[int]
    parts: list[_Node]


def _tree(table: np.ndarray, rows: np.ndarray, depth: int, levels: int) -> _Node:
    """The tree of `rows`, two at least, which agree on `depth` blocks; at most so many levels."""
    lines = table[rows]
    depth += int(np.argmin((lines[:, depth:] == lines[0, depth:]).all(axis=0)))  # they differ at the end at last
    if not levels:
        return _Node(depth, rows.tolist(), [])
    order = np.argsort(lines[:, depth], kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(lines[order, depth])) + 1)
    alone = [int(part[0]) for part in parts if len(part) == 1]
    return _Node(depth, alone, [_tree(table, part, depth, levels - 1) for part in parts if len(part) > 1])


class _Search:
    """The best groups of a tree. A row that is in a group of `outer` blocks saves these, but one for the group."""

    def __init__(self, least_saved: float) -> None:
        self._least = least_saved
        self._best: dict[tuple[_Node, int], tuple[float, bool]] = {}
        self.groups: list[tuple[int, list[int]]] = []  # blocks and rows

    def best(self, node: _Node, outer: int) -> tuple[float, bool]:
        """What the node's rows save if a group of `outer` blocks may be joined, and whether they form one here."""
        found = self._best.get((node, outer))
        if found is None:
            apart, together = (
                len(node.alone) * joined + sum(self.best(part, joined)[0] for part in node.parts)
                for joined in (outer, node.depth)
            )
            together -= node.depth + self._least
            found = self._best[node, outer] = max(apart, together), together > apart
        return found

    def take(self, node: _Node, outer: int, group: list[int] | None) -> None:
        """Note the node's groups; rows without one join `group`, if there is one, of `outer` blocks."""
        if self.best(node, outer)[1]:
            outer, group = node.depth, []
            self.groups.append((node.depth, group))
        if group is not None:
            group += node.alone
        for part in node.parts:
            self.take(part, outer, group)
