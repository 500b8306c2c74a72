"""The order in which cached blocks are given up: least rank first, and never a block before those that continue it.

A touch of a chain gives each of its blocks the rank `inflation + value`, unless its rank is higher already. `inflation`
is the rank of the last block that was given up, so that values age (GreedyDual). Values are rounded up to quarters of
an octave: a class. Since inflation only grows, each class is a queue in order of rank, and no heap of blocks is needed
(CAMP, Ghandeharizadeh et al., Middleware 2014). Within a touch deeper blocks go first, and values fall with depth. So a
block's rank is at least that of every block that continues it, and at equal rank it was touched no earlier.

Entries of a block that was touched again are skipped, and cleaned up beside later touches: there are at most about two
for each block of the store.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alignedserve.scheduler.cache.values import CachePolicy

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.uint8]
Touches = npt.NDArray[np.int64]

CHUNK_ENTRIES = 4096
FEW = 32  # so many blocks are handled faster one by one than by calls of NumPy
CLASSES_PER_OCTAVE = 4
LEAST_VALUE = 1e-60
NO_HEAD = (math.inf, 0, 0)
SLACK_ENTRIES = 4 * CHUNK_ENTRIES
MOST_USES = int(np.iinfo(np.uint16).max)


class _Chunk:
    """Entries of a class in order of rank: blocks, in runs of one touch and one rank.

    Run `n` ends before entry `ends[n]`. The entries before `at` have been taken; the first one left is of run `run`.
    """

    __slots__ = ("at", "blocks", "ends", "ranks", "run", "touches")

    def __init__(self) -> None:
        self.blocks, self.ends = array("i"), array("i")
        self.touches, self.ranks = array("q"), array("d")
        self.at = self.run = 0

    def __len__(self) -> int:
        return len(self.blocks) - self.at

    def push(self, blocks: array[int], touch: int, rank: float) -> None:
        self.blocks += blocks
        if self.run < len(self.ends) and self.touches[-1] == touch:
            self.ends[-1] = len(self.blocks)
        else:
            self.ends.append(len(self.blocks))
            self.touches.append(touch)
            self.ranks.append(rank)

    def take(self, most: int, below: float, blocks: array[int], touches: array[int], counts: array[int]) -> float:
        """See `_Class.take`."""
        begin, run = self.at, self.run
        last = max(bisect_left(self.ranks, below, run) - 1, run)
        end = min(begin + most, self.ends[last])
        blocks += self.blocks[begin:end]
        while self.at < end:
            run = self.run
            count = min(end, self.ends[run]) - self.at
            touches.append(self.touches[run])
            counts.append(count)
            self.at += count
            self.run += self.at == self.ends[run]
        return self.ranks[run]

    def clean(self, touched: Touches) -> None:
        """Drop the entries of blocks that were touched later. There must be entries."""
        blocks = np.frombuffer(self.blocks[self.at :], np.int32)
        touches = np.frombuffer(self.touches[self.run :], np.int64)
        ends = np.frombuffer(self.ends[self.run :], np.int32)
        counts = ends - np.append(self.at, ends[:-1])
        live = touched[blocks] == np.repeat(touches, counts)
        if self.at or not live.all():
            counts = np.add.reduceat(live, ends - counts - self.at, dtype=np.int64)
            kept = counts > 0
            ranks = np.frombuffer(self.ranks[self.run :], np.float64)[kept]
            self.blocks, self.touches = array("i", blocks[live].tobytes()), array("q", touches[kept].tobytes())
            self.ranks = array("d", ranks.tobytes())
            self.ends = array("i", np.cumsum(counts[kept], dtype=np.int32).tobytes())
            self.at = self.run = 0

    def append(self, later: _Chunk) -> None:
        """Take over the entries of the chunk that follows."""
        shift = len(self.blocks) - later.at
        self.blocks += later.blocks[later.at :]
        self.ends.extend(end + shift for end in later.ends[later.run :])
        self.touches += later.touches[later.run :]
        self.ranks += later.ranks[later.run :]


class _Class:
    """The entries of one value, in order of rank. `listed`: it has a place among the heads."""

    __slots__ = ("chunks", "listed")

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self.listed = False

    def push(self, blocks: array[int], touch: int, rank: float) -> None:
        for begin in range(0, len(blocks), CHUNK_ENTRIES):
            if not self.chunks or len(self.chunks[-1].blocks) >= CHUNK_ENTRIES:
                self.chunks.append(_Chunk())
            self.chunks[-1].push(blocks[begin : begin + CHUNK_ENTRIES], touch, rank)

    def head(self) -> tuple[float, int] | None:
        """Rank and touch of the first entry; None if there are no entries."""
        chunks = self.chunks
        while chunks and not len(chunks[0]):
            del chunks[0]
        if not chunks:
            return None
        first = chunks[0]
        return first.ranks[first.run], first.touches[first.run]

    def take(self, most: int, below: float, blocks: array[int], touches: array[int], counts: array[int]) -> float:
        """Move first entries to `blocks`: at most `most`, of the first touch or of a rank under `below`.

        `touches` and `counts` get the touch of each run of them and its length. Returns the rank of the last one.
        """
        return self.chunks[0].take(most, below, blocks, touches, counts)


class EvictionQueue:
    """Ranks of the blocks `0 .. capacity - 1` of a store. One thread; O(1) a block, in batches."""

    def __init__(self, capacity: int, policy: CachePolicy) -> None:
        self.inflation = 0.0
        self.entries = 0
        self.ranks = np.zeros(capacity, np.float64)
        self._policy = policy
        self._touched: Touches = np.zeros(capacity, np.int64)  # the touch that entered a block last; 0: none
        self._uses = np.zeros(capacity, np.uint16)
        # Single items are read faster through a memoryview.
        self._rank_of: Any = self.ranks.data
        self._touched_of, self._uses_of = self._touched.data, self._uses.data
        self._touches = 0
        self._classes: dict[int, _Class] = {}
        self._heads: list[tuple[float, int, int]] = []  # heap of rank, touch and class of first runs; may be outdated
        self._most_entries = capacity + SLACK_ENTRIES  # beyond it, touches clean up
        self._debt = 0
        self._sweep: list[_Class] = []  # classes still to clean; the last one from its chunk `_sweep_at` on
        self._sweep_at = 0

    def use(self, block_ids: Sequence[int]) -> None:
        """One more request uses these blocks."""
        uses = self._uses_of
        for block in block_ids:
            if (count := uses[block]) < MOST_USES:
                uses[block] = count + 1

    def uses(self, block_ids: Ids) -> npt.NDArray[np.uint16]:
        """By how many conversations each was used."""
        return self._uses[block_ids]

    def take_uses(self, block_ids: Sequence[int], other: EvictionQueue, its_ids: Sequence[int]) -> None:
        """These blocks have been used as often as those of `other`, of which they are copies; or more often already."""
        ids = np.array(block_ids, np.int32)
        self._uses[ids] = np.maximum(self._uses[ids], other._uses[np.array(its_ids, np.int32)])

    def touch(self, block_ids: Sequence[int], chance: float = 1.0, chain_blocks: int = 0) -> None:
        """The blocks of a chain, from its first block on, were used just now. `chance`: see `CachePolicy.value`.

        Or blocks of several chains, each block before those that continue it; `chain_blocks`: how long a chain is.
        """
        count = len(block_ids)
        self._touches += 1
        ids = np.array(block_ids, np.int32) if count > FEW else None
        end, value = count, LEAST_VALUE
        for begin in self._changes_of_use(block_ids, ids):
            uses = self._uses_of[block_ids[begin]]
            # No block is worth less than what continues it.
            value = max(value, self._policy.value(uses, chain_blocks or count, chance))
            number = math.ceil(math.log2(value) * CLASSES_PER_OCTAVE - 1e-6)
            if ids is None:
                self._enter_few(block_ids[begin:end], number)
            else:
                self._enter(ids[begin:end], number)
            end = begin
        if self.entries > self._most_entries:
            self._clean_up(count)

    def _changes_of_use(self, block_ids: Sequence[int], ids: Ids | None) -> Sequence[int]:
        """The numbers of blocks from which on the number of uses is another, last one first."""
        if not block_ids:
            return ()
        if ids is not None:
            return [*(np.flatnonzero(np.diff(self._uses[ids])) + 1)[::-1].tolist(), 0]
        uses = [self._uses_of[block] for block in block_ids]
        if len(set(uses)) == 1:
            return (0,)
        return [*(place for place in range(len(uses) - 1, 0, -1) if uses[place] != uses[place - 1]), 0]

    def _enter_few(self, block_ids: Sequence[int], number: int) -> None:
        """`_enter`, one by one."""
        rank = self.inflation + 2.0 ** (number / CLASSES_PER_OCTAVE)
        ranks, touched, touch = self._rank_of, self._touched_of, self._touches
        entering = [block for block in reversed(block_ids) if rank >= ranks[block]]
        for block in entering:
            ranks[block] = rank
            touched[block] = touch
        if entering:
            self._push(array("i", entering), number, rank)

    def _enter(self, ids: Ids, number: int) -> None:
        """Enter blocks of one class, unless their rank is higher already.

        Those keep their entry: whatever was taken has at most the rank `inflation`.
        """
        rank = self.inflation + 2.0 ** (number / CLASSES_PER_OCTAVE)
        entering = rank >= self.ranks[ids]
        if not entering.all():
            ids = ids[entering]
        self.ranks[ids] = rank
        self._touched[ids] = self._touches
        if len(ids):
            self._push(array("i", ids[::-1].tobytes()), number, rank)

    def _push(self, blocks: array[int], number: int, rank: float) -> None:
        its_class = self._classes.get(number)
        if its_class is None:
            its_class = self._classes[number] = _Class()
        its_class.push(blocks, self._touches, rank)
        self.entries += len(blocks)
        if not its_class.listed:
            its_class.listed = True
            heapq.heappush(self._heads, (rank, self._touches, number))

    def forget(self, block_ids: Sequence[int]) -> None:
        """These blocks hold something else from now on."""
        if len(block_ids) > FEW:
            ids = np.array(block_ids, np.int32)
            self.ranks[ids], self._touched[ids], self._uses[ids] = 0.0, 0, 0
            return
        ranks, touched, uses = self._rank_of, self._touched_of, self._uses_of
        for block in block_ids:
            ranks[block], touched[block], uses[block] = 0.0, 0, 0

    def take(self, count: int, cached: bytearray) -> list[int]:
        """The `count` blocks to give up first among those whose flag in `cached` is set: fewer if there are fewer.

        They are in order, and have no entry any more.
        """
        taken: list[int] = []
        while count > 0:
            found, touches, counts = array("i"), array("q"), array("i")
            while (room := count - len(found)) > 0 and (first := self._first()) is not None:
                following = min(self._heads[1:3], default=NO_HEAD)[0]
                rank = self._classes[first[2]].take(room, following, found, touches, counts)
                self.inflation = max(self.inflation, rank)
            if not found:
                break
            self.entries -= len(found)
            if len(found) <= FEW:
                touched = self._touched_of
                runs = map(itertools.repeat, touches, counts)
                entered = zip(found, itertools.chain.from_iterable(runs), strict=True)
                live = [block for block, touch in entered if touched[block] == touch and cached[block]]
            else:
                ids = np.frombuffer(found, np.int32)
                right = self._touched[ids] == np.repeat(
                    np.frombuffer(touches, np.int64), np.frombuffer(counts, np.int32)
                )
                right &= np.frombuffer(cached, np.uint8)[ids] != 0
                live = ids[right].tolist()
            taken += live
            count -= len(live)
        return taken

    def next_ones(self, ids: Ids, depths: npt.NDArray[np.int64], count: int) -> Ids:
        """Of these entered blocks, the `count` that `take` returns first, in its order.

        `depths`: their places in chains. Changes nothing, and may run beside changes: then it is a guess.
        """
        ranks = self.ranks[ids]
        if count < len(ids):
            first = ranks <= np.partition(ranks, count)[count]
            ids, ranks, depths = ids[first], ranks[first], depths[first]
        return ids[np.lexsort((-depths, self._touched[ids], ranks))[:count]]

    def in_order(self, children: Ids, parents: npt.NDArray[np.int64], cached: npt.NDArray[np.bool_]) -> bool:
        """Whether each cached child goes before its parent, and each cached block is entered."""
        both = cached[children] & cached[parents]
        children, parents = children[both], parents[both]
        lower = self.ranks[children] < self.ranks[parents]
        lower |= (self.ranks[children] == self.ranks[parents]) & (self._touched[children] <= self._touched[parents])
        return bool(lower.all() and self._touched[cached].all())

    def _first(self) -> tuple[float, int, int] | None:
        """Rank, touch and class of the entry that goes first; None if there are no entries."""
        heads = self._heads
        while heads:
            rank, touch, number = heads[0]
            its_class = self._classes[number]
            head = its_class.head()
            if head is None:
                its_class.listed = False
                heapq.heappop(heads)
            elif head != (rank, touch):
                heapq.heapreplace(heads, (*head, number))
            else:
                return heads[0]
        return None

    def _clean_up(self, pushed: int) -> None:
        """Clean twice as many entries as were pushed, chunk after chunk of all classes."""
        self._debt += 2 * pushed
        while self._debt > 0:
            if not self._sweep:
                self._sweep = list(self._classes.values())
                self._sweep_at = 0
            chunks, at = self._sweep[-1].chunks, self._sweep_at
            if at >= len(chunks):
                self._sweep.pop()
                self._sweep_at = 0
                self._debt -= 1
                continue
            chunk = chunks[at]
            before = len(chunk)
            if before:
                chunk.clean(self._touched)
            self.entries -= before - len(chunk)
            self._debt -= max(before, 64)
            if at > 0 and len(chunks[at - 1].blocks) + len(chunk) <= CHUNK_ENTRIES:
                chunks[at - 1].append(chunk)
                del chunks[at]
            else:
                self._sweep_at += 1
