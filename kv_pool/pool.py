"""The decisions of a shard: which request or writer has which block. It handles messages, never the KV itself.

    free ──want──► leased to a writer ──commit──► held by a request ──release──► free, or cached if it is indexed
                        │        ▲                     ▲     │
                        │        └── give back         └─────┘ a commit of the same request, a newer epoch's too
                        ├─ writer lost ──► quarantined ──writer dead──► free
                        └─ cache ──► cached ──pin, commit of the same tokens──► held
                                        └─ want, and none is free ──► leased

Every change is in the allocation table before another process learns of it. So the successor of a killed shard process
continues from the same state. That includes leases, because a writer may fill leased blocks while no process serves
the shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from alignedserve.errors import StaleError, TransferError
from alignedserve.kv_pool.counts import Grant, PoolCounts
from alignedserve.kv_pool.entries import Ids
from alignedserve.kv_pool.epochs import OverEpochs
from alignedserve.kv_pool.prefix_index import PrefixIndex
from alignedserve.kv_pool.records import (
    Dead,
    Held,
    Holding,
    Leased,
    Lost,
    Returned,
    WriterKey,
    check_writer,
)
from alignedserve.kv_pool.shard_blocks import ShardBlocks
from alignedserve.kv_pool.table import AllocationTable
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.sessions import Note

RESERVE_ROLES = frozenset({"decode", "write_back"})  # write_back: a prefill instance that empties its candidate buffers


class KvPool(ShardBlocks):
    """The blocks of one shard. For one thread; no method blocks.

    Methods that may free blocks return the grants to writers that were waiting for blocks. `reserve_blocks` are granted
    only to the roles in `RESERVE_ROLES`, for evictions and write-backs: prefills may not fill the shard completely.
    Cached blocks count as room: they are evicted when no block is free.
    """

    def __init__(
        self,
        store_id: str,
        table: AllocationTable,
        block_size: int,
        *,
        reserve_blocks: int = 0,
        index: PrefixIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue from the state that `table` found. `index`: over the entries of `table`; None: nothing is cached.

        Raises TransferError if that state contradicts itself.
        """
        super().__init__(store_id, table, block_size, index, clock)
        self._reserve_blocks = reserve_blocks
        self._wants: dict[WriterKey, int] = {}  # blocks still to lease, by writer, in the order of the first want
        self._regranted: dict[WriterKey, int] = {}  # blocks granted again at `hello`, until the writer's next want
        self._ended: dict[tuple[str, str], int] = {}  # newest incarnation known to be dead, by role and id
        self._over = OverEpochs()  # the newest epoch that has ended, by request id

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

    def lease_now(self, writer: WriterKey, count: int, spared: Sequence[int]) -> list[int]:
        """Lease up to `count` blocks at once to a writer in this process: fewer if there is no room.

        The first blocks of a chain, `spared`, stay cached, and count as used now. The lease is not in the table,
        because it ends with this process. `cache` and `give_back` end it, too.
        """
        kept = [block for block in spared if self.cached_flags[block]]
        self._blocks.retain(kept, writer)
        room = self._blocks.available_blocks - self._reserve_blocks
        leased = self._blocks.lease(max(0, min(count, room)), writer)
        self._blocks.release(kept, writer)
        if self._cache is not None:
            self._cache.rest(spared)
        return leased

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
        token_ids: Sequence[int] = (),
        root: bytes = b"",
    ) -> list[Grant]:
        """From now on the request holds exactly `block_ids`, in order, with the KV of its first `kv_tokens` tokens.

        The request or `share_with` must hold the first `kept_blocks` of them already (a lease of the same ids does not
        count: their KV is gone). Each other block must be leased to `writer`, or held by the request (in this or an
        older epoch) or by `share_with`. Blocks that the request held and that are not listed lose a holder.
        `checksums`: one for each block, or none; only readers compare them. `payload`: stored for `read`. Idempotent.

        `token_ids`: the request's first tokens, whose full blocks are indexed under `root` (`prefix_chain.py`); none:
        no block is. If the shard has a block of the same tokens, the request holds that one, and the writer's block
        stays leased to the writer. So `holding(request_id)` has the final block ids and checksums.

        If it raises, nothing changes. Raises StaleError if the epoch is older than a known one or the writer is lost.
        Raises TransferError if a block is none of the above (the request must be written in full), if the numbers do
        not match, or if there is no room for the payload.
        """
        self._require_alive(writer)
        before = self._holdings.get(key.request_id)
        self._require_current(key, before)
        self._require_sound(key, kv_tokens, block_ids, checksums)
        own = set(before.block_ids) if before else set()
        base = self._holdings.get(share_with.request_id) if share_with else None
        sharable = set(base.block_ids) if base is not None and base.key == share_with else set()
        if not (own | sharable).issuperset(block_ids[:kept_blocks]):
            raise TransferError(
                f"{self.store_id}: the first {kept_blocks} blocks of {key.request_id} are no longer held: write it in "
                "full",
                request_id=key.request_id,
            )
        fresh, shared = self._sort_out(writer, key, [block for block in block_ids if block not in own], sharable)
        placed, joined = None, []
        if self._cache is not None:
            placed = self._cache.place(root, token_ids[:kv_tokens], block_ids, set(fresh), checksums)
            block_ids, checksums = placed.block_ids, placed.checksums
            theirs = own.union(shared)
            joined = [block for block in block_ids[: placed.known] if block not in theirs]
            used = set(block_ids)
            fresh = [block for block in fresh if block in used]
        holding = Holding(key, kv_tokens, tuple(block_ids), tuple(checksums), self._keep(payload))
        self._write_holding(Held(holding, writer))
        self._blocks.assign_leased(fresh, writer, key.request_id)
        self._blocks.retain([*shared, *joined], key.request_id)
        if placed is not None and self._cache is not None:
            self._cache.index_placed(placed, joined, key.request_id)
        if gone := own.difference(block_ids):
            self._blocks.release(gone, key.request_id)
            self._rest(before)
        self._replace(before, holding)
        return self._serve()

    def indexed(self, root: bytes, token_ids: Sequence[int]) -> list[int]:
        """The indexed ones of the first full blocks of these tokens. Nothing holds them: they may be gone soon."""
        return [] if self._cache is None else self._cache.match(root, token_ids, len(token_ids))

    def match(self, root: bytes, token_ids: Sequence[int]) -> int:
        """The number of blocks that are `indexed`."""
        return len(self.indexed(root, token_ids))

    def pin(
        self, key: RequestKey, root: bytes, token_ids: Sequence[int], most_tokens: int, used_tokens: int = 0
    ) -> tuple[Holding, list[Grant]]:
        """The request holds the indexed blocks of the longest prefix of `token_ids`, without the last token.

        At most the KV of `most_tokens` tokens. Of the first `used_tokens`, which it has held before, no use is counted.
        Like an adopted holding, it has no payload. If the request holds as much KV already in this epoch, or can be
        decoded from it, that is returned. A holding of an older epoch is replaced. No blocks: nothing is indexed, the
        epoch is over, or the table is full; then nothing has changed.
        """
        before = self._holdings.get(key.request_id)
        mine = before if before is not None and before.key == key else None
        newer = before is not None and before.key.epoch > key.epoch
        if self._cache is None or newer or self._over.newest(key.request_id) >= key.epoch:
            return mine or Holding(key, 0, ()), []
        most_blocks = min(most_tokens, len(token_ids) - 1) // self.block_size
        found, known = self._cache.find(root, token_ids, most_blocks, key.request_id)
        kv_tokens = len(found) * self.block_size
        if not found or (mine is not None and (mine.payload is not None or mine.kv_tokens >= kv_tokens)):
            return mine or Holding(key, 0, ()), []
        try:
            return self._hold_found(key, found, max(known, used_tokens // self.block_size))
        except TransferError:  # no room for the record
            return mine or Holding(key, 0, ()), []

    def unpin(self, key: RequestKey, kv_tokens: int | None = None) -> list[Grant]:
        """End a `pin`, if it has so many tokens; the request goes on. KV that it can be decoded from stays."""
        held = self._holdings.get(key.request_id)
        if held is None or held.payload is not None:
            return []
        return self.drop([(key, held.kv_tokens if kv_tokens is None else kv_tokens)])

    def keep(self, name: str, block_ids: Sequence[int], payload: bytes) -> tuple[Holding, list[Grant]]:
        """Hold these blocks, just `indexed`, under `name` until `let_go`, in place of what it held.

        `payload` says what it is, to `read` and to a successor. Raises TransferError, and changes nothing, if there is
        no room for the record or the payload.
        """
        return self._hold_found(RequestKey(name), block_ids, 0, payload)

    def is_found(self, name: str) -> bool:
        """Whether the index still has what `keep` holds. Not after a process without an index."""
        holding = self._holdings[name]
        return self._cache is not None and self._cache.index.linked(holding.block_ids) == len(holding.block_ids)

    def let_go(self, name: str) -> list[Grant]:
        """End what `keep` began; its blocks are cached again."""
        if name in self._holdings:
            self._free(name)
        return self._serve()

    def _hold_found(
        self, key: RequestKey, found: Sequence[int], known: int, payload: bytes = b""
    ) -> tuple[Holding, list[Grant]]:
        """The request holds exactly these indexed blocks, the first `known` of which its conversation has used before.

        Raises TransferError, and changes nothing, without room.
        """
        assert self._cache is not None
        before = self._holdings.get(key.request_id)
        checksums = self._cache.index.checksums(found)
        holding = Holding(key, len(found) * self.block_size, tuple(found), checksums, self._keep(payload))
        self._write_holding(Held(holding))
        own = before.block_ids if before is not None else ()
        joined = [block for block in found if block not in set(own)]
        self._blocks.retain(joined, key.request_id)
        self._cache.index.queue.use(found[known:] if not own else joined)
        if gone := set(own).difference(found):
            self._blocks.release(gone, key.request_id)
            self._rest(before)
        self._replace(before, holding)
        return holding, self._serve()

    def note_ending(self, request_id: str, note: Note) -> None:
        """The gateway of a request says how it ended; it may still be held."""
        if self._cache is not None:
            self._cache.note_ending(request_id, note)

    def cache(
        self,
        writer: WriterKey,
        root: bytes,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        first_block: int,
        checksums: Sequence[int] = (),
        request_id: str = "",
    ) -> tuple[list[int], list[Grant]]:
        """Leased blocks with the KV of `token_ids` from block number `first_block` on are cached, without a holder.

        Returns those that are cached now, and grants. The others stay leased to `writer`: the index has the same tokens
        already, or it lacks the blocks before them. `checksums`: one for each block, or none. `request_id`: of the
        request whose answer it is. Raises like `hello`.
        """
        self._require_alive(writer)
        if self._cache is None:
            return [], []
        leased = self._blocks.leased_to(writer)
        new = self._cache.continuation(root, token_ids, block_ids, first_block, leased)
        if new.block_ids:
            self._cache.blocks.cache_leased(new.block_ids, writer)
            self._write_down(Returned(writer, tuple(new.block_ids)))
            begin = len(new.found) - first_block
            self._cache.add_cached(new, checksums[begin : begin + len(new.block_ids)], request_id)
        there = [block for block, known in zip(block_ids, new.found[first_block:], strict=False) if block == known]
        return [*there, *new.block_ids], self._serve()

    def begun_by(self, root: bytes, token_ids: Sequence[int]) -> Ids:
        """The blocks for `remove` to drop a prefix (`PrefixIndex.begun_by`)."""
        return np.empty(0, np.int32) if self._cache is None else self._cache.index.begun_by(root, token_ids)

    def remove(self, block_ids: Sequence[int], spared: Collection[int] = ()) -> tuple[int, list[Grant]]:
        """Remove these blocks (`begun_by`) from the index, in their order. Returns how many there were, and grants.

        Those of `spared`, which has whole prefixes, stay. Cached blocks are free then, and held ones once they are
        released.
        """
        return (0, []) if self._cache is None else (self._cache.remove(block_ids, spared), self._serve())

    def release(self, keys: Iterable[RequestKey]) -> list[Grant]:
        """Free what these requests and their older epochs hold here. The blocks of a newer epoch stay."""
        for key in keys:
            self._over.end(key.request_id, key.epoch)
            holding = self._holdings.get(key.request_id)
            if holding is not None and holding.key.epoch <= key.epoch:
                self._free(key.request_id, ended=True)
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
        kept = holding.block_ids[: -(-kv_tokens // self.block_size)]
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
        self._rest(holding)
        return adopted

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
        if writer in self._lost or (self._has_ended(writer) and not self._blocks.leased_to(writer)):
            return
        self._lost[writer] = tuple(self._blocks.leased_to(writer))
        self._blocks.quarantine(writer)
        self._write_down(Lost(writer))

    def writer_dead(self, writer: WriterKey) -> list[Grant]:
        """`writer` is known to have ended: free its leased blocks. Idempotent. Raises like `writer_lost`."""
        self.writer_lost(writer)
        name = (writer.role, writer.id)
        self._ended[name] = max(writer.incarnation, self._ended.get(name, 0))
        self._writers.pop(writer, None)
        if writer not in self._lost:
            return []
        del self._lost[writer]
        self._blocks.end_quarantine(writer)
        self._write_down(Dead(writer))
        return self._serve()

    # ---- state

    @property
    def cached_flags(self) -> bytearray:
        """A flag for each block: whether it is cached. Empty without an index."""
        return self._cache.blocks.cached if self._cache is not None else bytearray()

    def writers(self) -> list[WriterKey]:
        """Writers that have a lease, wait for blocks or are lost.

        The caller must report each of them that has ended (`writer_dead`).
        """
        return list({**self._writers, **self._wants, **dict.fromkeys(self._lost)})

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
        if not 0 < kv_tokens <= len(block_ids) * self.block_size or len(set(block_ids)) != len(block_ids):
            raise TransferError(
                f"{self.store_id}: {kv_tokens} tokens of {key.request_id} are not in {len(block_ids)} different blocks "
                f"of {self.block_size}",
                request_id=key.request_id,
            )
        if checksums and len(checksums) != len(block_ids):
            raise TransferError(
                f"{self.store_id}: {len(checksums)} checksums for {len(block_ids)} blocks of {key.request_id}",
                request_id=key.request_id,
            )

    def _sort_out(
        self, writer: WriterKey, key: RequestKey, block_ids: list[int], sharable: Collection[int]
    ) -> tuple[list[int], list[int]]:
        """Split `block_ids` into those leased to the writer and the `sharable` ones.

        Raises TransferError if a block is neither.
        """
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
