"""The entries of the prefix index in the pool's segment: what each indexed block holds. They outlive the process.

An entry is as long as whole cache lines; numbers are little-endian and aligned to 8 bytes:

    0   generation: the number of the entry, given once; 0: the block is not indexed
    8   depth of the block in its chain (4 bytes), and flags (4 bytes)
    16  checksum of the block, if its flag is set
    24  parent: number of the block before it, 4 bytes; only valid if the depth is not 0
    28  next block in its list of the hash table, 4 bytes; only valid for the process that has the table
    32  what comes before the block, 16 bytes: the parent's generation and 0, or the chain's root
    48  digest, 16 bytes
    64  token ids, 4 bytes each

Generation, tokens and what comes before say exactly which prefix a block holds, whatever its digest is. The generation
is written last, and set to 0 before anything else of the block may change. So a process killed between two writes
leaves each entry either right or not there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

LINE_BYTES = 64
GENERATION, META, CHECKSUM, BEFORE, DIGEST, TOKENS = 0, 1, 2, 4, 6, 8  # first words of the fields
PARENT, NEXT = 6, 7  # the halves of a word
HAS_CHECKSUM = 1 << 32


def entry_bytes(block_size: int) -> int:
    """Bytes of an entry for a block of `block_size` tokens."""
    return -(-(TOKENS * 8 + block_size * 4) // LINE_BYTES) * LINE_BYTES


class IndexEntries:
    """The entries as words, uint64 `[capacity, words]`, and their bytes. One process writes, and no other reads."""

    def __init__(self, memory: memoryview, block_size: int) -> None:
        """`memory`: `capacity * entry_bytes(block_size)` bytes."""
        self.bytes = entry_bytes(block_size)
        self.memory = memory.cast("B")
        self.words: Words = np.frombuffer(self.memory, np.uint64).reshape(-1, self.bytes // 8)
        self.generations = self.words[:, GENERATION]
        halves = self.words.view(np.int32)
        self.parents, self.nexts = halves[:, PARENT], halves[:, NEXT]
        self.one_word = self.memory.cast("Q")  # single words are read and written faster than through NumPy
        self.stride = self.bytes // 8
        self._layout = struct.Struct(f"<6Q16s{block_size * 4}s")
        self.seen = struct.Struct(f"<Q24x2Q16x{block_size * 4}s")
        """Generation, what comes before (2 words) and tokens of an entry."""
        self._token_bytes = block_size * 4

    def fill(self, ids: Ids, rows: Words) -> None:
        """Write whole entries, whose generations must be 0."""
        self.words[ids] = rows

    def publish(self, ids: Ids, generations: Words) -> None:
        """Make filled entries valid, in this order: a parent before its children."""
        self.generations[ids] = generations

    def withdraw(self, ids: Ids) -> None:
        """Make entries invalid, in this order: children before their parent."""
        self.generations[ids] = 0

    def fill_each(
        self,
        block_ids: Sequence[int],
        meta: int,
        checksums: Sequence[int],
        parent: int,
        before: tuple[int, int],
        generation: int,
        digests: bytes,
        tokens: bytes,
    ) -> None:
        """`fill` with few blocks of a chain, each the parent of the next; `meta` and `generation` count up."""
        first, second = before
        memory, size, pack, step = self.memory, self.bytes, self._layout.pack_into, self._token_bytes
        for number, block in enumerate(block_ids):
            own = digests[number * 16 : number * 16 + 16]
            checksum = checksums[number] if checksums else 0
            its_tokens = tokens[number * step : (number + 1) * step]
            pack(memory, block * size, 0, meta + number, checksum, parent, first, second, own, its_tokens)
            first, second, parent = generation + number, 0, block

    def publish_each(self, block_ids: Sequence[int], generation: int) -> None:
        """`publish` with few blocks; `generation` counts up."""
        words, stride = self.one_word, self.stride
        for number, block in enumerate(block_ids):
            words[block * stride] = generation + number

    def withdraw_each(self, block_ids: Sequence[int]) -> None:
        """`withdraw` with few blocks."""
        words, stride = self.one_word, self.stride
        for block in block_ids:
            words[block * stride] = 0

    def valid(self) -> Ids:
        """The blocks with a valid entry."""
        return np.flatnonzero(self.generations).astype(np.int32)
