"""The state of a shard: which request or writer has which block, and the table from which a successor rebuilds it."""

from __future__ import annotations

import time
from collections.abc import Callable

from alignedserve.errors import AccountingError, TransferError
from alignedserve.kv_pool.prefix_cache import PrefixCache
from alignedserve.kv_pool.prefix_chain import DIGEST_BYTES
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.records import (
    Held,
    Holding,
    Leased,
    Payload,
    PoolState,
    Record,
    Released,
    WriterKey,
    held_bytes,
)
from alignedserve.kv_pool.table import AllocationTable
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.sessions import Sessions
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.caching_allocator import CachingAllocator

_SUCCESSION = WriterKey("kv_pool", "succession", 0)


class ShardBlocks:
    """Holdings, leases and cached blocks, each change of which is also in the table. `KvPool` has the rules."""

    def __init__(
        self,
        store_id: str,
        table: AllocationTable,
        block_size: int,
        index: PrefixIndex | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store_id = store_id  # names the shard's memory in errors
        self._table = table  # a successor continues from it: written before a change is reported
        self.block_size = block_size  # tokens of a block
        self._cache: PrefixCache | None = None
        self._blocks = BlockAllocator(table.capacity_blocks, store_id)  # owners and leases of blocks
        if index is not None:
            self._blocks = caching = CachingAllocator(table.capacity_blocks, store_id, index)
            self._cache = PrefixCache(index, caching, Sessions(clock, DIGEST_BYTES))
        self._holdings: dict[str, Holding] = {}  # committed KV by request id, until released
        self._record_bytes = 0  # of their records in the table
        self._lost: dict[WriterKey, tuple[int, ...]] = {}  # leases of lost writers, until they are known to be dead
        self._writers: dict[WriterKey, None] = {}  # writers that may have a lease
        self._succeed(table.found)

    def holding(self, request_id: str) -> Holding | None:
        return self._holdings.get(request_id)

    @property
    def sessions(self) -> Sessions | None:
        """The conversations whose last request has ended; None without an index."""
        return None if self._cache is None else self._cache.sessions

    def inventory(self) -> list[Holding]:
        """All committed holdings, oldest first."""
        return list(self._holdings.values())

    def read(self, key: RequestKey) -> tuple[Holding, bytes] | None:
        """The holding and the payload of a request; None if this shard does not have both in exactly this epoch.

        Raises TransferError if the payload is damaged.
        """
        holding = self._holdings.get(key.request_id)
        if holding is None or holding.key != key or holding.payload is None:
            return None
        return holding, self._table.payloads.read(holding.payload)

    def room(self) -> int:
        """How many blocks more requests can have: those that are free or cached, if the table has room for so many."""
        return min(self._blocks.free_blocks + self._blocks.cached_blocks, self._table.room(self._record_bytes))

    def own_blocks(self, request_id: str) -> int:
        """The number of blocks that only this request holds."""
        holding = self._holdings.get(request_id)
        return sum(self._blocks.holder_count(block) == 1 for block in holding.block_ids) if holding else 0

    def check_integrity(self) -> None:
        """Recount all blocks and read the table again. Raises AccountingError if they do not match."""
        self._blocks.check_integrity()
        if self._cache is not None:
            self._cache.check_integrity()
        for request_id, holding in self._holdings.items():
            if sorted(self._blocks.blocks_of(request_id)) != sorted(holding.block_ids):
                raise AccountingError(f"{self.store_id}: {request_id} holds other blocks than it committed")
        if sum(len(holding.block_ids) for holding in self._holdings.values()) != sum(
            self._blocks.holder_count(block) for block in range(self._blocks.capacity)
        ):
            raise AccountingError(f"{self.store_id}: blocks are held by requests that have committed nothing")
        payloads = (held.payload for held in self._holdings.values() if held.payload is not None)
        if sum(len(payload.page_ids) for payload in payloads) != self._table.payloads.used_pages:
            raise AccountingError(f"{self.store_id}: pages are in use that belong to no request's payload")
        if self._record_bytes != sum(map(held_bytes, self._holdings.values())):
            raise AccountingError(f"{self.store_id}: the size of the records does not match a recount")
        if self._table.state() != self._state():
            raise AccountingError(f"{self.store_id}: the allocation table does not match the state of the pool")

    def _free(self, request_id: str, *, ended: bool = False) -> None:
        """Free a holding. `ended`: because its request has ended."""
        holding = self._holdings.pop(request_id)
        self._record_bytes -= held_bytes(holding)
        self._blocks.release_all(request_id)
        self._rest(holding, request_id if ended else "")
        self._write_down(Released(request_id))
        if holding.payload is not None:
            self._table.payloads.free(holding.payload)

    def _rest(self, before: Holding | None, request_id: str = "") -> None:
        """Rank the cached blocks of a holding that has changed, or ended with its request `request_id`."""
        if self._cache is not None and before is not None:
            self._cache.rest(before.block_ids, request_id)

    # ---- the table

    def _keep(self, data: bytes) -> Payload | None:
        """Store a payload; None if `data` is empty. Raises TransferError if there is no room."""
        payload = self._table.payloads.write(data)
        if payload is None:
            raise TransferError(f"{self.store_id}: there is no room for {len(data)} bytes of a stored request")
        return payload if data else None

    def _write_holding(self, record: Held) -> None:
        """Like `_write_ahead`, but frees the payload of the record if that raises."""
        try:
            self._write_ahead(record)
        except TransferError:
            if record.holding.payload is not None:
                self._table.payloads.free(record.holding.payload)
            raise

    def _replace(self, before: Holding | None, holding: Holding) -> None:
        """Replace the holding of a request after its record was written, and free the payload of the old holding."""
        self._holdings[holding.key.request_id] = holding
        self._record_bytes += held_bytes(holding) - (held_bytes(before) if before is not None else 0)
        if before is not None and before.payload is not None:
            self._table.payloads.free(before.payload)

    def _write_ahead(self, record: Record) -> None:
        """Write the record of a change before it is made.

        Raises TransferError, and changes nothing, if the table is full.
        """
        if not self._table.append(record):
            self._table.rewrite(self._state(but=record).records())
            if not self._table.append(record):
                raise TransferError(f"{self.store_id}: the allocation table is full")

    def _write_down(self, record: Record) -> None:
        """Write the record of a change that was made and does not enlarge the state."""
        if not self._table.append(record, shrinks=True):
            self._table.rewrite(self._state().records())

    def _state(self, but: Record | None = None) -> PoolState:
        leases = {writer: set(self._blocks.leased_to(writer)) for writer in self._writers if writer not in self._lost}
        leases |= {writer: set(block_ids) for writer, block_ids in self._lost.items()}
        if isinstance(but, Leased):  # the allocator already has this lease, the table does not
            leases[but.writer].difference_update(but.block_ids)
        return PoolState(
            dict(self._holdings), {writer: leased for writer, leased in leases.items() if leased}, set(self._lost)
        )

    def _succeed(self, state: PoolState) -> None:
        """Take over the state of a predecessor. Raises TransferError if the state contradicts itself."""
        blocks = self._blocks
        unclaimed = set(blocks.lease(blocks.capacity, _SUCCESSION))
        try:
            if self._cache is None:
                self._table.forget_index()
            else:
                self._cache.index.recover([block for leased in state.leases.values() for block in leased])
            for request_id, holding in state.holdings.items():
                first = [block for block in holding.block_ids if block in unclaimed]
                unclaimed.difference_update(first)
                blocks.assign_leased(first, _SUCCESSION, request_id)
                blocks.retain(set(holding.block_ids).difference(first), request_id)
                self._holdings[request_id] = holding
                self._record_bytes += held_bytes(holding)
            for writer, leased in state.leases.items():
                block_ids = sorted(leased)
                unclaimed.difference_update(block_ids)
                blocks.return_lease(block_ids, _SUCCESSION)
                if sorted(blocks.lease(len(block_ids), writer)) != block_ids:
                    raise AccountingError(f"{self.store_id}: the lease of {writer} could not be taken over")
                self._writers[writer] = None
            if self._cache is not None:
                unclaimed.difference_update(self._cache.take_over(unclaimed, _SUCCESSION))
            blocks.return_lease(sorted(unclaimed), _SUCCESSION)
        except (AccountingError, IndexError) as error:
            raise TransferError(f"{self.store_id}: the allocation table contradicts itself: {error}") from error
        for writer in state.lost:
            self._lost[writer] = tuple(blocks.leased_to(writer))
            blocks.quarantine(writer)
