"""Prompts of a file in groups that share a prefix, in the order in which they should run (BatchLLM, section 4).

The prompts are put in a radix tree, which is changed bottom-up into one level of prefixes. A child's prefix is joined
with a grandchild's where that saves more tokens than are computed once more (algorithm 1 there):

    root ─ ab ─┬─ cdef ─ 2 prompts        root ─┬─ abcdef ─ 2 prompts      (2 - 1) × 4 > 2
               └─ x, y                          └─ ab ─ x, y

Groups with the least to compute go first: their answers are decoded while longer prompts are computed. That is the
order of the ratio of answers to prompts, where all answers are taken to be equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """`prefix`: so many units are the same in all members. `members`: numbers of the prompts, in their order."""

    prefix: int
    members: tuple[int, ...]

    def work(self, lengths: Sequence[int]) -> int:
        """What is computed for the group if its prefix is computed once. `lengths`: of all prompts, in units."""
        return self.prefix + sum(lengths[member] - self.prefix for member in self.members)


@dataclass(slots=True)
class _Node:
    """The units `begin` to `end` of the prompts below it. `ending`: prompts that end here."""

    begin: int
    end: int
    ending: list[int] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    leaves: int = 0


def prefix_groups(prompts: Sequence[bytes], unit: int = 4) -> list[PrefixGroup]:
    """The groups in the order in which they should run; each prompt is in one.

    `prompts`: the token ids of each prompt, or the ids of its blocks, in `unit` bytes each. Within a group prompts keep
    their order. O(n log n) comparisons of prompts.
    """
    lengths = [len(prompt) // unit for prompt in prompts]
    root = _tree(prompts, lengths, unit)
    _to_one_level(root)
    groups = [PrefixGroup(0, (member,)) for member in root.ending]
    for node in root.children:
        members = tuple(sorted(_below(node)))
        groups.append(PrefixGroup(node.end if len(members) > 1 else 0, members))
    return sorted(groups, key=lambda group: (group.work(lengths), group.members[0]))


def shared_share(groups: Sequence[PrefixGroup], lengths: Sequence[int]) -> float:
    """The share of all units that need not be computed."""
    total = sum(lengths)
    return 1.0 - sum(group.work(lengths) for group in groups) / total if total else 0.0


def _tree(prompts: Sequence[bytes], lengths: Sequence[int], unit: int) -> _Node:
    """The radix tree, from the prompts in order and what each has in common with the one before."""
    root = _Node(0, 0)
    path = [root]
    before = b""
    for number in sorted(range(len(prompts)), key=prompts.__getitem__):
        common = _common_bytes(before, prompts[number]) // unit
        before = prompts[number]
        last: _Node | None = None
        while path[-1].end > common:
            last = path.pop()
            path[-1].leaves += last.leaves
        if last is not None and path[-1].end < common:  # `last` is cut in two
            upper = _Node(last.begin, common, children=[last], leaves=last.leaves)
            path[-1].leaves -= last.leaves
            path[-1].children[-1] = upper
            last.begin = common
            path.append(upper)
        if path[-1].end < lengths[number]:
            leaf = _Node(common, lengths[number])
            path[-1].children.append(leaf)
            path.append(leaf)
        path[-1].ending.append(number)
        path[-1].leaves += 1
    while len(path) > 1:
        last = path.pop()
        path[-1].leaves += last.leaves
    return root


def _common_bytes(one: bytes, other: bytes) -> int:
    """How many first bytes are the same: the difference of two numbers has their first unequal bit on top."""
    size = min(len(one), len(other))
    unequal = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return size - -(-unequal.bit_length() // 8)


def _to_one_level(root: _Node) -> None:
    """Join prefixes with those below them, from the deepest nodes up to the root."""
    order, todo = [], [root]
    while todo:
        node = todo.pop()
        order.append(node)
        todo += node.children
    for node in reversed(order):
        children: list[_Node] = []
        for child in node.children:
            kept: list[_Node] = []
            for below in child.children:
                if (below.leaves - 1) * (below.end - below.begin) > child.end - child.begin:
                    below.begin = child.begin
                    child.leaves -= below.leaves
                    children.append(below)
                else:
                    kept.append(below)
            child.children = kept
            if child.leaves:
                children.append(child)
        node.children = children


def _below(node: _Node) -> list[int]:
    found, todo = [], [node]
    while todo:
        one = todo.pop()
        found += one.ending
        todo += one.children
    return found
