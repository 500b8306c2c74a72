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
from array import array

import numpy as np
import numpy.typing as npt

from alignedserve.scheduler.cache.values import CachePolicy

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.uint8]
Touches = npt.NDArray[np.int64]

CHUNK_ENTRIES = 4096
CLASSES_PER_OCTAVE = 4
LEAST_VALUE = 1e-60
SLACK_ENTRIES = 4 * CHUNK_ENTRIES
MOST_USES = np.iinfo(np.uint16).max


class _Chunk:
    """Entries of a class: runs of blocks that one touch entered. Those before `run` and `at` have been taken."""

    __slots__ = ("at", "blocks", "ends", "ranks", "run", "touches")

    def __init__(self) -> None:
        self.blocks = array("i")
        self.ends, self.touches, self.ranks = array("i"), array("q"), array("d")  # of each run
        self.run = self.at = 0

    def __len__(self) -> int:
        return len(self.blocks) - self.at

    def push(self, ids: Ids, touch: int, rank: float) -> None:
        self.blocks.frombytes(ids.tobytes())
        self.ends.append(len(self.blocks))
        self.touches.append(touch)
        self.ranks.append(rank)

    def clean(self, touched: Touches) -> None:
        """Drop the entries of blocks that were touched later."""
        if not len(self):
            return
        blocks = np.frombuffer(self.blocks[self.at :], np.int32)
        ends = np.frombuffer(self.ends[self.run :], np.int32) - self.at
        lengths = np.diff(ends, prepend=0)
        touches = np.frombuffer(self.touches[self.run :], np.int64)
        live = touched[blocks] == np.repeat(touches, lengths)
        if live.all():
            return
        lengths = np.add.reduceat(live.astype(np.int32), ends - lengths)
        runs = lengths > 0
        ranks = np.frombuffer(self.ranks[self.run :], np.float64)
        self.blocks = array("i", blocks[live].tobytes())
        self.ends = array("i", np.cumsum(lengths[runs], dtype=np.int32).tobytes())
        self.touches, self.ranks = array("q", touches[runs].tobytes()), array("d", ranks[runs].tobytes())
        self.run = self.at = 0

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

    def push(self, ids: Ids, touch: int, rank: float) -> None:
        if not self.chunks or len(self.chunks[-1].blocks) >= CHUNK_ENTRIES:
            self.chunks.append(_Chunk())
        self.chunks[-1].push(ids, touch, rank)

    def head(self) -> tuple[float, int] | None:
        """Rank and touch of the first run; None if there are no entries."""
        chunks = self.chunks
        while chunks and not len(chunks[0]):
            del chunks[0]
        if not chunks:
            return None
        first = chunks[0]
        return first.ranks[first.run], first.touches[first.run]

    def take(self, most: int, found: array[int]) -> int:
        """Move at most `most` blocks of the first run to `found`. Returns how many."""
        first = self.chunks[0]
        end = first.ends[first.run]
        count = min(most, end - first.at)
        found += first.blocks[first.at : first.at + count]
        first.at += count
        if first.at == end:
            first.run += 1
        return count


class EvictionQueue:
    """Ranks of the blocks `0 .. capacity - 1` of a store. One thread; O(1) a block, in batches."""

    def __init__(self, capacity: int, policy: CachePolicy) -> None:
        self.inflation = 0.0
        self.entries = 0
        self.ranks = np.zeros(capacity, np.float64)
        self._policy = policy
        self._touched: Touches = np.zeros(capacity, np.int64)  # the touch that entered a block last; 0: none
        self._uses = np.zeros(capacity, np.uint16)
        self._touches = 0
        self._classes: dict[int, _Class] = {}
        self._heads: list[tuple[float, int, int]] = []  # heap of rank, touch and class of first runs; may be outdated
        self._most_entries = capacity + SLACK_ENTRIES  # beyond it, touches clean up
        self._debt = 0
        self._sweep: list[_Class] = []  # classes still to clean; the last one from its chunk `_sweep_at` on
        self._sweep_at = 0

    def use(self, ids: Ids) -> None:
        """One more request uses these blocks."""
        uses = self._uses[ids]
        uses += uses < MOST_USES
        self._uses[ids] = uses

    def uses(self, ids: Ids) -> npt.NDArray[np.uint16]:
        return self._uses[ids]

    def touch(self, ids: Ids, chance: float = 1.0) -> None:
        """The blocks of a chain, from its first block on, were used just now. `chance`: see `CachePolicy.values`."""
        if not len(ids):
            return
        values = np.maximum(self._policy.values(self._uses[ids], len(ids), chance), LEAST_VALUE)
        if values[0] != values[-1]:
            values = np.maximum.accumulate(values[::-1])[::-1]  # no block is worth less than what continues it
        classes = np.ceil(np.log2(values[[0, -1]]) * CLASSES_PER_OCTAVE - 1e-6)
        self._touches += 1
        if classes[0] == classes[1]:
            self._enter(ids, int(classes[0]))
        else:
            classes = np.ceil(np.log2(values) * CLASSES_PER_OCTAVE - 1e-6).astype(np.int32)
            starts = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(ids)]
            for start, end in itertools.pairwise(starts):
                self._enter(ids[start:end], int(classes[start]))
        if self.entries > self._most_entries:
            self._clean_up(len(ids))

    def _enter(self, ids: Ids, number: int) -> None:
        """Enter blocks of one class, unless their rank is higher already."""
        rank = self.inflation + 2.0 ** (number / CLASSES_PER_OCTAVE)
        entering = rank >= self.ranks[ids]
        if not entering.all():  # these keep their entry: whatever was taken has at most the rank `inflation`
            ids = ids[entering]
            if not len(ids):
                return
        self.ranks[ids] = rank
        self._touched[ids] = self._touches
        its_class = self._classes.get(number)
        if its_class is None:
            its_class = self._classes[number] = _Class()
        its_class.push(ids[::-1], self._touches, rank)
        self.entries += len(ids)
        if not its_class.listed:
            its_class.listed = True
            heapq.heappush(self._heads, (rank, self._touches, number))

    def forget(self, ids: Ids) -> None:
        """These blocks hold something else from now on."""
        self.ranks[ids] = 0.0
        self._touched[ids] = 0
        self._uses[ids] = 0

    def take(self, count: int, cached: Flags) -> Ids:
        """The `count` blocks to give up first among those whose flag in `cached` is set: fewer if there are fewer.

        They are in order, and have no entry any more.
        """
        taken: list[Ids] = []
        while count > 0:
            found, touches, lengths, room = array("i"), array("q"), array("q"), count
            while room and (first := self._first()) is not None:
                rank, touch, number = first
                self.inflation = max(self.inflation, rank)
                length = self._classes[number].take(room, found)
                touches.append(touch)
                lengths.append(length)
                room -= length
            if not found:
                break
            self.entries -= len(found)
            ids = np.frombuffer(found, np.int32)
            live = self._touched[ids] == np.repeat(np.frombuffer(touches, np.int64), np.frombuffer(lengths, np.int64))
            live &= cached[ids] != 0
            if not live.all():
                ids = ids[live]
            taken.append(ids)
            count -= len(ids)
        return np.concatenate(taken) if taken else np.empty(0, np.int32)

    def in_order(self, children: Ids, parents: npt.NDArray[np.int64], cached: npt.NDArray[np.bool_]) -> bool:
        """Whether each cached child goes before its parent, and each cached block is entered."""
        both = cached[children] & cached[parents]
        children, parents = children[both], parents[both]
        lower = self.ranks[children] < self.ranks[parents]
        lower |= (self.ranks[children] == self.ranks[parents]) & (self._touched[children] <= self._touched[parents])
        return bool(lower.all() and self._touched[cached].all())

    def _first(self) -> tuple[float, int, int] | None:
        """Rank, touch and class of the run that goes first; None if there are no entries."""
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
            chunk.clean(self._touched)
            self.entries -= before - len(chunk)
            self._debt -= max(before, 64)
            if at > 0 and len(chunks[at - 1].blocks) + len(chunk) <= CHUNK_ENTRIES:
                chunks[at - 1].append(chunk)
                del chunks[at]
            else:
                self._sweep_at += 1
