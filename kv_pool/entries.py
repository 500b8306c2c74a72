"""The entries of the prefix index in the pool's segment: what each indexed block holds. They outlive the process.

An entry is as long as whole cache lines; numbers are little-endian and aligned to 8 bytes:

    0   generation: the number of the entry, given once; 0: the block is not indexed
    8   depth of the block in its chain (4 bytes), and flags (4 bytes)
    16  checksum of the block, if its flag is set
    24  parent: number of the block before it; only valid if the depth is not 0
    32  what comes before the block, 16 bytes: the parent's generation and 0, or the chain's root
    48  digest, 16 bytes
    64  token ids, 4 bytes each

Generation, tokens and what comes before say exactly which prefix a block holds, whatever its digest is. The generation
is written last, and set to 0 before anything else of the block may change. So a process killed between two writes
leaves each entry either right or not there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

LINE_BYTES = 64
GENERATION, META, CHECKSUM, PARENT, BEFORE, DIGEST, TOKENS = 0, 1, 2, 3, 4, 6, 8  # first words of the fields
HAS_CHECKSUM = 1 << 32


def entry_bytes(block_size: int) -> int:
    """Bytes of an entry for a block of `block_size` tokens."""
    return -(-(TOKENS * 8 + block_size * 4) // LINE_BYTES) * LINE_BYTES


class IndexEntries:
    """The entries as words, uint64 `[capacity, words]`, and their bytes. One process writes, and no other reads."""

    def __init__(self, memory: memoryview, block_size: int) -> None:
        """`memory`: `capacity * entry_bytes(block_size)` bytes."""
        self.bytes = entry_bytes(block_size)
        self.token_bytes = block_size * 4
        self.memory = memory.cast("B")
        self.words: Words = np.frombuffer(self.memory, np.uint64).reshape(-1, self.bytes // 8)
        self.generations = self.words[:, GENERATION]
        self._words = self.memory.cast("Q")  # single words are written faster than through NumPy
        self._stride = self.bytes // 8

    def fill(self, ids: Ids, rows: Words) -> None:
        """Write whole entries, whose generations must be 0."""
        self.words[ids] = rows

    def publish(self, ids: Ids, generations: Words) -> None:
        """Make filled entries valid, in this order: a parent before its children."""
        self.generations[ids] = generations

    def withdraw(self, ids: Ids) -> None:
        """Make entries invalid, in this order: children before their parent."""
        self.generations[ids] = 0

    def fill_one(self, block: int, content: bytes) -> None:
        at = block * self.bytes
        self.memory[at : at + len(content)] = content

    def publish_one(self, block: int, generation: int) -> None:
        self._words[block * self._stride] = generation

    def valid(self) -> Ids:
        """The blocks with a valid entry."""
        return np.flatnonzero(self.generations).astype(np.int32)
