"""Which leading blocks of a request another one already has in the same cache, so that both hold them.

Prefixes are found by chained digests of their tokens, and are the same only if the tokens are. So a block's content is
known by what it was computed from, never by a block id of another store, which may have been used again.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.errors import AccountingError


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The full blocks of a request's tokens, from the first on.

    `digests`: a chained digest of each block, in `blocks` equal parts. `tokens`: their token ids, in as many equal
    parts. `salt`: only requests of the same salt share blocks.
    """

    blocks: int
    digests: bytes
    tokens: bytes
    salt: bytes

    def digest(self, block: int) -> bytes:
        """It names this block and everything before it."""
        size = len(self.digests) // self.blocks
        return self.digests[block * size : (block + 1) * size]

    def begins_like(self, other: BlockChain, blocks: int) -> bool:
        """Whether the first `blocks` blocks of both, at least 1, have the same tokens and salt."""
        end = len(self.tokens) // self.blocks * blocks
        return self.tokens[:end] == other.tokens[:end] and self.salt == other.salt


@dataclass(eq=False, slots=True)
class Resident:
    """A request of the cache: `block_ids` hold, or will hold, the KV of its chain. `filled`: they do now."""

    chain: BlockChain
    block_ids: list[int]
    filled: bool


@dataclass(slots=True)
class _Entry:
    """A block that can be found. Any prefixes may have one digest, so `place` and `block_id` say which one it is."""

    source: Resident  # that had its block allocated; it may have left
    place: int  # of the block in its chain
    block_id: int
    holders: int  # requests that hold the block, and so those before it


class ResidentPrefixes:
    """The prefixes of one cache. A block can be found as long as a request that entered with it has not left.

    Entering and leaving cost O(blocks) of dictionary operations, `find` O(log blocks).
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}

    def find(self, chain: BlockChain) -> list[int] | None:
        """The blocks of the longest prefix of `chain` that is here; None if some of them are being filled."""
        low, high = 0, chain.blocks  # what a block continues is here, too
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if chain.digest(middle) in self._entries else (low, middle)
        if not low:
            return []
        entry = self._entries[chain.digest(low - 1)]
        if not entry.source.filled:  # looked at first: many may wait for it, and comparing takes longer
            return None
        if entry.place != low - 1 or not chain.begins_like(entry.source.chain, low):
            return []  # two prefixes have one digest: a miss
        return entry.source.block_ids[:low]

    def enter(self, chain: BlockChain, block_ids: list[int], *, filled: bool = False) -> Resident:
        """A request holds `block_ids` for its chain: first those that `find` returned, then its own."""
        resident = Resident(chain, block_ids[: chain.blocks], filled)
        for block, block_id in enumerate(resident.block_ids):
            entry = self._entries.setdefault(chain.digest(block), _Entry(resident, block, block_id, 0))
            entry.holders += entry.block_id == block_id
        return resident

    def leave(self, resident: Resident) -> None:
        """The request no longer holds its blocks."""
        for block, block_id in enumerate(resident.block_ids):
            digest = resident.chain.digest(block)
            entry = self._entries.get(digest)
            if entry is not None and entry.block_id == block_id:
                entry.holders -= 1
                if not entry.holders:
                    del self._entries[digest]

    def check_integrity(self, residents: list[Resident]) -> None:
        """Raises AccountingError if the entries are not those of `residents`."""
        counted: dict[bytes, int] = {}
        for resident in residents:
            for block, block_id in enumerate(resident.block_ids):
                digest = resident.chain.digest(block)
                entry = self._entries.get(digest)
                if entry is not None and entry.block_id == block_id:
                    counted[digest] = counted.get(digest, 0) + 1
        if counted != {digest: entry.holders for digest, entry in self._entries.items()}:
            raise AccountingError("the prefixes that can be shared do not match the requests that hold them")
