"""Algorithm 1, density-first search (paper, section 3.3): chooses the next candidate batch from the quad-tree.

    case 1  the node fits and has enough requests        it is the batch
    case 2  the node does not fit                        descend to its child with the most requests
    case 3  the node fits, but has too few requests      return to the parent: add left siblings from right to left,
                                                         then right siblings from left to right, until there are enough

"Fits" means at most K blocks, and no more requests than an instance can run. "Enough" means N requests. The paper
leaves three cases open (ADR 24). Where the search does not reach N, the contiguous range that fits and has the most
requests is taken, so that a batch has N requests if any range does. A leaf over K is cut at K, oldest first. A request
larger than K is a batch alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import accumulate, chain
from operator import attrgetter

from alignedserve.request import RequestKey
from alignedserve.scheduler.quad_tree import FAN_OUT, Entry, Node, QuadTree


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """K, N, and the maximum number of requests that an instance can run."""

    max_blocks: int
    min_requests: int
    max_requests: int


@dataclass(slots=True)
class Selection:
    """The choice so far: whole leaves, and possibly a part of a leaf at each end."""

    limits: BatchLimits
    requests: int = 0
    blocks: int = 0
    leaves: list[int] = field(default_factory=list)
    parts: list[Entry] = field(default_factory=list)
    runs: int = 0  # number of parts in `parts`, each of them oldest first
    cut: list[int] = field(default_factory=list)  # the leaves that were taken in part

    @property
    def enough(self) -> bool:
        return self.requests >= self.limits.min_requests

    def fits(self, requests: int, blocks: int) -> bool:
        return self.blocks + blocks <= self.limits.max_blocks and self.requests + requests <= self.limits.max_requests

    def add(self, leaves: Iterable[int], requests: int, blocks: int) -> None:
        self.leaves.extend(leaves)
        self.requests += requests
        self.blocks += blocks

    def room(self, blocks_each: int = 0) -> int:
        """How many requests more fit. If nothing is selected yet at least one, which may be larger than K.

        `blocks_each`: the number of blocks of every request; 0: they differ, and only the requests are limited.
        """
        least = int(not self.requests)
        most = self.limits.max_requests - self.requests
        if blocks_each:
            most = min(most, (self.limits.max_blocks - self.blocks) // blocks_each)
        return max(most, least)

    def add_part(self, entries: Sequence[Entry], leaf: int, blocks_each: int = 0) -> bool:
        """Add as many entries of a leaf as fit, in their order. Returns whether all of them did.

        If `blocks_each` is known, no entry has to be read: of a million entries most are not in the processor's caches.
        """
        found = entries[: self.room(blocks_each)]
        count, blocks = len(found), self.blocks + blocks_each * len(found)
        if not blocks_each:
            sums = list(accumulate(map(attrgetter("blocks"), found), initial=self.blocks))
            count = max(bisect_right(sums, self.limits.max_blocks) - 1, min(int(not self.requests), count))
            blocks = sums[count]
        if count > 0:
            self.parts += found[:count]
            self.requests += count
            self.blocks = blocks
            self.runs += 1
            self.cut.append(leaf)
        return count == len(entries)


class BatchGenerator:
    """Chooses batches without changing the tree. `cut_sibling`: a sibling that does not fit is taken in part."""

    def __init__(self, tree: QuadTree, cut_sibling: bool) -> None:
        self._tree = tree
        self._cut_sibling = cut_sibling

    def generate(self, limits: BatchLimits, seed: RequestKey | None = None) -> list[Entry]:
        """The next batch, oldest first; empty only if the tree is empty.

        `seed`: an overdue request that the batch must contain. The search starts at its leaf (section 3.5), so that its
        batch is as well aligned as any other. If the tree has fewer than N requests and they fit, all of them are the
        batch; the caller decides whether to wait for more.
        """
        return self.entries(self.select(limits, seed))

    def select(self, limits: BatchLimits, seed: RequestKey | None = None, within: Node = (0, 0)) -> Selection:
        """The choice that `generate` makes, without looking up the entries: it reads only a few leaves.

        `within`: the node, not empty, at which the search begins if there is no seed.
        """
        tree = self._tree
        if not len(tree):
            return Selection(limits)
        selection = self._densest(limits, *within) if seed is None else self._around(seed, limits)
        if seed is None and within == (0, 0) and not selection.enough and len(tree) > selection.requests:
            shortest = self._shortest(limits)
            if shortest.requests > selection.requests:
                selection = shortest
        return selection

    def entries(self, selection: Selection) -> list[Entry]:
        """The entries of a selection, oldest first."""
        entries = [*chain.from_iterable(map(self._tree.oldest, selection.leaves)), *selection.parts]
        if len(selection.leaves) + selection.runs > 1:  # each leaf and each part is in order
            entries.sort(key=attrgetter("since_s"))
        return entries

    def lengths(self, selection: Selection) -> list[int]:
        """The tokens of each request. All requests of a leaf taken whole count as its middle."""
        counts, width = self._tree.requests[self._tree.depth], self._tree.leaf_tokens
        lengths = [entry.tokens for entry in selection.parts]
        for leaf in selection.leaves:
            lengths += [leaf * width + (width + 1) // 2] * counts[leaf]
        return lengths

    def _densest(self, limits: BatchLimits, level: int, index: int) -> Selection:
        tree = self._tree
        while not self._node_fits(limits, level, index):  # case 2
            if level == tree.depth:
                return self._cut_leaf(limits, index)
            level, index = level + 1, self._densest_child(level, index)
        return self._extend(limits, level, index)

    def _around(self, seed: RequestKey, limits: BatchLimits) -> Selection:
        """The smallest subtree around the seed with enough requests, or the largest that fits."""
        tree = self._tree
        level, index = tree.depth, tree.leaf_of(tree.entry(seed).tokens)
        if not self._node_fits(limits, level, index):
            return self._cut_leaf(limits, index, tree.entry(seed))
        while level and tree.requests[level][index] < limits.min_requests:
            if not self._node_fits(limits, level - 1, index // FAN_OUT):
                break
            level, index = level - 1, index // FAN_OUT
        return self._extend(limits, level, index)

    def _extend(self, limits: BatchLimits, level: int, index: int) -> Selection:
        """Cases 1 and 3: the node, which fits, and its siblings until there are enough requests."""
        tree = self._tree
        selection = Selection(limits)
        self._add_node(selection, (level, index))
        if level == 0:
            return selection
        first = index - index % FAN_OUT
        sides = (range(index - 1, first - 1, -1), True), (range(index + 1, first + FAN_OUT), False)
        for siblings, leftwards in sides:
            for sibling in siblings:
                if selection.enough:
                    return selection
                if selection.fits(tree.requests[level][sibling], tree.blocks[level][sibling]):
                    self._add_node(selection, (level, sibling))
                    continue
                if self._cut_sibling:
                    self._add_nearest(selection, (level, sibling), leftwards)
                break
        return selection

    def _add_node(self, selection: Selection, node: Node) -> None:
        level, index = node
        tree = self._tree
        selection.add(tree.leaves_below(node), tree.requests[level][index], tree.blocks[level][index])

    def _add_nearest(self, selection: Selection, node: Node, leftwards: bool) -> None:
        """Add leaves of a node, nearest first, until there are enough requests. The last leaf may be added in part."""
        for leaf in self._tree.leaves_below(node, leftwards=leftwards):
            if selection.enough or not self._add_leaf(selection, leaf):
                return

    def _add_leaf(self, selection: Selection, leaf: int) -> bool:
        """Add a leaf, or the part of it that fits. Returns whether the whole leaf fitted."""
        tree = self._tree
        requests, blocks = tree.requests[tree.depth][leaf], tree.blocks[tree.depth][leaf]
        if selection.fits(requests, blocks):
            selection.add((leaf,), requests, blocks)
            return True
        each = tree.blocks_each[leaf]
        selection.add_part(tree.take(leaf, selection.room(each)), leaf, each)
        return False

    def _cut_leaf(self, limits: BatchLimits, leaf: int, seed: Entry | None = None) -> Selection:
        tree, selection, each = self._tree, Selection(limits), self._tree.blocks_each[leaf]
        if seed is not None:
            selection.add_part((seed,), leaf)
        entries = tree.take(leaf, selection.room(each) + 1)
        selection.add_part([entry for entry in entries if entry is not seed], leaf, each)
        return selection

    def _shortest(self, limits: BatchLimits) -> Selection:
        """The shortest requests, until there are enough or no more fit. No contiguous range that fits has more.

        For each request left out here, a range that begins further right holds a request at least as large. The number
        of leaves read is at most the number of requests in the batch.
        """
        tree, selection = self._tree, Selection(limits)
        for leaf in tree.leaves_below((0, 0)):
            requests, blocks = selection.requests, selection.blocks
            if selection.enough or not self._add_leaf(selection, leaf):
                break
        if selection.enough or not selection.requests or tree.blocks_each[leaf]:
            return selection
        # The oldest requests of the leaf that was cut may be large; more of the shortest ones may fit.
        by_length = Selection(limits, requests, blocks, selection.leaves, runs=1)  # not in order of age
        by_length.add_part(nsmallest(limits.max_requests, tree.oldest(leaf), key=attrgetter("tokens")), leaf)
        return by_length if by_length.requests > selection.requests else selection

    def _densest_child(self, level: int, index: int) -> int:
        """The child with the most requests. Of equals, the one that has not yielded a batch for the longest time."""
        requests, stamps = self._tree.requests[level + 1], self._tree.last_batch_s[level + 1]
        children = range(FAN_OUT * index, FAN_OUT * index + FAN_OUT)
        return max(children, key=lambda child: (requests[child], -stamps[child], -child))

    def _node_fits(self, limits: BatchLimits, level: int, index: int) -> bool:
        tree = self._tree
        return tree.blocks[level][index] <= limits.max_blocks and tree.requests[level][index] <= limits.max_requests
