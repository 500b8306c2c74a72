"""Prompts of a file in groups that share a prefix, in the order in which they should run (BatchLLM, section 4).

The prompts are put in a radix tree, which is changed bottom-up into one level of prefixes. A child's prefix is joined
with a grandchild's where that saves more tokens than are computed once more (algorithm 1 there):

    root ─ ab ─┬─ cdef ─ 2 prompts        root ─┬─ abcdef ─ 2 prompts      (2 - 1) × 4 > 2
               └─ x, y                          └─ ab ─ x, y

Groups go in the order of the ratio of their answers to what is computed of their prompts, the highest first: their
answers are decoded while longer prompts are computed. Where nothing is known of answers, those of a group count as one
(equation 4 there), and the least to compute goes first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NONE = -1
PART = 256  # prompts that are sorted at once


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """`prefix`: so many units are the same in all members. `members`: numbers of the prompts, in their order."""

    prefix: int
    members: tuple[int, ...]

    def work(self, lengths: Sequence[int]) -> int:
        """What is computed for the group if its prefix is computed once. `lengths`: of all prompts, in units."""
        return self.prefix + sum(lengths[member] - self.prefix for member in self.members)


class _Tree:
    """A radix tree of numbered nodes; 0 is the root. Arrays, since hundreds of thousands of objects would each be seen
    by the garbage collector, which stops all threads.

    Each node has the units `begin` to `end` of the prompts below it, its number of prompts, its first child, and the
    next child of its parent; NONE: there is none.
    """

    def __init__(self) -> None:
        self.begin, self.end, self.leaves = array("q"), array("q"), array("q")
        self.first, self.next = array("q"), array("q")
        self.add(0, 0)

    def add(self, begin: int, end: int) -> int:
        for values, value in (self.begin, begin), (self.end, end), (self.leaves, 0):
            values.append(value)
        for values in self.first, self.next:
            values.append(NONE)
        return len(self.begin) - 1

    def children(self, node: int) -> Iterator[int]:
        child = self.first[node]
        while child != NONE:
            yield child
            child = self.next[child]

    def put_first(self, child: int, parent: int) -> None:
        self.next[child], self.first[parent] = self.first[parent], child


def prefix_groups(prompts: Sequence[bytes], unit: int = 4, answers: Sequence[int] = ()) -> list[PrefixGroup]:
    """The groups in the order in which they should run; each prompt is in one.

    `prompts`: the token ids of each prompt, or the ids of its blocks, in `unit` bytes each. `answers`: the most tokens
    of each prompt's answer; empty: not known. Within a group prompts keep their order. O(n log n) comparisons of
    prompts. It may run in a thread: no step of it holds the interpreter long.
    """
    lengths = [len(prompt) // unit for prompt in prompts]
    tree, node_of = _tree(prompts, lengths, unit)
    _to_one_level(tree)
    top = _tops(tree)
    groups: list[PrefixGroup] = []
    members: dict[int, list[int]] = {}
    for number, node in enumerate(node_of):
        if node:
            members.setdefault(top[node], []).append(number)
        else:
            groups.append(PrefixGroup(0, (number,)))
    for node, found in members.items():
        groups.append(PrefixGroup(tree.end[node] if len(found) > 1 else 0, tuple(found)))

    def turn(group: PrefixGroup) -> tuple[float, int]:
        decoded = sum(answers[member] for member in group.members) if answers else 1
        return group.work(lengths) / max(1, decoded), group.members[0]

    return sorted(groups, key=turn)


def shared_share(groups: Sequence[PrefixGroup], lengths: Sequence[int]) -> float:
    """The share of all units that need not be computed."""
    total = sum(lengths)
    return 1.0 - sum(group.work(lengths) for group in groups) / total if total else 0.0


def _tree(prompts: Sequence[bytes], lengths: Sequence[int], unit: int) -> tuple[_Tree, array[int]]:
    """The radix tree, from the prompts in order and what each has in common with the one before; and in which of its
    nodes each prompt ends."""
    tree = _Tree()
    end, leaves = tree.end, tree.leaves
    node_of = array("q", bytes(8 * len(prompts)))
    path = [0]
    before = b""
    for number in _in_order(prompts):
        common = _common_bytes(before, prompts[number]) // unit
        before = prompts[number]
        last = NONE
        while end[path[-1]] > common:
            last = path.pop()
            leaves[path[-1]] += leaves[last]
        if last != NONE and end[path[-1]] < common:  # `last`, the newest child there, is cut in two
            upper = tree.add(tree.begin[last], common)
            leaves[upper] = leaves[last]
            leaves[path[-1]] -= leaves[last]
            tree.first[path[-1]], tree.next[upper] = upper, tree.next[last]
            tree.begin[last], tree.next[last], tree.first[upper] = common, NONE, last
            path.append(upper)
        if end[path[-1]] < lengths[number]:
            leaf = tree.add(common, lengths[number])
            tree.put_first(leaf, path[-1])
            path.append(leaf)
        node_of[number] = path[-1]
        leaves[path[-1]] += 1
    while len(path) > 1:
        last = path.pop()
        leaves[path[-1]] += leaves[last]
    return tree, node_of


def _in_order(prompts: Sequence[bytes]) -> Iterator[int]:
    """The numbers of the prompts in their order, sorted in parts: a sort of all would hold the interpreter."""
    parts = range(0, len(prompts), PART)
    runs = [sorted(range(at, min(at + PART, len(prompts))), key=prompts.__getitem__) for at in parts]
    return heapq.merge(*runs, key=prompts.__getitem__)


def _common_bytes(one: bytes, other: bytes) -> int:
    """How many first bytes are the same: the difference of two numbers has their first unequal bit on top."""
    size = min(len(one), len(other))
    unequal = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return size - -(-unequal.bit_length() // 8)


def _to_one_level(tree: _Tree) -> None:
    """Join prefixes with those below them, from the deepest nodes up to the root."""
    order, todo = array("q"), [0]
    while todo:
        node = todo.pop()
        order.append(node)
        todo += tree.children(node)
    for node in reversed(order):
        children, tree.first[node] = list(tree.children(node)), NONE
        for child in children:
            length = tree.end[child] - tree.begin[child]
            lower, tree.first[child] = list(tree.children(child)), NONE
            for below in lower:
                if (tree.leaves[below] - 1) * (tree.end[below] - tree.begin[below]) > length:
                    tree.begin[below] = tree.begin[child]
                    tree.leaves[child] -= tree.leaves[below]
                    tree.put_first(below, node)
                else:
                    tree.put_first(below, child)
            if tree.leaves[child]:
                tree.put_first(child, node)


def _tops(tree: _Tree) -> array[int]:
    """Of each node, the child of the root that it is below, or that it is."""
    tops = array("q", range(len(tree.begin)))
    todo = list(tree.children(0))
    while todo:
        node = todo.pop()
        for child in tree.children(node):
            tops[child] = tops[node]
            todo.append(child)
    return tops
