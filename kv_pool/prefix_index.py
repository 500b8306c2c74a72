"""The prefix index of a shard: which blocks hold the KV of a prompt's first tokens.

Entries are in the segment (`entries.py`). In the process are a hash table of them, flags, and the order of eviction. A
successor rebuilds that by one scan.

A match compares more than digests: the tokens of each block, and by its parent's generation that the entry continues
the block matched before it. Two prefixes whose digests are equal are two entries of one list.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alignedserve.errors import AccountingError
from alignedserve.kv_pool.block_table import NONE, BlockTable
from alignedserve.kv_pool.entries import (
    BEFORE,
    CHECKSUM,
    DIGEST,
    GENERATION,
    HAS_CHECKSUM,
    META,
    PARENT,
    TOKENS,
    Ids,
    IndexEntries,
    Words,
)
from alignedserve.kv_pool.prefix_chain import DIGEST_BYTES, Chain, digest
from alignedserve.scheduler.cache.eviction import EvictionQueue
from alignedserve.scheduler.cache.values import CachePolicy

FEW = 48  # so many blocks are handled faster one by one than by calls of NumPy
MOST_AT_ONCE = 1024
SCANNED_AT_ONCE = 1 << 18
_HASH, _PAIR = struct.Struct("=Q"), struct.Struct("=QQ")

Flags = npt.NDArray[np.bool_]


class PrefixIndex:
    """Finds, adds and removes indexed blocks. One thread. `indexed` has a flag for each block of the shard."""

    def __init__(
        self,
        entries: IndexEntries,
        block_size: int,
        policy: CachePolicy,
        digest: Callable[[bytes], bytes] = digest,
    ) -> None:
        """Begins empty; `recover` takes over what `entries` holds. `digest`: another function, for tests."""
        capacity = len(entries.words)
        self.entries = entries
        self.block_size = block_size
        self.indexed = bytearray(capacity)
        self.queue = EvictionQueue(capacity, policy)
        self.evicted_blocks = 0
        self._digest = digest
        self._flags = np.frombuffer(self.indexed, np.uint8)
        self._table = BlockTable(entries.nexts)
        self._words, self._stride = entries.one_word, entries.stride
        self._following = 1  # generation of the next entry

    @property
    def blocks(self) -> int:
        """The number of indexed blocks."""
        return int(np.count_nonzero(self._flags))

    def chain(self, root: bytes, token_ids: Sequence[int]) -> Chain:
        return Chain(root, token_ids, self.block_size, self._digest)

    def chain_of(self, block_ids: Sequence[int]) -> Chain:
        """The chain whose first blocks these are (`chain_to`)."""
        rows = self.entries.words.take(np.array(block_ids, np.int32), axis=0)
        tokens = array("I", rows[:, TOKENS:].astype("<u8").view(np.uint32)[:, : self.block_size].tobytes())
        return self.chain(_PAIR.pack(*rows[0, BEFORE : BEFORE + 2].tolist()), tokens)

    # ---- matching

    def match(self, chain: Chain, most_blocks: int) -> list[int]:
        """The indexed blocks of the longest prefix of `chain`, at most `most_blocks`."""
        most = min(most_blocks, chain.blocks)
        found: list[int] = []
        if not self._match_each(chain, found, most if most <= FEW else 1):
            return found
        while (at := len(found)) < most:  # digests are only computed a little beyond the first miss
            end = min(most, 2 * at + 64, at + MOST_AT_ONCE)
            if end - at > FEW and self._match_many(chain, found, end):
                continue
            # A few are left, or a digest that two prefixes share has stopped it too early.
            at = len(found)
            if not self._match_each(chain, found, end if end - at <= FEW else at + 1):
                break
        return found

    def _match_each(self, chain: Chain, found: list[int], end: int) -> bool:
        """Extend `found` up to `end` blocks, one by one. Returns False at a miss."""
        begin = len(found)
        first_of, next_of, mask = self._table.first_of, self._table.next_of, self._table.mask
        read, memory, size = self.entries.seen.unpack_from, self.entries.memory, self.entries.bytes
        tokens, step = chain.tokens, chain.block_bytes
        before, more = self._before(chain, found[-1] if found else NONE)
        digests, read_hash, start = chain.digests(end), _HASH.unpack_from, begin * step
        for place in range(begin, end):
            (hashed,) = read_hash(digests, place * DIGEST_BYTES)
            own = tokens[start : start + step]
            block = first_of[hashed & mask]
            while block != NONE:
                seen = read(memory, block * size)
                if seen[3] == own and seen[1] == before and seen[2] == more:
                    break
                block = next_of[block]
            else:
                return False
            found.append(block)
            before, more = seen[0], 0
            start += step
        return True

    def _match_many(self, chain: Chain, found: list[int], end: int) -> bool:
        """Like `_match_each` for many blocks; also False where a list has another block of the same digest in front."""
        begin = len(found)
        count = end - begin
        own = self._pairs(chain.digests(end), begin, end)
        low, high = own[:, 0], own[:, 1]
        words, rows = self.entries.words, np.empty((0, 0), np.uint64)

        def right(blocks: Ids, places: npt.NDArray[np.int64]) -> Flags:
            nonlocal rows
            seen = words.take(blocks, axis=0)
            if len(blocks) == count:
                rows = seen
                return _both(seen[:, DIGEST] == low, seen[:, DIGEST + 1] == high)
            rows[places] = seen
            return _both(seen[:, DIGEST] == low[places], seen[:, DIGEST + 1] == high[places])

        blocks = self._table.search(low, right)
        wrong = blocks == NONE
        tokens = self._token_words(chain, begin, end)
        differing = rows[:, TOKENS : TOKENS + tokens.shape[1]] != tokens
        if differing.any():
            wrong |= differing.any(axis=1)
        wrong[1:] |= rows[1:, BEFORE] != rows[:-1, GENERATION]
        wrong[1:] |= rows[1:, BEFORE + 1] != 0
        before = self._before(chain, found[-1] if found else NONE)
        wrong[0] |= tuple(rows[0, BEFORE : BEFORE + 2].tolist()) != before
        right_ones = count if not wrong.any() else int(wrong.argmax())
        found += blocks[:right_ones].tolist()
        return right_ones == count

    def _before(self, chain: Chain, parent: int) -> tuple[int, int]:
        """What comes before a block of `chain` whose parent is the block `parent`; -1: its first block."""
        first, second = (self._words[parent * self._stride], 0) if parent != NONE else _PAIR.unpack(chain.root)
        return first, second

    @staticmethod
    def _pairs(digests: bytearray, begin: int, end: int) -> Words:
        """Digests as words, uint64 `[end - begin, 2]`; a copy, because more digests may follow in `digests`."""
        return np.frombuffer(digests[begin * DIGEST_BYTES : end * DIGEST_BYTES], np.uint64).reshape(-1, 2)

    @staticmethod
    def _token_words(chain: Chain, begin: int, end: int) -> Words:
        """The tokens of blocks as words, uint64 `[end - begin, words]`, filled up with 0."""
        step = chain.block_bytes
        tokens = np.frombuffer(chain.tokens, np.uint32, (end - begin) * step // 4, begin * step).reshape(
            end - begin, -1
        )
        if step % 8:
            tokens = np.pad(tokens, ((0, 0), (0, 1)))
        return tokens.view(np.uint64)

    def digest_of(self, block: int) -> bytes:
        """The digest of an indexed block."""
        at = (block * self._stride + DIGEST) * 8
        return bytes(self.entries.memory[at : at + DIGEST_BYTES])

    def chain_to(self, block: int) -> list[int]:
        """The indexed blocks of a chain, from its first block to `block`."""
        depth = self._words[block * self._stride + META] & 0xFFFFFFFF
        found, parents = [block], self.entries.parents.data
        for _ in range(depth):
            found.append(parents[found[-1]])
        return found[::-1]

    def checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """The checksums of indexed blocks; empty if one has none."""
        rows = self.entries.words[np.array(block_ids, np.int32), META : CHECKSUM + 1]
        if not (rows[:, 0] & np.uint64(HAS_CHECKSUM)).all():
            return ()
        return tuple(rows[:, 1].tolist())

    # ---- adding and removing

    def insert(
        self, chain: Chain, first: int, block_ids: Sequence[int], parent: int, checksums: Sequence[int] = ()
    ) -> None:
        """Index `block_ids`, which are not indexed, as the blocks of `chain` from number `first` on.

        `parent`: the indexed block before them; -1 if `first` is 0. No other block may be indexed as one of them
        (`match`). `checksums`: one for each block, or none.
        """
        indexed, generation = self.indexed, self._following
        for block in block_ids:
            if indexed[block]:
                raise AccountingError(f"block {block} is to be indexed, and is already")
        self._following += len(block_ids)
        (self._insert_each if len(block_ids) <= FEW else self._insert_many)(
            chain, first, block_ids, parent, checksums, generation
        )
        for block in block_ids:
            indexed[block] = 1
        self.queue.use(block_ids)

    def _insert_each(
        self, chain: Chain, first: int, block_ids: Sequence[int], parent: int, checksums: Sequence[int], generation: int
    ) -> None:
        end = first + len(block_ids)
        digests = bytes(chain.digests(end)[first * DIGEST_BYTES : end * DIGEST_BYTES])
        tokens = chain.tokens[first * chain.block_bytes : end * chain.block_bytes]
        meta = first | (HAS_CHECKSUM if checksums else 0)
        before = self._before(chain, parent)
        self.entries.fill_each(block_ids, meta, checksums, max(parent, 0), before, generation, digests, tokens)
        self.entries.publish_each(block_ids, generation)
        self._table.add_each(block_ids, array("Q", digests)[::2])

    def _insert_many(
        self, chain: Chain, first: int, block_ids: Sequence[int], parent: int, checksums: Sequence[int], generation: int
    ) -> None:
        ids = np.array(block_ids, np.int32)
        count = len(ids)
        rows = np.zeros((count, self._stride), np.uint64)
        generations = np.arange(generation, generation + count, dtype=np.uint64)
        rows[:, META] = np.arange(first, first + count)
        if checksums:
            rows[:, META] |= np.uint64(HAS_CHECKSUM)
            rows[:, CHECKSUM] = checksums
        its_parents = rows.view(np.int32)[:, PARENT]
        its_parents[1:], its_parents[0] = ids[:-1], max(parent, 0)
        rows[1:, BEFORE] = generations[:-1]
        rows[0, BEFORE : BEFORE + 2] = self._before(chain, parent)
        own = self._pairs(chain.digests(first + count), first, first + count)
        rows[:, DIGEST : DIGEST + 2] = own
        tokens = self._token_words(chain, first, first + count)
        rows[:, TOKENS : TOKENS + tokens.shape[1]] = tokens
        self.entries.fill(ids, rows)
        self.entries.publish(ids, generations)
        self._table.add_all(ids, own[:, 0])

    def remove(self, block_ids: Sequence[int]) -> None:
        """Remove indexed blocks, in this order: those that continue a block come before it."""
        if len(block_ids) <= FEW:
            words, stride = self._words, self._stride
            self.entries.withdraw_each(block_ids)
            self._table.remove_each(block_ids, [words[block * stride + DIGEST] for block in block_ids])
        else:
            ids = np.array(block_ids, np.int32)
            self.entries.withdraw(ids)
            self._table.remove_all(ids, self.entries.words[:, DIGEST][ids])
        for block in block_ids:
            self.indexed[block] = 0
        self.queue.forget(block_ids)

    def evict(self, count: int, cached: bytearray) -> list[int]:
        """Remove the `count` blocks to give up first among those that are `cached`; fewer if there are fewer."""
        block_ids = self.queue.take(count, cached)
        self.remove(block_ids)
        self.evicted_blocks += len(block_ids)
        return block_ids

    def leading(self, block_ids: Sequence[int]) -> Sequence[int]:
        """The blocks of a chain up to the first that is not indexed."""
        indexed = self.indexed
        return block_ids[: next((place for place, block in enumerate(block_ids) if not indexed[block]), len(block_ids))]

    def linked(self, block_ids: Sequence[int]) -> int:
        """How many of the first of these blocks are indexed, each as the one that continues the block before it."""
        ids = np.array(self.leading(block_ids), np.int32)
        rows = self.entries.words.take(ids, axis=0)
        wrong = (rows[:, META] & np.uint64(0xFFFFFFFF)) != np.arange(len(ids), dtype=np.uint64)
        wrong[1:] |= rows[1:, BEFORE] != rows[:-1, GENERATION]
        return int(wrong.argmax()) if wrong.any() else len(ids)

    def begun_by(self, root: bytes, token_ids: Sequence[int]) -> Ids:
        """What is indexed of prompts that begin with these tokens: with none, all under the root.

        Of the blocks of the tokens themselves, those that nothing else continues. In an order for `remove`. Reads all
        entries, so it may run in a thread while nothing changes. Raises TransferError if `root` is not a digest.
        """
        chain = self.chain(root, token_ids)
        found = self.match(chain, chain.blocks)
        ids, depths, parents = self._all()
        chosen, following = np.zeros(len(self._flags), bool), ids[:0]
        if len(found) == chain.blocks:  # what continues less of the tokens is another prompt
            following = ids[depths == chain.blocks]
            before = np.array(self._before(chain, found[-1] if found else NONE), np.uint64)
            following = following[(self.entries.words[:, BEFORE : BEFORE + 2][following] == before).all(axis=1)]
            if rest := token_ids[chain.blocks * self.block_size :]:
                following = self._that_begin(following, rest)
        chosen[following] = True
        children = np.bincount(parents[parents != NONE], minlength=len(self._flags))
        going = len(following)
        for block in reversed(found):
            if children[block] > going:
                break
            chosen[block], going = True, 1
        return self._with_what_continues(chosen, ids, depths, parents)

    def _that_begin(self, ids: Ids, token_ids: Sequence[int]) -> Ids:
        """Those of these blocks whose tokens begin with `token_ids`, which fill no block."""
        width = -(-len(token_ids) // 2)
        rows = self.entries.words[:, TOKENS : TOKENS + width][ids].astype("<u8").view(np.uint32)
        right: Ids = ids[(rows[:, : len(token_ids)] == np.array(token_ids, np.uint32)).all(axis=1)]
        return right

    def continued_by(self, block: int) -> Ids:
        """An indexed block and all that continues it, like `begun_by`."""
        chosen = np.zeros(len(self._flags), bool)
        chosen[block] = True
        return self._with_what_continues(chosen, *self._all())

    @staticmethod
    def _with_what_continues(
        chosen: Flags, ids: Ids, depths: npt.NDArray[np.int64], parents: npt.NDArray[np.int64]
    ) -> Ids:
        """The blocks `chosen`, and those that continue them, deepest first. Of a chosen block all children go."""
        order = np.argsort(depths, kind="stable")
        bounds = np.searchsorted(depths[order], np.arange(1, int(depths.max(initial=0)) + 2))
        for low, high in itertools.pairwise(bounds.tolist()):
            level = order[low:high]
            chosen[ids[level]] |= chosen[parents[level]]
        deepest_first = ids[order[::-1]]
        result: Ids = deepest_first[chosen[deepest_first]]
        return result

    # ---- succession

    def recover(self, void: Sequence[int] = (), first: int = 1) -> None:
        """Take over the entries of a predecessor. Those of the blocks `void`, and what continues them, are dropped.

        `first`: the least generation of later entries.
        """
        if len(void):
            ids = np.array(void, np.int32)
            self.entries.withdraw(ids[self.entries.generations[ids] != 0])
        self._drop_orphans()
        ids = self.entries.valid()
        self._following = max(first, int(self.entries.generations.max(initial=0)) + 1)
        for begin in range(0, len(ids), SCANNED_AT_ONCE):
            piece = ids[begin : begin + SCANNED_AT_ONCE]
            self._table.add_all(piece, self.entries.words[:, DIGEST][piece])
        self._flags[ids] = 1
        self.queue.use(ids.tolist())
        self._rank_again()

    def _drop_orphans(self) -> None:
        """Drop the entries whose parent is not there, from the first blocks of chains on."""
        ids, depths, parents = self._all()
        generations, before = self.entries.generations, self.entries.words[:, BEFORE][ids]
        for level in _levels(depths):
            its_parents = parents[level]
            if NONE in its_parents[:1]:
                continue  # first blocks
            orphans = generations[its_parents] != before[level]
            orphans |= self.depths(its_parents) + 1 != depths[level]
            self.entries.withdraw(ids[level[orphans]])

    def _rank_again(self) -> None:
        """Rank all entries by the age of what continues them last, in place of the order that was lost."""
        ids, depths, parents = self._all()
        if not len(ids):
            return
        newest = self.entries.generations.astype(np.int64)
        for level in _levels(depths)[:0:-1]:
            np.maximum.at(newest, parents[level], newest[ids[level]])
        in_order = ids[np.lexsort((depths, -newest[ids]))].tolist()
        self.queue.touch(in_order, chain_blocks=round(float(depths.mean())) + 1)

    def _all(self) -> tuple[Ids, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The blocks with valid entries, their depths, and their parents (-1 for a chain's first block)."""
        ids = self.entries.valid()
        return ids, self.depths(ids), self.parents(ids)

    # ---- accounting

    def check_integrity(self, cached: bytearray) -> None:
        """Recount, O(capacity). `cached`: flags of the blocks that only the index keeps. Raises AccountingError."""
        ids, depths, parents = self._all()
        generations, words = self.entries.generations, self.entries.words
        inner = parents != NONE
        held = np.frombuffer(cached, np.uint8) == 0
        problems = {
            "flags": np.array_equal(np.flatnonzero(self._flags), ids),
            "hash table": np.array_equal(np.sort(self._table.check()), ids),
            "generations": len(np.unique(generations[ids])) == len(ids)
            and generations.max(initial=0) < self._following,
            "cached blocks that are not indexed": self._flags[~held].all(),
            "parents": np.array_equal(generations[parents[inner]], words[:, BEFORE][ids[inner]]),
            "depths": np.array_equal(self.depths(parents[inner]) + 1, depths[inner]),
            "a held block whose parent is cached": not (held[ids[inner]] & ~held[parents[inner]]).any(),
            "ranks": self.queue.in_order(ids[inner], parents[inner], ~held),
        }
        wrong = [name for name, right in problems.items() if not right]
        if wrong:
            raise AccountingError(f"the prefix index is wrong: {', '.join(wrong)}")

    def depths(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Numbers of these indexed blocks in their chains."""
        depths: npt.NDArray[np.int64] = (self.entries.words[:, META][ids] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return depths

    def parents(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The blocks that these indexed blocks continue; -1 for a chain's first block."""
        parents: npt.NDArray[np.int64] = self.entries.parents[ids].astype(np.int64)
        parents[self.depths(ids) == 0] = NONE
        return parents


def _levels(depths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """The numbers of blocks by depth, least depth first."""
    order = np.argsort(depths, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(depths[order])) + 1)


def _both(one: Flags, other: Flags) -> Flags:
    one &= other
    return one
