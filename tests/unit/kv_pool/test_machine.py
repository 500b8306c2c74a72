"""The KV pool beside a model: leases, commits, epochs, sharing, lost writers and dead pool processes in any order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from alignedserve.errors import AccountingError, StaleError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.payloads import PAGE_BYTES, payload_pages
from alignedserve.kv_pool.pool import RESERVE_ROLES, Grant, KvPool
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.table import HEADER_BYTES, SPARE_BYTES, AllocationTable
from alignedserve.request import RequestKey
from support.machines import machine_settings

GEOMETRY = KvGeometry("random", "float32", 2, 2, 8, 4)
CAPACITY = 14
REGION = SPARE_BYTES + 2048  # the journal is rewritten every few dozen records

WRITERS = st.builds(WriterKey, st.sampled_from(("prefill", "decode")), st.just("w"), st.integers(1, 2))
KEYS = st.builds(RequestKey, st.sampled_from("abc"), st.integers(0, 2))
COUNTS = st.integers(0, 6)


@dataclass
class Holding:
    epoch: int
    kv_tokens: int
    blocks: tuple[int, ...]
    payload: bytes | None  # None: the request cannot be continued from it


class PoolMachine(RuleBasedStateMachine):
    """`lost`: leases in quarantine. `released` and `ended`: known to a pool process, but not to its successor."""

    @initialize(reserve=st.integers(0, 4))
    def start(self, reserve: int) -> None:
        self.memory = memoryview(bytearray(HEADER_BYTES + 2 * REGION + payload_pages(CAPACITY) * PAGE_BYTES))
        self.reserve = reserve
        self.holdings: dict[str, Holding] = {}
        self.leases: dict[WriterKey, set[int]] = {}
        self.lost: dict[WriterKey, set[int]] = {}
        self.open_pool()

    def open_pool(self) -> None:
        table = AllocationTable(self.memory, GEOMETRY, CAPACITY, region=REGION)
        self.pool = KvPool("pool", table, GEOMETRY.block_size, reserve_blocks=self.reserve)
        self.wants: dict[WriterKey, int] = {}
        self.regranted: dict[WriterKey, int] = {}
        self.released: dict[str, int] = {}
        self.ended: dict[tuple[str, str], int] = {}

    def free(self) -> set[int]:
        held = {block for holding in self.holdings.values() for block in holding.blocks}
        set_aside = [*self.leases.values(), *self.lost.values()]
        return set(range(CAPACITY)) - held - {block for blocks in set_aside for block in blocks}

    def void(self, writer: WriterKey) -> bool:
        """Whether messages of the writer are refused, because it was declared lost or dead."""
        return writer in self.lost or writer.incarnation <= self.ended.get((writer.role, writer.id), -1)

    def take(self, grants: list[Grant]) -> None:
        """Apply grants: they contain free blocks, for writers that wait, within their limits."""
        for grant in grants:
            kept_back = 0 if grant.writer.role in RESERVE_ROLES else self.reserve
            free = self.free()
            assert free.issuperset(grant.block_ids)
            assert len(set(grant.block_ids)) == len(grant.block_ids) <= len(free) - kept_back
            self.wants[grant.writer] -= len(grant.block_ids)
            assert self.wants[grant.writer] >= 0
            self.leases.setdefault(grant.writer, set()).update(grant.block_ids)
        self.wants = {writer: count for writer, count in self.wants.items() if count}
        for writer in self.wants:  # no writer waits while blocks are free for it
            assert len(self.free()) <= (0 if writer.role in RESERVE_ROLES else self.reserve)

    # writers

    @rule(writer=WRITERS)
    def hello(self, writer: WriterKey) -> None:
        if self.void(writer):
            with pytest.raises(StaleError):
                self.pool.hello(writer)
            return
        self.wants.pop(writer, None)
        leased = self.leases.get(writer, set())
        grants = self.pool.hello(writer)
        assert [set(grant.block_ids) for grant in grants] == ([leased] if leased else [])
        self.regranted[writer] = len(leased)

    @rule(writer=WRITERS, count=COUNTS)
    def want(self, writer: WriterKey, count: int) -> None:
        if self.void(writer):
            with pytest.raises(StaleError):
                self.pool.want(writer, count)
            return
        count_more = max(0, count - self.regranted.pop(writer, 0))
        self.wants[writer] = self.wants.get(writer, 0) + count_more
        self.take(self.pool.want(writer, count))

    @rule(writer=WRITERS, count=COUNTS, stranger=st.booleans())
    def give_back(self, writer: WriterKey, count: int, *, stranger: bool) -> None:
        leased = self.leases.get(writer, set())
        blocks = sorted(leased)[:count]
        if stranger:
            blocks = [*blocks, next(block for block in range(CAPACITY + 1) if block not in leased)]
        if self.void(writer) or stranger:
            with pytest.raises(StaleError if self.void(writer) else AccountingError):
                self.pool.give_back(writer, blocks)
            return
        leased.difference_update(blocks)
        self.take(self.pool.give_back(writer, blocks))

    @rule(
        writer=WRITERS,
        key=KEYS,
        fresh=COUNTS,
        kept=COUNTS,
        share=st.none() | KEYS,
        shared=COUNTS,
        missing_tokens=st.integers(-2, 3),
        payload=st.sampled_from((b"", b"p", b"q" * 3000)),
        claim=st.booleans(),
    )
    def commit(
        self,
        writer: WriterKey,
        key: RequestKey,
        fresh: int,
        kept: int,
        share: RequestKey | None,
        shared: int,
        missing_tokens: int,
        payload: bytes,
        *,
        claim: bool,
    ) -> None:
        """Commit the request's own, shared and leased blocks; `claim`: state how many of its own blocks it keeps."""
        before = self.holdings.get(key.request_id)
        own = () if before is None else before.blocks
        base = self.holdings.get(share.request_id) if share is not None else None
        theirs = () if base is None else base.blocks
        blocks = [*own[:kept], *(block for block in theirs[:shared] if block not in own)]
        blocks += [block for block in sorted(self.leases.get(writer, ()))[:fresh] if block not in blocks]
        tokens = len(blocks) * GEOMETRY.block_size - missing_tokens
        kept_blocks = kept if claim else 0

        sharable = set(theirs) if base is not None and share is not None and base.epoch == share.epoch else set()
        allowed = {*own, *sharable, *self.leases.get(writer, ())}
        newest = max(self.released.get(key.request_id, -1) + 1, before.epoch if before else 0)
        expected: type[Exception] | None = None
        if self.void(writer) or key.epoch < newest:
            expected = StaleError
        elif (
            not 0 < tokens <= len(blocks) * GEOMETRY.block_size
            or not sharable.union(own).issuperset(blocks[:kept_blocks])
            or not allowed.issuperset(blocks)
        ):
            expected = TransferError
        if expected is not None:
            with pytest.raises(expected):
                self.pool.commit(writer, key, tokens, blocks, share, kept_blocks, payload=payload)
            return
        grants = self.pool.commit(writer, key, tokens, blocks, share, kept_blocks, payload=payload)
        self.leases.get(writer, set()).difference_update(blocks)
        self.holdings[key.request_id] = Holding(key.epoch, tokens, tuple(blocks), payload or None)
        self.take(grants)

    @rule(key=KEYS)
    def release(self, key: RequestKey) -> None:
        self.released[key.request_id] = max(key.epoch, self.released.get(key.request_id, 0))
        holding = self.holdings.get(key.request_id)
        if holding is not None and holding.epoch <= key.epoch:
            del self.holdings[key.request_id]
        self.take(self.pool.release([key]))

    @rule(key=KEYS, most_tokens=st.integers(1, 30))
    def adopt(self, key: RequestKey, most_tokens: int) -> None:
        """An epoch adopts at most `most_tokens` from the previous epoch, and nothing from older ones."""
        before = self.holdings.get(key.request_id)
        (found,), grants = self.pool.adopt([(key, most_tokens)], lambda payload: payload + b"n")
        if before is None or before.epoch > key.epoch or self.released.get(key.request_id, -1) >= key.epoch:
            assert (found.kv_tokens, found.block_ids) == (0, ())
            self.released[key.request_id] = max(key.epoch - 1, self.released.get(key.request_id, -1))
        elif before.epoch < key.epoch - 1:
            assert (found.kv_tokens, found.block_ids) == (0, ())
            self.released[key.request_id] = max(key.epoch - 1, self.released.get(key.request_id, -1))
            del self.holdings[key.request_id]
        elif before.epoch == key.epoch:
            assert (found.kv_tokens, found.block_ids) == (before.kv_tokens, before.blocks)
        else:
            tokens = min(before.kv_tokens, most_tokens)
            kept = before.blocks[: -(-tokens // GEOMETRY.block_size)]
            assert (found.kv_tokens, found.block_ids) == (tokens, kept)
            whole = before.payload is not None and tokens == most_tokens
            payload = before.payload + b"n" if before.payload is not None and whole else None
            self.holdings[key.request_id] = Holding(key.epoch, tokens, kept, payload)
        self.take(grants)

    @rule(key=KEYS, right=st.booleans())
    def drop(self, key: RequestKey, *, right: bool) -> None:
        holding = self.holdings.get(key.request_id)
        tokens = holding.kv_tokens if holding is not None and right else 1000
        if holding is not None and right and holding.epoch == key.epoch:
            del self.holdings[key.request_id]
        self.take(self.pool.drop([(key, tokens)]))

    # fates

    @rule(writer=WRITERS)
    def writer_lost(self, writer: WriterKey) -> None:
        self.pool.writer_lost(writer)
        if writer not in self.lost and (not self.void(writer) or self.leases.get(writer)):
            self.lost[writer] = self.leases.pop(writer, set())
        self.wants.pop(writer, None)
        self.regranted.pop(writer, None)

    @rule(writer=WRITERS)
    def writer_dead(self, writer: WriterKey) -> None:
        grants = self.pool.writer_dead(writer)
        name = writer.role, writer.id
        self.ended[name] = max(writer.incarnation, self.ended.get(name, 0))
        self.lost.pop(writer, None)
        self.leases.pop(writer, None)
        self.wants.pop(writer, None)
        self.regranted.pop(writer, None)
        self.take(grants)

    @rule()
    def succeed(self) -> None:
        """The pool's process is killed; its successor reads the table."""
        self.open_pool()

    # what must hold

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        counts = self.pool.counts()
        leased = sum(map(len, self.leases.values()))
        assert counts.free == len(self.free()) + leased
        assert counts.leased == leased
        assert counts.free + counts.owned + counts.cached == CAPACITY
        assert counts.wanted == sum(self.wants.values())
        held = {held.key.request_id: held for held in self.pool.inventory()}
        found = {}
        for name, holding in held.items():
            read = self.pool.read(holding.key)
            payload = read[1] if read is not None else None
            found[name] = Holding(holding.key.epoch, holding.kv_tokens, holding.block_ids, payload)
        assert found == self.holdings
        writers = {writer for writer, blocks in {**self.leases, **self.lost}.items() if blocks}
        assert (writers | self.wants.keys()) <= set(self.pool.writers())  # deaths of these must be reported

    def teardown(self) -> None:
        """All requests end and all writers die: everything is free."""
        if not hasattr(self, "pool"):
            return
        for request_id in "abc":
            self.pool.release([RequestKey(request_id, 2)])
        for writer in self.pool.writers():
            self.pool.writer_dead(writer)
        assert not self.pool.writers()
        counts = self.pool.counts()
        assert (counts.free, counts.leased, counts.requests) == (CAPACITY, 0, 0)
        self.pool.check_integrity()


TestPool = PoolMachine.TestCase
TestPool.settings = machine_settings(60, 40)


def test_a_writer_that_holds_nothing_and_whose_successor_is_dead_is_not_lost() -> None:
    first, second = (WriterKey("prefill", "w", incarnation) for incarnation in (1, 2))
    state = PoolMachine()
    state.start(reserve=0)
    state.want(first, 1)
    state.commit(first, RequestKey("a"), 1, 0, None, 0, 0, b"", claim=False)
    state.writer_dead(second)
    state.writer_lost(first)
    state.adds_up()
    state.succeed()
    state.hello(first)  # the new process knows of no death
    state.adds_up()
    state.teardown()
