"""The decisions of a shard: which request or writer has which block. It handles messages, never the KV itself.

    free ──want──► leased to a writer ──commit──► held by a request ──release──► free
                        │        ▲                     ▲     │
                        │        └── give back         └─────┘ a commit of the same request, a newer epoch's too
                        └─ writer lost ──► quarantined ──writer dead──► free

Every change is in the allocation table before another process learns of it. So the successor of a killed shard process
continues from the same state. That includes leases, because a writer may fill leased blocks while no process serves
the shard.
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

RESERVE_ROLES = frozenset({"decode", "write_back"})  # write_back: a prefill instance that empties its candidate buffers
_SUCCESSION = WriterKey("kv_pool", "succession", 0)


@dataclass(frozen=True, slots=True)
class Grant:
    """A reply to a writer: these blocks are leased to it."""

    writer: WriterKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Numbers of blocks: `capacity = free + owned + cached`. `requests` is the number of requests that hold blocks.

    Leased blocks count as free, quarantined blocks as owned. `wanted` blocks were asked for and are not granted yet.
    """

    capacity: int
    free: int
    owned: int
    cached: int
    leased: int
    requests: int
    wanted: int


class KvPool:
    """The blocks of one shard. For one thread; no method blocks.

    Methods that may free blocks return the grants to writers that were waiting for blocks. `reserve_blocks` are granted
    only to the roles in `RESERVE_ROLES`, for evictions and write-backs: prefills may not fill the shard completely.
    """

    def __init__(self, store_id: str, table: AllocationTable, block_size: int, *, reserve_blocks: int = 0) -> None:
        """Continue from the state that `table` found. Raises TransferError if that state contradicts itself."""
        self.store_id = store_id  # names the shard's memory in errors
        self._table = table  # a successor continues from it: written before a change is reported
        self._block_size = block_size  # tokens of a block
        self._reserve_blocks = reserve_blocks
        self._blocks = BlockAllocator(table.capacity_blocks, store_id)  # owners and leases of blocks
        self._holdings: dict[str, Holding] = {}  # committed KV by request id, until released
        self._lost: dict[WriterKey, tuple[int, ...]] = {}  # leases of lost writers, until they are known to be dead
        self._writers: dict[WriterKey, None] = {}  # writers that may have a lease
        self._wants: dict[WriterKey, int] = {}  # blocks still to lease, by writer, in the order of the first want
        self._regranted: dict[WriterKey, int] = {}  # blocks granted again at `hello`, until the writer's next want
        self._ended: dict[tuple[str, str], int] = {}  # newest incarnation known to be dead, by role and id
        self._over = OverEpochs()  # the newest epoch that has ended, by request id
        self._succeed(table.found)

    # ---- writers

    def hello(self, writer: WriterKey) -> list[Grant]:
        """A writer has opened a stream. Blocks leased over an earlier stream are granted again.

        They count towards its next `want`. Raises StaleError if the writer was declared lost or dead.
        """
        self._require_alive(writer)
        self._wants.pop(writer, None)
        block_ids = tuple(self._blocks.leased_to(writer))
        self._regranted[writer] = len(block_ids)
        return [Grant(writer, block_ids)] if block_ids else []

    def want(self, writer: WriterKey, count: int) -> list[Grant]:
        """Lease `count` more blocks to `writer` as soon as they are free. Raises like `hello`."""
        self._require_alive(writer)
        covered = min(count, self._regranted.pop(writer, 0))
        if count > covered:
            self._wants[writer] = self._wants.get(writer, 0) + count - covered
        return self._serve()

    def give_back(self, writer: WriterKey, block_ids: Sequence[int]) -> list[Grant]:
        """`writer` returns these blocks. Raises like `hello`, and AccountingError if they are not leased to it."""
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

        The request must hold the first `kept_blocks` of them already (a lease of the same ids does not count: their KV
        is gone). Each other block must be leased to `writer`, held by the request (in this or an older epoch), or held
        by `share_with`. Blocks that the request held and that are not listed lose a holder. `checksums`: one for each
        block, or none; only readers compare them. `payload`: stored for `read`. Idempotent.

        If it raises, nothing changes. Raises StaleError if the epoch is older than a known one or the writer is lost.
        Raises TransferError if a block is none of the above (the request must be written in full), if the numbers do
        not match, or if there is no room for the payload.
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
        """Free what these requests and their older epochs hold here. The blocks of a newer epoch stay."""
        for key in keys:
            self._over.end(key.request_id, key.epoch)
            holding = self._holdings.get(key.request_id)
            if holding is not None and holding.key.epoch <= key.epoch:
                self._free(key.request_id)
        return self._serve()

    def adopt(
        self, wanted: Iterable[tuple[RequestKey, int]], renew: Callable[[bytes], bytes] | None = None
    ) -> tuple[list[Holding], list[Grant]]:
        """Each request in `wanted` adopts the KV of its previous epoch, up to the given number of tokens.

        From then on no older epoch can change that KV. Returns the holding of each request, and grants. A holding has
        no blocks if there was no KV, or if a newer epoch has it. KV of an epoch before the previous one is freed: this
        shard knows nothing of the epoch between, which may have sampled other tokens. `renew` makes the payload for the
        new epoch. It is used only if the KV of no token is missing; else the request has no payload.
        """
        found = []
        for key, most_tokens in wanted:
            holding = self._holdings.get(key.request_id)
            if holding and (holding.key.epoch > key.epoch or self._over.newest(key.request_id) >= key.epoch):
                holding = None  # a newer epoch holds it, or the wanted epoch is over
            if holding and holding.key != key and not (most_tokens and holding.key.epoch == key.epoch - 1):
                self._free(key.request_id)
                holding = None
            if holding is None:
                # Older epochs are over: a late commit of an older epoch may not match the tokens that were delivered.
                self._over.end(key.request_id, key.epoch - 1)
                found.append(Holding(key, 0, ()))
            elif holding.key == key:  # adopted before; the request may have grown since
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
        except TransferError:  # no room for the record: prefilled again, and replaced then
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
        """The holding and the payload of a request; None if this shard does not have both in exactly this epoch.

        Raises TransferError if the payload is damaged.
        """
        holding = self._holdings.get(key.request_id)
        if holding is None or holding.key != key or holding.payload is None:
            return None
        return holding, self._table.payloads.read(holding.payload)

    def own_blocks(self, request_id: str) -> int:
        """The number of blocks that only this request holds."""
        holding = self._holdings.get(request_id)
        return sum(self._blocks.holder_count(block) == 1 for block in holding.block_ids) if holding else 0

    def drop(self, copies: Iterable[tuple[RequestKey, int]]) -> list[Grant]:
        """Make room: free the copies of these requests that have exactly the given number of tokens.

        A copy with more tokens was committed after the command was sent, and is kept.
        """
        for key, kv_tokens in copies:
            holding = self._holdings.get(key.request_id)
            if holding is not None and holding.key == key and holding.kv_tokens == kv_tokens:
                self._free(key.request_id)
        return self._serve()

    def waited_for(self) -> WriterKey | None:
        """The writer that gets free blocks next; None if no writer waits."""
        return next(iter(self._wants), None)

    # ---- the fate of writers

    def writer_lost(self, writer: WriterKey) -> None:
        """It is unknown whether `writer` still writes: quarantine its leased blocks, which then count as owned.

        Idempotent. Raises TransferError if `writer` is not a valid key (`check_writer`).
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
        """`writer` is known to have ended: free its leased blocks. Idempotent. Raises like `writer_lost`."""
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

    # ---- state

    def writers(self) -> list[WriterKey]:
        """Writers that have a lease, wait for blocks or are lost.

        The caller must report each of them that has ended (`writer_dead`).
        """
        return list({**self._writers, **self._wants, **dict.fromkeys(self._lost)})

    def holding(self, request_id: str) -> Holding | None:
        return self._holdings.get(request_id)

    def inventory(self) -> list[Holding]:
        """All committed holdings, oldest first."""
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
        """Recount all blocks and read the table again. Raises AccountingError if they do not match."""
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
            raise AccountingError(f"{self.store_id}: pages are in use that belong to no request's payload")
        if self._table.state() != self._state():
            raise AccountingError(f"{self.store_id}: the allocation table does not match the state of the pool")

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
        """Split `block_ids` into those leased to the writer and those that `share_with` holds.

        Raises TransferError if a block is neither.
        """
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
        """Lease free blocks to waiting writers, first come first served."""
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
            except TransferError:  # no room for the record: treated as if no block were free
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
