"""A hash table of blocks by the first 8 bytes of their digests, in lists of blocks whose digests share a slot.

Lists need no tombstones, so no insertion ever pauses for a rebuild. They take 4 bytes a slot and 4 a block, which are
in the block's entry of the index, since a search along a list reads that anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from alignedserve.kv_pool.entries import Ids, Words

NONE = -1


class BlockTable:
    """Links blocks `0 .. capacity - 1`. The caller compares what a list holds with what it looks for."""

    def __init__(self, nexts: Ids) -> None:
        """`nexts`: memory for the next block in each block's list, int32 `[capacity]`."""
        capacity = len(nexts)
        slots = 1 << max(1, (capacity - 1).bit_length())
        self.mask = slots - 1
        self._word_mask = np.uint64(self.mask)
        self.firsts = np.full(slots, NONE, np.int32)
        self.nexts = nexts
        # Single items are read faster through a memoryview.
        self.first_of, self.next_of = self.firsts.data, self.nexts.data

    def slots(self, hashes: Words) -> npt.NDArray[np.int64]:
        return (hashes & self._word_mask).astype(np.int64)

    def add_each(self, block_ids: Sequence[int], hashes: Sequence[int]) -> None:
        """`add_all` with few blocks."""
        firsts, nexts, mask = self.first_of, self.next_of, self.mask
        for block, hashed in zip(block_ids, hashes, strict=True):
            slot = hashed & mask
            nexts[block] = firsts[slot]
            firsts[slot] = block

    def add_all(self, ids: Ids, hashes: Words) -> None:
        """Add blocks that are in no list."""
        slots = self.slots(hashes)
        while len(ids):
            self.nexts[ids] = self.firsts[slots]
            self.firsts[slots] = ids
            outdone = self.firsts[slots] != ids  # another of these blocks has the same slot: again, in front of it
            if not outdone.any():
                return
            ids, slots = ids[outdone], slots[outdone]

    def remove_each(self, block_ids: Sequence[int], hashes: Sequence[int]) -> None:
        """`remove_all` with few blocks."""
        firsts, nexts, mask = self.first_of, self.next_of, self.mask
        for block, hashed in zip(block_ids, hashes, strict=True):
            slot = hashed & mask
            current = firsts[slot]
            if current == block:
                firsts[slot] = nexts[block]
                continue
            while (after := nexts[current]) != block:
                current = after
            nexts[current] = nexts[block]

    def remove_all(self, ids: Ids, hashes: Words) -> None:
        """Remove blocks, each of which is in the list of its slot."""
        slots = self.slots(hashes)
        alone, places = np.unique(slots, return_index=True)
        if len(alone) < len(ids):
            rest = np.delete(np.arange(len(ids)), places)
            self.remove_each(ids[rest].tolist(), hashes[rest].tolist())
            ids, slots = ids[places], alone
        current = self.firsts[slots]
        at_front = current == ids
        self.firsts[slots[at_front]] = self.nexts[ids[at_front]]
        behind = ~at_front
        ids, current = ids[behind], current[behind]
        while len(ids):
            after = self.nexts[current]
            found = after == ids
            self.nexts[current[found]] = self.nexts[ids[found]]
            ids, current = ids[~found], after[~found]

    def search(self, hashes: Words, right: Callable[[Ids, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]) -> Ids:
        """A block for each hash; -1 if there is none. `right(blocks, places)`: which blocks belong to these places."""
        found = self.firsts[self.slots(hashes)]
        places = np.arange(len(hashes))
        current = found
        while True:
            wrong = current != NONE
            wrong &= ~right(current, places)
            if not wrong.any():
                return found
            places, current = places[wrong], self.nexts[current[wrong]]
            found[places] = current

    def check(self) -> Ids:
        """All blocks in the lists, in any order; one that is in two lists, or twice in one, is there twice."""
        current = self.firsts[self.firsts != NONE]
        pieces = []
        for _ in range(len(self.nexts)):
            if not len(current):
                break
            pieces.append(current)
            current = self.nexts[current]
            current = current[current != NONE]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)
