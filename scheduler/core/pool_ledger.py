"""What the core believes the pool holds, by shard. Only a node's own instances write to its shard.

Each request's copy is in one shard. If the cluster names no shards there is one, whose name does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.pool_shard import PoolShard


class PoolLedger:
    """Blocks by shard and request. Every operation on one request is O(1), every sum O(shards)."""

    def __init__(self) -> None:
        self._first = PoolShard("")
        self._shards: dict[str, PoolShard] = {"": self._first}
        self.named = False  # whether the names of the shards are known
        self.only: PoolShard | None = self._first  # the only shard; None if there are several
        self._copies: dict[RequestKey, PoolShard] = {}  # the shard of each committed copy
        self._reserves: dict[RequestKey, PoolShard] = {}

    # which shards there are

    def name_shards(self, pool_ids: Iterable[str]) -> list[PoolShard]:
        """Set the names of all current shards. Returns those that are gone for good, with all that they held.

        The shard that had no name yet takes the first.
        """
        names = list(pool_ids)
        if not self.named and names:
            self.named = True
            self._first.pool_id = names[0]
            self._shards = {names[0]: self._first}
        gone = [shard for name, shard in self._shards.items() if name not in names] if self.named else []
        for shard in gone:
            del self._shards[shard.pool_id]
        for name in names:
            self._shards.setdefault(name, PoolShard(name))
        self.only = next(iter(self._shards.values())) if len(self._shards) == 1 else None
        return gone

    def forget(self, shard: PoolShard) -> None:
        """Drop all accounting of copies in the shard and of reserves for it."""
        for key in shard.holders():
            shard.release(key)
            shard.cancel_reserve(key)
            if self._copies.get(key) is shard:
                del self._copies[key]
            if self._reserves.get(key) is shard:
                del self._reserves[key]

    @property
    def shards(self) -> Collection[PoolShard]:
        return self._shards.values()

    def shard(self, pool_id: str) -> PoolShard | None:
        """The shard of this name; None if it is gone with its node, or is not known yet."""
        return self._shards.get(pool_id) if self.named else self._first

    def shard_of(self, key: RequestKey) -> PoolShard | None:
        """The shard that holds the request's copy; None if there is none."""
        return self._copies.get(key)

    def report(self, pool_id: str, capacity_blocks: int, free_blocks: int) -> None:
        shard = self.shard(pool_id)
        if shard is not None:
            shard.report(pool_id, capacity_blocks, free_blocks)

    def lose(self, pool_id: str) -> None:
        shard = self.shard(pool_id)
        if shard is not None:
            shard.lose(pool_id)

    @property
    def pool_ids(self) -> list[str]:
        """Shards that have reported."""
        return [pool_id for shard in self._shards.values() for pool_id in shard.reports]

    # sums

    @property
    def capacity(self) -> int:
        return sum(shard.capacity for shard in self._shards.values())

    @property
    def committed(self) -> int:
        return sum(shard.committed for shard in self._shards.values())

    @property
    def reserved(self) -> int:
        return sum(shard.reserved for shard in self._shards.values())

    @property
    def droppable_blocks(self) -> int:
        """Blocks of copies that could be dropped."""
        return sum(shard.droppable_blocks for shard in self._shards.values())

    @property
    def free(self) -> int:
        """Blocks that hold no committed copy, as far as is known; includes reserved ones."""
        return sum(shard.free for shard in self._shards.values())

    # requests

    def reserve(self, key: RequestKey, blocks: int, shard: PoolShard | None = None) -> None:
        """The request is being prefilled and will need `blocks` blocks there."""
        shard = shard or self._first
        shard.reserve(key, blocks)
        self._reserves[key] = shard

    def commit(self, key: RequestKey, blocks: int, shard: PoolShard | None = None) -> PoolShard | None:
        """`blocks` unshared blocks of the shard now hold the request's KV.

        Returns another shard that had an older copy of it, if any; the caller has it dropped there.
        """
        shard = shard or self._first
        reserved_at = self._reserves.pop(key, None)
        if reserved_at is not None and reserved_at is not shard:
            reserved_at.cancel_reserve(key)
        older = self._copies.get(key)
        self._copies[key] = shard
        shard.commit(key, blocks)
        if older is None or older is shard:
            return None
        older.release(key)
        return older

    def committed_of(self, key: RequestKey) -> int | None:
        """Unshared blocks that hold this request's KV; None if the pool has no copy of it."""
        shard = self._copies.get(key)
        return None if shard is None else shard.committed_of(key)

    def mark_droppable(self, key: RequestKey) -> None:
        """The request decodes, or waits to be prefilled again: its copy here is clean, and may be dropped."""
        shard = self._copies.get(key)
        if shard is not None:
            shard.mark_droppable(key)

    def pin(self, key: RequestKey) -> None:
        """Its copy is in use: it must not be dropped."""
        shard = self._copies.get(key)
        if shard is not None:
            shard.pin(key)

    def drop_copies(self, blocks: int, shard: PoolShard | None = None) -> list[RequestKey]:
        """Give up clean copies in the shard, oldest first, until `blocks` more are free there. Returns their keys."""
        shard = shard or self._first
        dropped = []
        freed = 0
        while freed < blocks and (oldest := shard.next_to_drop()) is not None:
            key, held = oldest
            freed += held
            dropped.append(key)
            self.release(key)
        return dropped

    def leave(self, key: RequestKey) -> None:
        """The request is gone from the core, but its copy stays in the pool: its next epoch may adopt it."""
        shard = self._copies.get(key)
        if shard is not None:
            shard.leave(key)
        self.release(key)

    def release(self, key: RequestKey) -> bool:
        """Drop the request's copy and reserve from the accounting. Returns False if nothing was committed."""
        reserved_at = self._reserves.pop(key, None)
        if reserved_at is not None:
            reserved_at.cancel_reserve(key)
        shard = self._copies.pop(key, None)
        return shard is not None and shard.release(key)

    def check_integrity(self) -> None:
        for shard in self._shards.values():
            shard.check_integrity()
        found = [key for shard in self._shards.values() for key in shard.holders()]
        if set(found) != self._copies.keys() | self._reserves.keys():
            raise AccountingError("the shards of the pool do not hold the copies that the ledger knows of")
        if any(shard.committed_of(key) is None for key, shard in self._copies.items()):
            raise AccountingError("the ledger has a copy in a shard that does not hold it")
