"""AlignedServe: candidate batches of similar prefix lengths, by density-first search in a quad-tree (section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import merge
from itertools import chain, islice

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchGenerator, Selection
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry
from alignedserve.scheduler.quad_tree import QuadTree

MOST_LOOKED_AT = 1024  # entries read of a leaf that matches only in part: it may hold many thousands that do not match


class AlignedPolicy(BatchPolicy):
    def __init__(self, config: SchedulerConfig) -> None:
        self.tree = QuadTree(config.max_prefix_tokens, config.leaf_tokens)
        self._generator = BatchGenerator(self.tree, config.cut_sibling)

    def insert(self, entry: Entry) -> None:
        self.tree.insert(entry)

    def remove(self, key: RequestKey) -> None:
        self.tree.remove(key)

    def totals(self) -> tuple[int, int]:
        return self.tree.requests[0][0], self.tree.blocks[0][0]

    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        selection = self._select(limits, seed, now_s)
        self._yielded(chain(selection.leaves, selection.cut), now_s)
        return self._generator.entries(selection)

    def _select(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> Selection:
        return self._generator.select(limits, seed)

    def _yielded(self, leaves: Iterable[int], now_s: float) -> None:
        """A batch of these leaves was chosen."""
        self.tree.stamp(leaves, now_s)

    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        return shortest_tokens <= tokens <= longest_tokens

    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        """Nearest to the middle of the range first; oldest first within a leaf."""
        tree = self.tree
        first, last = tree.leaf_of(shortest_tokens), tree.leaf_of(longest_tokens)
        middle = (first + last) // 2
        left, right = tree.leaves_between(first, middle, leftwards=True), tree.leaves_between(middle + 1, last)
        leaves = merge(left, right, key=lambda leaf: abs(2 * leaf - first - last))
        selection, latest_s = Selection(limits), self._latest_s()
        for leaf in leaves:
            each = tree.blocks_each[leaf]
            some = selection.room(each) + 1  # one more than fit
            if leaf in (first, last):
                looked_at = tree.take(leaf, MOST_LOOKED_AT, latest_s)
                matching = (entry for entry in looked_at if shortest_tokens <= entry.tokens <= longest_tokens)
                entries = list(islice(matching, some))
            else:
                entries = tree.take(leaf, some, latest_s)
            if not selection.add_part(entries, leaf, each) or selection.requests >= limits.max_requests:
                break
        return selection.parts if selection.fits(0, 0) else []  # a single one may be too large

    def _latest_s(self) -> float:
        """Since when a request may wait at most to join late."""
        return math.inf

    def check_integrity(self) -> None:
        self.tree.check_integrity()
