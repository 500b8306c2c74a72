"""The blocks of one store: free, owned or cached, with their holders.

    free ──allocate──► owned ──last release──► free
    free ──lease──► free, set aside for a writer ──assign_leased──► owned
                          └──quarantine(writer)──► owned, without holder ──end_quarantine──► free

`capacity = free + owned + cached` at every moment. A leased block is free until a holder is assigned to it. A block
under a lost writer's lease is owned, because that writer may still write to it. Only the store of a prefix cache has
cached blocks (`caching_allocator.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Container, Hashable, Iterable, Sequence

from alignedserve.errors import AccountingError, StaleError

Holder = Hashable
Writer = Hashable


class BlockState(enum.Enum):
    FREE = "free"
    OWNED = "owned"
    CACHED = "cached"


class BlockAllocator:
    """Hands out the blocks `0 .. capacity - 1` of the store `store_id`. One process, one thread, O(1) a block.

    A holder holds a block once; a block may have several holders. Every misuse (releasing a block that is not held,
    holding one twice, assigning one that was not leased) raises AccountingError and changes nothing.
    """

    def __init__(self, capacity: int, store_id: str) -> None:
        if capacity < 0:
            raise ValueError("capacity must be at least 0")
        self.capacity = capacity
        self.store_id = store_id
        self._free: list[int] = list(range(capacity - 1, -1, -1))  # a stack: the lowest number is on top
        self._held: dict[Holder, dict[int, None]] = {}  # in order of allocation
        self._sole: list[Holder | None] = [None] * capacity
        self._shared: dict[int, dict[Holder, None]] = {}  # only blocks with two holders or more
        self._leases: dict[Writer, dict[int, None]] = {}
        self._quarantine: dict[Writer, dict[int, None]] = {}
        self._leased = 0
        self._quarantined = 0
        self._owned = 0  # blocks with a holder

    @property
    def free_blocks(self) -> int:
        """Blocks without a holder, including leased ones."""
        return len(self._free) + self._leased

    @property
    def available_blocks(self) -> int:
        """Blocks that `allocate` and `lease` can hand out now: free and not leased."""
        return len(self._free)

    @property
    def leased_blocks(self) -> int:
        return self._leased

    @property
    def owned_blocks(self) -> int:
        """Blocks with a holder, and blocks in quarantine."""
        return self._owned + self._quarantined

    @property
    def cached_blocks(self) -> int:
        """Blocks that only a prefix cache keeps."""
        return 0

    @property
    def request_blocks(self) -> int:
        """The most blocks that one request can have."""
        return self.capacity

    def available_beside(self, block: int) -> int:
        """Blocks that can be handed out now where `block` is."""
        return self.available_blocks

    def allocate(self, count: int, holder: Holder) -> list[int] | None:
        """`count` free blocks for `holder`, or None (and nothing changes) if fewer are available."""
        if count > len(self._free):
            return None
        if count <= 0:
            return []
        block_ids = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._give(block_ids, holder)
        return block_ids

    def allocate_one(self, holder: Holder) -> int | None:
        """`allocate` for a single block: when all prefix lengths are alike, every running request needs one at once."""
        if not self._free:
            return None
        block = self._free.pop()
        self._held.setdefault(holder, {})[block] = None
        self._sole[block] = holder
        self._owned += 1
        return block

    def retain(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Make `holder` one more holder of owned blocks."""
        block_ids = self._distinct(block_ids)
        held = self._held.get(holder, {})
        for block in block_ids:
            if self._sole[block] is None and block not in self._shared:
                raise AccountingError(f"{self.store_id}: block {block} is free and cannot be shared", block=block)
            if block in held:
                raise AccountingError(f"{self.store_id}: {holder} already holds block {block}", block=block)
        if not block_ids:
            return
        held = self._held.setdefault(holder, {})
        for block in block_ids:
            sole = self._sole[block]
            if sole is not None:
                self._shared[block] = {sole: None}
                self._sole[block] = None
            self._shared[block][holder] = None
            held[block] = None

    def release(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Remove `holder` from these blocks. Blocks without any other holder become free."""
        block_ids = self._distinct(block_ids)
        if not block_ids:
            return
        held = self._held.get(holder)
        if held is None or any(block not in held for block in block_ids):
            raise AccountingError(f"{self.store_id}: {holder} does not hold all of {block_ids[:8]}")
        for block in block_ids:
            del held[block]
            self._drop(block, holder)
        if not held:
            del self._held[holder]

    def release_all(self, holder: Holder) -> int:
        """Remove `holder` from all its blocks. Returns how many it held."""
        held = self._held.pop(holder, None)
        if held is None:
            return 0
        for block in reversed(held):  # so that they are handed out again in their order
            self._drop(block, holder)
        return len(held)

    def holders(self, block: int) -> tuple[Holder, ...]:
        sole = self._sole[block]
        return (sole,) if sole is not None else tuple(self._shared.get(block, ()))

    def holder_count(self, block: int) -> int:
        return 1 if self._sole[block] is not None else len(self._shared.get(block, ()))

    def holders_but(self, known: Container[Holder]) -> Holder | None:
        """A holder that is not among `known`; None if there is none."""
        return next((holder for holder in self._held if holder not in known), None)

    def blocks_of(self, holder: Holder) -> list[int]:
        """The blocks of a holder, in order of allocation."""
        return list(self._held.get(holder, ()))

    def lease(self, count: int, writer: Writer) -> list[int]:
        """Set aside up to `count` blocks for `writer`: fewer if fewer are available, none in quarantine."""
        if writer in self._quarantine:
            return []
        count = min(count, len(self._free))
        if count <= 0:
            return []
        block_ids = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._leases.setdefault(writer, {}).update(dict.fromkeys(block_ids))
        self._leased += count
        return block_ids

    def leased_to(self, writer: Writer) -> list[int]:
        return list(self._leases.get(writer, ()))

    def assign_leased(self, block_ids: Sequence[int], writer: Writer, holder: Holder) -> None:
        """Assign blocks from the lease of `writer` to `holder`. Raises StaleError for a writer in quarantine."""
        self._take_leased(block_ids, writer)
        self._give(block_ids, holder)

    def return_lease(self, block_ids: Sequence[int], writer: Writer) -> None:
        """Return unneeded blocks from the lease of `writer`. Raises StaleError for a writer in quarantine."""
        self._take_leased(block_ids, writer)
        self._free.extend(reversed(block_ids))

    def quarantine(self, writer: Writer) -> int:
        """Count the blocks leased to a lost writer as owned until `end_quarantine`. Returns how many; idempotent."""
        if writer not in self._quarantine:
            leased = self._leases.pop(writer, {})
            self._quarantine[writer] = leased
            self._leased -= len(leased)
            self._quarantined += len(leased)
        return len(self._quarantine[writer])

    def end_quarantine(self, writer: Writer) -> int:
        """Free the blocks of a lost writer that is known to be dead. Returns how many; 0 if it is not in quarantine."""
        blocks = self._quarantine.pop(writer, {})
        self._free.extend(blocks)
        self._quarantined -= len(blocks)
        return len(blocks)

    def state(self, block: int) -> BlockState:
        if self.holder_count(block) or any(block in blocks for blocks in self._quarantine.values()):
            return BlockState.OWNED
        return BlockState.FREE

    def check_integrity(self) -> None:
        """Recount everything, O(capacity). Raises AccountingError if the counts do not match."""
        places: list[tuple[str, Collection[int]]] = [("free", self._unused())]
        places += [(f"leased to {writer}", blocks) for writer, blocks in self._leases.items()]
        places += [(f"in quarantine for {writer}", blocks) for writer, blocks in self._quarantine.items()]
        places += [("owned", self._with_sole_holder()), ("shared", self._shared), ("cached", list(self._kept()))]
        found: set[int] = set().union(*(blocks for _, blocks in places))  # millions of blocks: no loop in Python
        if len(found) != sum(len(blocks) for _, blocks in places):
            raise self._twice(places)
        if len(found) != self.capacity:
            raise AccountingError(f"{self.store_id}: {self.capacity - len(found)} blocks are lost")
        self._check_counters()

    def _with_sole_holder(self) -> list[int]:
        if self._sole.count(None) == self.capacity:
            return []
        return [block for block, holder in enumerate(self._sole) if holder is not None]

    def _twice(self, places: Iterable[tuple[str, Iterable[int]]]) -> AccountingError:
        """Names the first block that is in two places."""
        known: dict[int, str] = {}
        for where, blocks in places:
            for block in blocks:
                if block in known:
                    return AccountingError(f"{self.store_id}: block {block} is both {known[block]} and {where}")
                known[block] = where
        return AccountingError(f"{self.store_id}: its blocks cannot be counted")

    def _unused(self) -> Collection[int]:
        """The free blocks that are not leased."""
        return self._free

    def _kept(self) -> Iterable[int]:
        """The cached blocks."""
        return ()

    def _check_counters(self) -> None:
        pairs = {(holder, block) for holder, blocks in self._held.items() for block in blocks}
        found = {(self._sole[block], block) for block in self._with_sole_holder()}
        found |= {(holder, block) for block, holders in self._shared.items() for holder in holders}
        counters = {
            "holders": pairs == found,
            "shared": all(len(holders) > 1 for holders in self._shared.values()),
            "empty holders": all(self._held.values()),
            "owned": self._owned == len({block for _, block in found}),
            "leased": self._leased == sum(map(len, self._leases.values())),
            "quarantined": self._quarantined == sum(map(len, self._quarantine.values())),
            "cached": self.cached_blocks == self.capacity - self.free_blocks - self.owned_blocks,
        }
        wrong = [name for name, right in counters.items() if not right]
        if wrong:
            raise AccountingError(f"{self.store_id}: counters do not match a recount: {', '.join(wrong)}")

    def _give(self, block_ids: Sequence[int], holder: Holder) -> None:
        if not block_ids:
            return
        held = self._held.setdefault(holder, {})
        held.update(dict.fromkeys(block_ids))
        sole = self._sole
        for block in block_ids:
            sole[block] = holder
        self._owned += len(block_ids)

    def _drop(self, block: int, holder: Holder) -> None:
        if self._sole[block] is not None:
            self._sole[block] = None
            self._free.append(block)
            self._owned -= 1
            return
        holders = self._shared[block]
        del holders[holder]
        if len(holders) == 1:
            del self._shared[block]
            self._sole[block] = next(iter(holders))

    def _distinct(self, block_ids: Iterable[int]) -> list[int]:
        block_ids = list(block_ids)
        if len(set(block_ids)) != len(block_ids):
            raise AccountingError(f"{self.store_id}: a block is named twice in {block_ids[:8]}")
        return block_ids

    def _take_leased(self, block_ids: Sequence[int], writer: Writer) -> None:
        if writer in self._quarantine:
            raise StaleError(f"{self.store_id}: the lease of {writer} has ended: the writer was declared lost")
        leased = self._leases.get(writer, {})
        if any(block not in leased for block in self._distinct(block_ids)):
            raise AccountingError(f"{self.store_id}: {list(block_ids)[:8]} are not all leased to {writer}")
        for block in block_ids:
            del leased[block]
        if not leased:
            self._leases.pop(writer, None)
        self._leased -= len(block_ids)
