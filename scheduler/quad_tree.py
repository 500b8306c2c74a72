"""The quad-tree over prefix lengths (paper, section 3.3): stores waiting requests and the density of each range.

Each node covers a range of prefix lengths, a quarter of its parent's. A node is `(level, index)`: level 0 is the root,
the children of `(l, i)` are `(l + 1, 4 i) .. (l + 1, 4 i + 3)`. Counters are in one flat list for each level, so that
an insert or remove updates `depth + 1` numbers in each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.age_order import AgeOrder

FAN_OUT = 4
Node = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """A waiting request in the tree. `since_s`: waiting since then. `blocks`: never fewer for more tokens.

    `evicted`: it has decoded before. `rank`: of its priority (`scheduler/priorities.py`); 0 by default.
    """

    key: RequestKey
    tokens: int
    blocks: int
    since_s: float
    evicted: bool = False
    rank: int = 0


class QuadTree:
    """Waiting requests by prefix length in `[1, max_tokens]`; longer ones count as `max_tokens`.

    `leaf_tokens` is the width of a leaf and determines the depth. Insert, remove and move are O(depth).
    """

    def __init__(self, max_tokens: int, leaf_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.leaf_tokens = leaf_tokens
        self.depth = 0
        while leaf_tokens * FAN_OUT**self.depth < max_tokens:
            self.depth += 1
        sizes = [FAN_OUT**level for level in range(self.depth + 1)]
        self.requests: list[list[int]] = [[0] * size for size in sizes]
        self.blocks: list[list[int]] = [[0] * size for size in sizes]
        self.last_batch_s: list[list[float]] = [[0.0] * size for size in sizes]  # when the node last yielded a batch
        self.blocks_each = [0] * sizes[-1]  # of every entry in a leaf, 0 if they differ
        self._bottom_up = list(zip(reversed(self.requests), reversed(self.blocks), strict=True))
        self._leaves: list[AgeOrder[Entry] | None] = [None] * sizes[-1]
        self._entries: dict[RequestKey, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._entries

    def entry(self, key: RequestKey) -> Entry:
        return self._entries[key]

    def leaf_of(self, tokens: int) -> int:
        """Index of the leaf for a prefix length."""
        return (min(max(tokens, 1), self.max_tokens) - 1) // self.leaf_tokens

    def insert(self, entry: Entry) -> None:
        if entry.key in self._entries:
            raise AccountingError(f"{entry.key} is already in the tree", request_id=entry.key.request_id)
        self._entries[entry.key] = entry
        index = self.leaf_of(entry.tokens)
        leaf = self._leaves[index]
        if leaf is None:
            leaf = self._leaves[index] = AgeOrder()
        if not self.requests[-1][index]:
            self.blocks_each[index] = entry.blocks
        elif self.blocks_each[index] != entry.blocks:
            self.blocks_each[index] = 0
        leaf.add(entry, entry.since_s)
        self._count(index, 1, entry.blocks)

    def remove(self, key: RequestKey) -> Entry:
        """Remove and return an entry. Raises AccountingError if the request is not in the tree."""
        entry = self._entries.pop(key, None)
        if entry is None:
            raise AccountingError(f"{key} is not in the tree", request_id=key.request_id)
        index = self.leaf_of(entry.tokens)
        leaf = self._leaves[index]
        assert leaf is not None
        leaf.remove(entry, entry.since_s)
        self._count(index, -1, -entry.blocks)
        return entry

    def move(self, key: RequestKey, tokens: int, blocks: int) -> None:
        """Update a request that has grown. Its waiting time is kept."""
        entry = self.remove(key)
        self.insert(replace(entry, tokens=tokens, blocks=blocks))

    def oldest(self, index: int) -> Iterator[Entry]:
        """The entries of a leaf, oldest first. Must not be changed during iteration."""
        leaf = self._leaves[index]
        return iter(()) if leaf is None else iter(leaf)

    def take(self, index: int, most: int, until_s: float = math.inf) -> list[Entry]:
        """The oldest `most` entries of a leaf, without those that wait since after `until_s`; they stay in the tree.

        Cheaper than iterating over `oldest`: no entry is read.
        """
        leaf = self._leaves[index]
        return [] if leaf is None else leaf.oldest(most, until_s)

    def leaves_between(self, first: int, last: int, *, leftwards: bool = False) -> Iterator[int]:
        """Indices of the non-empty leaves in `first .. last` (inclusive), from left to right, or from right to left.

        Found lazily, each in O(depth). The tree must not be changed meanwhile.
        """
        if first > last:
            return iter(())
        level, index, end = self.depth, first, last
        while index < end:  # up to the smallest subtree that contains both
            level, index, end = level - 1, index // FAN_OUT, end // FAN_OUT
        return self._walk((level, index), first, last, leftwards)

    def leaves_below(self, node: Node, *, leftwards: bool = False) -> Iterator[int]:
        """Indices of the non-empty leaves below a node; otherwise as `leaves_between`."""
        return self._walk(node, 0, len(self._leaves), leftwards)

    def _walk(self, top: Node, first: int, last: int, leftwards: bool) -> Iterator[int]:
        to_visit = [top]
        while to_visit:
            level, index = to_visit.pop()
            if not self.requests[level][index]:
                continue
            if level == self.depth:
                if first <= index <= last:
                    yield index
                continue
            width = FAN_OUT ** (self.depth - level)
            if (index + 1) * width <= first or index * width > last:
                continue
            children = range(FAN_OUT * index, FAN_OUT * index + FAN_OUT)
            to_visit += [(level + 1, child) for child in (children if leftwards else reversed(children))]

    def stamp(self, leaves: Iterable[int], now_s: float) -> None:
        """Note the time on leaves that yielded a batch and on every node above them.

        This includes batches that no instance had room for, so that another of equally dense ranges is tried next time.
        """
        for level, index in self.above(leaves):
            self.last_batch_s[level][index] = now_s

    def above(self, leaves: Iterable[int]) -> Iterator[Node]:
        """These leaves and every node above them, each once."""
        touched = set(leaves)
        for level in range(self.depth, -1, -1):
            yield from ((level, index) for index in touched)
            touched = {index // FAN_OUT for index in touched}

    def check_integrity(self) -> None:
        """Recount everything. Raises AccountingError if a counter, or the order in a leaf, is wrong."""
        requests = [[0] * len(counts) for counts in self.requests]
        blocks = [[0] * len(counts) for counts in self.blocks]
        for entry in self._entries.values():
            index = self.leaf_of(entry.tokens)
            for level in range(self.depth, -1, -1):
                requests[level][index] += 1
                blocks[level][index] += entry.blocks
                index //= FAN_OUT
        if requests != self.requests or blocks != self.blocks:
            raise AccountingError("the counters of the quad-tree do not match a recount")
        for index, (count, leaf) in enumerate(zip(self.requests[self.depth], self._leaves, strict=True)):
            if leaf is None and not count:
                continue
            ages = [entry.since_s for entry in self.oldest(index)]
            if len(ages) != count or ages != sorted(ages):
                raise AccountingError(f"leaf {index} of the quad-tree is out of order")
            each = self.blocks_each[index]
            if count and each and any(entry.blocks != each for entry in self.oldest(index)):
                raise AccountingError(f"not every entry of leaf {index} of the quad-tree has {each} blocks")

    def _count(self, index: int, requests: int, blocks: int) -> None:
        for count, sums in self._bottom_up:
            count[index] += requests
            sums[index] += blocks
            index //= FAN_OUT
