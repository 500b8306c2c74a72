"""The KV pool's decisions: who holds which block of host memory. Messages in, replies out; the KV never passes here.

    free ──want──► leased to a writer ──commit──► held by a request ──release──► free
                        │        ▲                     ▲     │
                        │        └── give back         └─────┘ a commit of the same request, a newer epoch's too
                        └─ writer lost ──► quarantined ──writer dead──► free

Everything is in the allocation table before anybody hears of it, so the successor of a killed pool process goes on from
the same state, leases among them: a writer may be filling its leased blocks while the pool is away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from alignedserve.errors import AccountingError, StaleError, TransferError
from alignedserve.kv_pool.epochs import OverEpochs
from alignedserve.kv_pool.records import (
    Dead,
    Held,
    Holding,
    Leased,
    Lost,
    Payload,
    PoolState,
    Record,
    Released,
    Returned,
    WriterKey,
    check_writer,
)
from alignedserve.kv_pool.table import AllocationTable
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator

RESERVE_ROLES = frozenset({"decode", "write_back"})  # write_back: a prefill instance that empties its buffers
_SUCCESSION = WriterKey("kv_pool", "succession", 0)


@dataclass(frozen=True, slots=True)
class Grant:
    """Reply to a writer: these blocks are leased to it."""

    writer: WriterKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """`capacity = free + owned + cached`; `leased` ones are free, quarantined ones owned. `wanted`: not granted yet."""

    capacity: int
    free: int
    owned: int
    cached: int
    leased: int
    requests: int
    wanted: int


class KvPool:
    """One pool of blocks. One thread; no method blocks.

    Methods that may free blocks return the grants to writers that were waiting for some. `reserve_blocks` are granted
    to decode workers only, for evictions: prefills may not fill the pool to the last block.
    """

    def __init__(self, store_id: str, table: AllocationTable, block_size: int, *, reserve_blocks: int = 0) -> None:
        """Goes on from what `table` found. Raises TransferError where that contradicts itself."""
        self.store_id = store_id
        self._table = table  # what a successor goes on from: written before a change is told
        self._block_size = block_size
        self._reserve_blocks = reserve_blocks
        self._blocks = BlockAllocator(table.capacity_blocks, store_id)  # who owns which block, and leases
        self._holdings: dict[str, Holding] = {}  # committed KV by request id, until released
        self._lost: dict[WriterKey, tuple[int, ...]] = {}  # leases of silent writers, until those are known dead
        self._writers: dict[WriterKey, None] = {}  # that may have a lease
        self._wants: dict[WriterKey, int] = {}  # in the order in which they were served first
        self._regranted: dict[WriterKey, int] = {}  # blocks granted again since `hello`, until its next want
        self._ended: dict[tuple[str, str], int] = {}  # newest incarnation that is known to be dead
        self._over = OverEpochs()  # the newest epoch that has ended, by request id
        self._succeed(table.found)

    # ---- writers

    def hello(self, writer: WriterKey) -> list[Grant]:
        """A writer has opened a stream. What it leased over an earlier one is granted again, against its next want.

        Raises StaleError for a writer that was declared lost or dead.
        """
        self._require_alive(writer)
        self._wants.pop(writer, None)
        block_ids = tuple(self._blocks.leased_to(writer))
        self._regranted[writer] = len(block_ids)
        return [Grant(writer, block_ids)] if block_ids else []

    def want(self, writer: WriterKey, count: int) -> list[Grant]:
        """Lease `count` more blocks to `writer`, as soon as they are free. Raises like `hello`."""
        self._require_alive(writer)
        covered = min(count, self._regranted.pop(writer, 0))
        if count > covered:
            self._wants[writer] = self._wants.get(writer, 0) + count - covered
        return self._serve()

    def give_back(self, writer: WriterKey, block_ids: Sequence[int]) -> list[Grant]:
        """`writer` does not need these. Raises like `hello`, and AccountingError where they are not leased to it."""
        self._require_alive(writer)
        self._blocks.return_lease(block_ids, writer)
        self._write_down(Returned(writer, tuple(block_ids)))
        return self._serve()

    def commit(
        self,
        writer: WriterKey,
        key: RequestKey,
        kv_tokens: int,
        block_ids: Sequence[int],
        share_with: RequestKey | None = None,
        kept_blocks: int = 0,
        checksums: Sequence[int] = (),
        payload: bytes = b"",
    ) -> list[Grant]:
        """From now on the request holds exactly `block_ids`, in order, with the KV of its first `kv_tokens` tokens.

        The first `kept_blocks` it must hold already (a lease of the same ids does not count: their KV is gone). Each
        of the others is leased to `writer`, held by the request already (in this or an older epoch), or held by
        `share_with`. What the request held and is not listed loses a holder. `checksums`: of each block, or none; only
        readers compare them. `payload`: kept beside it, for `read`. Idempotent. Refused otherwise, and then nothing
        changes: StaleError for an older epoch than was seen or a writer that is lost, TransferError where a block is
        none of these (write the request in full), the numbers do not fit, or there is no room for the payload.
        """
        self._require_alive(writer)
        before = self._holdings.get(key.request_id)
        self._require_current(key, before)
        self._require_sound(key, kv_tokens, block_ids, checksums)
        own = set(before.block_ids) if before else set()
        if not own.issuperset(block_ids[:kept_blocks]):
            raise TransferError(
                f"{self.store_id}: {key.request_id} has lost its first {kept_blocks} blocks: write it in full"
            )
        fresh, shared = self._sort_out(writer, key, [block for block in block_ids if block not in own], share_with)
        holding = Holding(key, kv_tokens, tuple(block_ids), tuple(checksums), self._keep(payload))
        self._write_holding(Held(holding, writer))
        self._blocks.assign_leased(fresh, writer, key.request_id)
        self._blocks.retain(shared, key.request_id)
        if gone := own.difference(block_ids):
            self._blocks.release(gone, key.request_id)
        self._replace(before, holding)
        return self._serve()

    def release(self, keys: Iterable[RequestKey]) -> list[Grant]:
        """These requests hold nothing more here, nor do their older epochs. What a newer epoch holds stays."""
        for key in keys:
            self._over.end(key.request_id, key.epoch)
            holding = self._holdings.get(key.request_id)
            if holding is not None and holding.key.epoch <= key.epoch:
                self._free(key.request_id)
        return self._serve()

    def adopt(
        self, wanted: Iterable[tuple[RequestKey, int]], renew: Callable[[bytes], bytes] | None = None
    ) -> tuple[list[Holding], list[Grant]]:
        """What the epochs before these hold, up to so many tokens, is theirs from now on: no older one can change it.

        What each holds then; without blocks where there is nothing, or a newer epoch has it. What is left of an epoch
        before the last is freed: this shard heard nothing of the one between, which may have drawn other tokens.
        `renew`: what its payload is in the new epoch, for one of which nothing is missing; else it has none.
        """
        found = []
        for key, most_tokens in wanted:
            holding = self._holdings.get(key.request_id)
            if holding and (holding.key.epoch > key.epoch or self._over.newest(key.request_id) >= key.epoch):
                holding = None  # not of an older epoch, or of one that is over
            if holding and holding.key != key and not (most_tokens and holding.key.epoch == key.epoch - 1):
                self._free(key.request_id)
                holding = None
            if holding is None:
                # Older epochs are over: a late commit of theirs would not be of the tokens that were delivered.
                self._over.end(key.request_id, key.epoch - 1)
                found.append(Holding(key, 0, ()))
            elif holding.key == key:  # asked again; it may have gone on since
                found.append(holding)
            else:
                found.append(self._take_over(holding, key, most_tokens, renew))
        return found, self._serve()

    def _take_over(
        self, holding: Holding, key: RequestKey, most_tokens: int, renew: Callable[[bytes], bytes] | None
    ) -> Holding:
        kv_tokens = min(holding.kv_tokens, most_tokens)
        kept = holding.block_ids[: -(-kv_tokens // self._block_size)]
        try:
            payload = None
            if renew is not None and holding.payload is not None and kv_tokens == most_tokens:
                payload = self._keep(renew(self._table.payloads.read(holding.payload)))
            adopted = Holding(key, kv_tokens, kept, holding.checksums[: len(kept)], payload)
            self._write_holding(Held(adopted))
        except TransferError:  # no room to write it down: it is prefilled anew, and then replaces this
            return Holding(key, 0, ())
        self._replace(holding, adopted)
        self._blocks.release(holding.block_ids[len(kept) :], key.request_id)
        return adopted

    def _free(self, request_id: str) -> None:
        holding = self._holdings.pop(request_id)
        self._blocks.release_all(request_id)
        self._write_down(Released(request_id))
        if holding.payload is not None:
            self._table.payloads.free(holding.payload)

    def read(self, key: RequestKey) -> tuple[Holding, bytes] | None:
        """What the request holds, and the payload that came with it; None where it is not here, in just this epoch.

        Raises TransferError where the payload has been damaged.
        """
        holding = self._holdings.get(key.request_id)
        if holding is None or holding.key != key or holding.payload is None:
            return None
        return holding, self._table.payloads.read(holding.payload)

    def own_blocks(self, request_id: str) -> int:
        """Blocks that nobody but this request holds."""
        holding = self._holdings.get(request_id)
        return sum(self._blocks.holder_count(block) == 1 for block in holding.block_ids) if holding else 0

    def drop(self, copies: Iterable[tuple[RequestKey, int]]) -> list[Grant]:
        """Make room: free these requests' copies, where they still have as many tokens. A longer one came since."""
        for key, kv_tokens in copies:
            holding = self._holdings.get(key.request_id)
            if holding is not None and holding.key == key and holding.kv_tokens == kv_tokens:
                self._free(key.request_id)
        return self._serve()

    def waited_for(self) -> WriterKey | None:
        """The writer that is next in line for blocks; None where nobody waits."""
        return next(iter(self._wants), None)

    # ---- the fate of writers

    def writer_lost(self, writer: WriterKey) -> None:
        """Nobody knows whether it still writes: its leased blocks count as owned, and are nobody's. Idempotent.

        Raises TransferError for a writer that nobody can be.
        """
        check_writer(writer)
        self._wants.pop(writer, None)
        self._regranted.pop(writer, None)
        if writer in self._lost or (self._has_ended(writer) and writer not in self._writers):
            return
        self._lost[writer] = tuple(self._blocks.leased_to(writer))
        self._blocks.quarantine(writer)
        self._write_down(Lost(writer))

    def writer_dead(self, writer: WriterKey) -> list[Grant]:
        """It has ended for certain: what it leased is free. Idempotent."""
        self.writer_lost(writer)
        name = (writer.role, writer.id)
        self._ended[name] = max(writer.incarnation, self._ended.get(name, 0))
        if writer not in self._lost:
            return []
        del self._lost[writer]
        self._writers.pop(writer, None)
        self._blocks.end_quarantine(writer)
        self._write_down(Dead(writer))
        return self._serve()

    # ---- what there is

    def writers(self) -> list[WriterKey]:
        """Writers with a lease here, in line for one, or lost: whoever knows that one of them has ended must say so."""
        return list({**self._writers, **self._wants, **dict.fromkeys(self._lost)})

    def holding(self, request_id: str) -> Holding | None:
        return self._holdings.get(request_id)

    def inventory(self) -> list[Holding]:
        """Everything that is committed, oldest first."""
        return list(self._holdings.values())

    def counts(self) -> PoolCounts:
        return PoolCounts(
            capacity=self._blocks.capacity,
            free=self._blocks.free_blocks,
            owned=self._blocks.owned_blocks,
            cached=self._blocks.cached_blocks,
            leased=self._blocks.leased_blocks,
            requests=len(self._holdings),
            wanted=sum(self._wants.values()),
        )

    def check_integrity(self) -> None:
        """Recount everything, and read the table again. Raises AccountingError where it does not add up."""
        self._blocks.check_integrity()
        for request_id, holding in self._holdings.items():
            if sorted(self._blocks.blocks_of(request_id)) != sorted(holding.block_ids):
                raise AccountingError(f"{self.store_id}: {request_id} holds other blocks than it committed")
        if sum(len(holding.block_ids) for holding in self._holdings.values()) != sum(
            self._blocks.holder_count(block) for block in range(self._blocks.capacity)
        ):
            raise AccountingError(f"{self.store_id}: blocks are held by requests that have committed nothing")
        payloads = (held.payload for held in self._holdings.values() if held.payload is not None)
        if sum(len(payload.page_ids) for payload in payloads) != self._table.payloads.used_pages:
            raise AccountingError(f"{self.store_id}: pages are used for payloads that no request has")
        if self._table.state() != self._state():
            raise AccountingError(f"{self.store_id}: the allocation table says something else than the pool")

    # ---- rules

    def _has_ended(self, writer: WriterKey) -> bool:
        return writer.incarnation <= self._ended.get((writer.role, writer.id), -1)

    def _require_alive(self, writer: WriterKey) -> None:
        if writer in self._lost or self._has_ended(writer):
            raise StaleError(f"{self.store_id}: {writer} was declared lost: its leases are void")

    def _require_current(self, key: RequestKey, before: Holding | None) -> None:
        newest = max(self._over.newest(key.request_id) + 1, before.key.epoch if before else 0)
        if key.epoch < newest:
            raise StaleError(f"{self.store_id}: epoch {key.epoch} of {key.request_id} is over")

    def _require_sound(
        self, key: RequestKey, kv_tokens: int, block_ids: Sequence[int], checksums: Sequence[int]
    ) -> None:
        if not 0 < kv_tokens <= len(block_ids) * self._block_size or len(set(block_ids)) != len(block_ids):
            raise TransferError(
                f"{self.store_id}: {kv_tokens} tokens of {key.request_id} are not in {len(block_ids)} different blocks "
                f"of {self._block_size}",
                request_id=key.request_id,
            )
        if checksums and len(checksums) != len(block_ids):
            raise TransferError(
                f"{self.store_id}: {len(checksums)} checksums for {len(block_ids)} blocks of {key.request_id}",
                request_id=key.request_id,
            )

    def _sort_out(
        self, writer: WriterKey, key: RequestKey, block_ids: list[int], share_with: RequestKey | None
    ) -> tuple[list[int], list[int]]:
        """Those that are leased to the writer, and those that `share_with` holds. Raises TransferError for others."""
        base = self._holdings.get(share_with.request_id) if share_with else None
        sharable = set(base.block_ids) if base is not None and base.key == share_with else set()
        leased = set(self._blocks.leased_to(writer))
        wrong = [block for block in block_ids if block not in leased and block not in sharable]
        if wrong:
            raise TransferError(
                f"{self.store_id}: blocks {wrong[:8]} are neither leased to {writer} nor held by {key.request_id} or "
                "what it shares with: write it in full",
                request_id=key.request_id,
            )
        return [b for b in block_ids if b in leased], [b for b in block_ids if b not in leased]

    def _serve(self) -> list[Grant]:
        """Lease what is free to those that want it, first come first served."""
        grants = []
        for writer, count in list(self._wants.items()):
            kept_back = 0 if writer.role in RESERVE_ROLES else self._reserve_blocks
            room = min(count, self._blocks.available_blocks - kept_back)
            if room <= 0:
                continue
            block_ids = tuple(self._blocks.lease(room, writer))
            self._writers[writer] = None
            try:
                self._write_ahead(Leased(writer, block_ids))
            except TransferError:  # no room to write it down: as if there were no blocks
                self._blocks.return_lease(block_ids, writer)
                break
            grants.append(Grant(writer, block_ids))
            if room == count:
                del self._wants[writer]
            else:
                self._wants[writer] = count - room
        return grants

    # ---- the table

    def _keep(self, data: bytes) -> Payload | None:
        """Raises TransferError where there is no room."""
        payload = self._table.payloads.write(data)
        if payload is None:
            raise TransferError(f"{self.store_id}: there is no room for {len(data)} bytes of a stored request")
        return payload if data else None

    def _write_holding(self, record: Held) -> None:
        """`_write_ahead`; its payload is not kept where that raises."""
        try:
            self._write_ahead(record)
        except TransferError:
            if record.holding.payload is not None:
                self._table.payloads.free(record.holding.payload)
            raise

    def _replace(self, before: Holding | None, holding: Holding) -> None:
        """The new one is written down: what was stored with the old is not needed any more."""
        self._holdings[holding.key.request_id] = holding
        if before is not None and before.payload is not None:
            self._table.payloads.free(before.payload)

    def _write_ahead(self, record: Record) -> None:
        """Write down what is about to happen. Raises TransferError, and changes nothing, where the table is full."""
        if not self._table.append(record):
            self._table.rewrite(self._state(but=record).records())
            if not self._table.append(record):
                raise TransferError(f"{self.store_id}: the allocation table is full")

    def _write_down(self, record: Record) -> None:
        """Write down what has happened; it takes no more room than what was there before."""
        if not self._table.append(record, shrinks=True):
            self._table.rewrite(self._state().records())

    def _state(self, but: Record | None = None) -> PoolState:
        leases = {writer: set(self._blocks.leased_to(writer)) for writer in self._writers if writer not in self._lost}
        leases |= {writer: set(block_ids) for writer, block_ids in self._lost.items()}
        if isinstance(but, Leased):  # the allocator has it already, the table not yet
            leases[but.writer].difference_update(but.block_ids)
        return PoolState(
            dict(self._holdings), {writer: leased for writer, leased in leases.items() if leased}, set(self._lost)
        )

    def _succeed(self, state: PoolState) -> None:
        """Take over from a predecessor. Raises TransferError where its state is not one that a pool can be in."""
        blocks = self._blocks
        unclaimed = set(blocks.lease(blocks.capacity, _SUCCESSION))
        try:
            for request_id, holding in state.holdings.items():
                first = [block for block in holding.block_ids if block in unclaimed]
                unclaimed.difference_update(first)
                blocks.assign_leased(first, _SUCCESSION, request_id)
                blocks.retain(set(holding.block_ids).difference(first), request_id)
                self._holdings[request_id] = holding
            for writer, leased in state.leases.items():
                block_ids = sorted(leased)
                unclaimed.difference_update(block_ids)
                blocks.return_lease(block_ids, _SUCCESSION)
                if sorted(blocks.lease(len(block_ids), writer)) != block_ids:
                    raise AccountingError(f"{self.store_id}: the lease of {writer} could not be taken over")
                self._writers[writer] = None
            blocks.return_lease(sorted(unclaimed), _SUCCESSION)
        except (AccountingError, IndexError) as error:
            raise TransferError(f"{self.store_id}: the allocation table contradicts itself: {error}") from error
        for writer in state.lost:
            self._lost[writer] = tuple(blocks.leased_to(writer))
            blocks.quarantine(writer)
