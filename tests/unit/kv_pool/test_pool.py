"""The KV pool's rules: leases, commits, epochs and lost writers, and what its successor knows."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from alignedserve.errors import AccountingError, AlignedServeError, StaleError, TransferError
from alignedserve.kv_pool.pool import Grant, KvPool
from alignedserve.kv_pool.records import PoolState, Record, WriterKey
from alignedserve.kv_pool.table import SPARE_BYTES, AllocationTable, table_bytes
from alignedserve.request import RequestKey
from alignedserve.transfer.block_store import HostBlockStore, attach_store
from alignedserve.transfer.handles import StoreHandle
from alignedserve.transfer.segments import SegmentClient, SegmentServer
from support.kv_pool import CAPACITY, DECODE, GEOMETRY, OTHER, PREFILL, leased, open_pool

A, B = RequestKey("a"), RequestKey("b")
spawn = multiprocessing.get_context("spawn")


def test_leased_blocks_become_a_requests_and_free_again(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 5)
    assert (pool.counts().free, pool.counts().leased, pool.counts().owned) == (20, 5, 0)
    pool.commit(PREFILL, A, 11, blocks[:3])
    assert (pool.counts().free, pool.counts().leased, pool.counts().owned) == (17, 2, 3)
    assert [(h.key, h.kv_tokens, list(h.block_ids)) for h in pool.inventory()] == [(A, 11, blocks[:3])]
    pool.give_back(PREFILL, blocks[3:])
    pool.release([A])
    assert (pool.counts().free, pool.counts().leased, pool.counts().requests) == (20, 0, 0)


def test_a_commit_of_blocks_that_are_not_the_writers_changes_nothing(pool: KvPool) -> None:
    mine, theirs = leased(pool, PREFILL, 3), leased(pool, OTHER, 3)
    pool.commit(PREFILL, A, 4, mine[:1])
    before = pool.inventory(), pool.counts()
    for key, tokens, block_ids, message in (
        (A, 8, [mine[0], theirs[0]], "neither leased"),  # another writer's
        (B, 8, [mine[0], mine[1]], "neither leased"),  # another request's
        (A, 8, [mine[0], 19], "neither leased"),  # held and leased by none
        (A, 8, [mine[0], 99], "neither leased"),  # no block
        (A, 9, mine[:2], "not in 2 different blocks"),  # too few
        (A, 8, [mine[1], mine[1]], "different blocks"),
        (A, 0, [], "not in 0 different blocks"),
    ):
        with pytest.raises(TransferError, match=message):
            pool.commit(PREFILL, key, tokens, block_ids)
    assert (pool.inventory(), pool.counts()) == before


def test_a_new_commit_replaces_the_old_one_and_frees_what_it_leaves_out(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 3)
    pool.commit(PREFILL, A, 10, blocks)
    more = leased(pool, DECODE, 2)
    pool.commit(DECODE, A, 14, [*blocks[:2], *more])  # the last, partly filled block was rewritten
    assert pool.counts().owned == 4
    assert pool.holding("a").block_ids == (*blocks[:2], *more)  # type: ignore[union-attr]
    pool.commit(DECODE, A, 14, [*blocks[:2], *more])  # said twice
    assert pool.counts().owned == 4
    with pytest.raises(TransferError, match="in full"):
        pool.commit(DECODE, A, 12, blocks)  # the third is gone


def test_requests_of_a_group_share_blocks_until_the_last_lets_go(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 4)
    pool.commit(PREFILL, A, 12, blocks[:3])
    pool.commit(PREFILL, B, 12, [*blocks[:2], blocks[3]], share_with=A)
    assert pool.counts().owned == 4
    pool.release([A])
    assert pool.counts().owned == 3
    with pytest.raises(TransferError, match="in full"):
        pool.commit(PREFILL, RequestKey("c"), 8, blocks[:2], share_with=A)  # A holds nothing any more
    with pytest.raises(TransferError, match="in full"):
        pool.commit(PREFILL, RequestKey("c"), 8, blocks[:2], share_with=RequestKey("b", 1))  # not that epoch
    pool.release([B])
    assert pool.counts().free == 20


def test_a_new_epoch_adopts_the_blocks_of_the_old_one_in_one_step(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 3)
    pool.commit(PREFILL, A, 12, blocks)
    fresh = leased(pool, OTHER, 1)
    pool.commit(OTHER, RequestKey("a", 1), 10, [*blocks[:2], *fresh])
    assert pool.counts().owned == 3
    with pytest.raises(StaleError, match="epoch 0 of a is over"):
        pool.commit(PREFILL, A, 12, blocks)
    pool.release([A])  # of the old epoch, late
    assert pool.holding("a") is not None
    pool.release([RequestKey("a", 1)])
    with pytest.raises(StaleError, match="epoch 0 of a is over"):
        pool.commit(PREFILL, A, 4, leased(pool, PREFILL, 1))
    with pytest.raises(StaleError, match="epoch 1 of a is over"):
        pool.commit(OTHER, RequestKey("a", 1), 4, leased(pool, OTHER, 1))  # released: it would never be freed
    pool.commit(OTHER, RequestKey("a", 2), 4, leased(pool, OTHER, 1))


def test_a_copy_that_has_grown_since_is_not_dropped(pool: KvPool) -> None:
    pool.commit(PREFILL, A, 4, leased(pool, PREFILL, 1))
    pool.commit(OTHER, A, 8, leased(pool, OTHER, 2))  # evicted meanwhile: now the only copy

    pool.drop([(A, 4), (RequestKey("a", 1), 8)])

    holding = pool.holding("a")
    assert holding is not None
    assert holding.kv_tokens == 8
    pool.drop([(A, 8)])
    assert pool.holding("a") is None
    pool.commit(OTHER, A, 4, leased(pool, OTHER, 1))  # a request whose copy was dropped may return
    pool.check_integrity()


def test_kept_blocks_must_be_held_and_not_merely_leased_again(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 3)
    pool.commit(PREFILL, A, 12, blocks)
    pool.drop([(A, 12)])
    again = leased(pool, OTHER, 20)
    assert set(blocks) <= set(again)

    with pytest.raises(TransferError, match="in full"):
        pool.commit(OTHER, A, 13, [*blocks, next(b for b in again if b not in blocks)], kept_blocks=3)

    assert pool.holding("a") is None
    pool.check_integrity()


def test_unmet_wants_are_served_in_turn_as_blocks_become_free(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 18)
    assert [len(grant.block_ids) for grant in pool.want(OTHER, 5)] == [2]
    assert pool.want(DECODE, 2) == []
    assert pool.counts().wanted == 5
    assert [(g.writer, len(g.block_ids)) for g in pool.give_back(PREFILL, blocks[:2])] == [(OTHER, 2)]
    pool.commit(PREFILL, A, 8, blocks[2:4])
    assert [(g.writer, len(g.block_ids)) for g in pool.release([A])] == [(OTHER, 1), (DECODE, 1)]
    assert [(g.writer, len(g.block_ids)) for g in pool.give_back(PREFILL, blocks[4:6])] == [(DECODE, 1)]
    assert pool.counts().wanted == 0


def test_the_reserve_is_for_decode_workers(memory: memoryview) -> None:
    pool = open_pool(memory, reserve=4)
    assert [len(grant.block_ids) for grant in pool.want(PREFILL, 20)] == [16]
    assert [len(grant.block_ids) for grant in pool.want(DECODE, 3)] == [3]
    assert pool.counts().wanted == 4
    pool.check_integrity()


def test_the_leases_of_a_lost_writer_are_quarantined_until_it_is_dead(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 18)
    pool.commit(PREFILL, A, 8, blocks[:2])
    pool.want(PREFILL, 10)
    assert pool.want(DECODE, 5) == []
    pool.writer_lost(PREFILL)
    pool.writer_lost(PREFILL)
    assert (pool.counts().owned, pool.counts().leased) == (20, 0)
    assert pool.counts().wanted == 5  # the lost writer's want is forgotten
    for action in (
        lambda: pool.commit(PREFILL, B, 4, blocks[2:3]),
        lambda: pool.give_back(PREFILL, blocks[2:3]),
        lambda: pool.want(PREFILL, 1),
        lambda: pool.hello(PREFILL),
    ):
        with pytest.raises(StaleError, match="declared lost"):
            action()
    assert [(g.writer, len(g.block_ids)) for g in pool.writer_dead(PREFILL)] == [(DECODE, 5)]
    assert pool.holding("a") is not None  # what it committed is the request's
    assert pool.writer_dead(PREFILL) == []
    with pytest.raises(StaleError):
        pool.want(PREFILL, 1)
    leased(pool, WriterKey("prefill", "prefill-0", 6), 1)  # its next incarnation


def test_writers_that_die_out_of_order_free_what_they_leased(pool: KvPool) -> None:
    younger = WriterKey("prefill", "prefill-0", 6)
    leased(pool, PREFILL, 3)
    leased(pool, younger, 3)
    pool.writer_dead(younger)
    assert pool.counts().leased == 3
    pool.writer_dead(PREFILL)
    assert (pool.counts().leased, pool.counts().free) == (0, 20)


def test_giving_back_what_is_not_leased_is_refused(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 2)
    for wrong in ([blocks[0], 19], [blocks[0], blocks[0]]):
        with pytest.raises(AccountingError):
            pool.give_back(PREFILL, wrong)
    assert pool.counts().leased == 2


def test_a_writer_that_returns_gets_its_lease_again_against_its_next_want(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 4)
    assert pool.hello(PREFILL) == [Grant(PREFILL, tuple(blocks))]
    assert [len(grant.block_ids) for grant in pool.want(PREFILL, 6)] == [2]
    assert [len(grant.block_ids) for grant in pool.want(PREFILL, 6)] == [6]
    assert pool.hello(DECODE) == []


def test_checksums_are_kept_for_readers_and_by_a_successor(pool: KvPool, memory: memoryview) -> None:
    blocks = leased(pool, PREFILL, 3)
    with pytest.raises(TransferError, match="1 checksums for 2 blocks"):
        pool.commit(PREFILL, A, 8, blocks[:2], checksums=[7])
    assert not pool.inventory()
    pool.commit(PREFILL, A, 8, blocks[:2], checksums=[7, 2**64 - 1])
    pool.commit(PREFILL, A, 11, blocks, kept_blocks=2, checksums=[7, 2**64 - 1, 0])
    (holding,) = open_pool(memory).inventory()
    assert (holding.block_ids, holding.checksums) == (tuple(blocks), (7, 2**64 - 1, 0))


def test_a_successor_holds_what_its_predecessor_did(memory: memoryview) -> None:
    pool = open_pool(memory)
    blocks, theirs = leased(pool, PREFILL, 8), leased(pool, OTHER, 3)
    pool.commit(PREFILL, A, 11, blocks[2:5])
    pool.commit(PREFILL, B, 12, [blocks[3], blocks[2], blocks[0]], share_with=A)
    pool.writer_lost(OTHER)
    successor = open_pool(memory)
    successor.check_integrity()
    assert successor.inventory() == pool.inventory()
    assert successor.counts() == pool.counts()
    assert set(successor.writers()) == {PREFILL, OTHER}
    (grant,) = successor.hello(PREFILL)
    assert sorted(grant.block_ids) == sorted({*blocks} - {*blocks[2:5], blocks[0]})
    with pytest.raises(StaleError):
        successor.commit(OTHER, RequestKey("c"), 4, theirs[:1])
    successor.commit(PREFILL, RequestKey("a", 1), 8, blocks[2:4])
    successor.release([RequestKey("a", 1), B])
    successor.writer_dead(OTHER)
    successor.writer_dead(PREFILL)
    assert successor.counts().free == CAPACITY
    successor.check_integrity()


def test_a_full_table_refuses_commits_and_leases_and_recovers(memory: memoryview) -> None:
    pool = open_pool(memory, region=SPARE_BYTES + 800)
    blocks = leased(pool, PREFILL, 3)
    pool.commit(PREFILL, A, 12, blocks)
    taken: list[RequestKey] = []

    def share_until_refused() -> None:
        for number in range(100):
            key = RequestKey(f"request-{number}")
            pool.commit(PREFILL, key, 12, blocks, share_with=A)
            taken.append(key)

    with pytest.raises(TransferError, match="table is full"):
        share_until_refused()
    assert len(pool.inventory()) == len(taken) + 1 > 5
    pool.check_integrity()
    wordy = WriterKey("decode", "d" * 600, 1)
    assert pool.want(wordy, 5) == []
    assert pool.counts().leased == 0
    (grant,) = pool.release(taken)
    assert (grant.writer, len(grant.block_ids)) == (wordy, 5)
    pool.check_integrity()
    assert open_pool(memory, region=SPARE_BYTES + 800).counts() == pool.counts()


class Traffic:
    """Random use of a pool: the same steps for the same seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.writers = [PREFILL, OTHER, DECODE]
        self.at_hand: dict[WriterKey, list[int]] = {}
        self.lost: list[WriterKey] = []
        self.refused = 0
        self.keys = 0

    def step(self, pool: KvPool) -> None:
        writer = self.draw.choice(self.writers)
        action = self.draw.choices(
            ["want", "give", "commit", "bad", "release", "fail", "hello"], [20, 5, 40, 8, 25, 2, 2]
        )[0]
        hand = self.at_hand.setdefault(writer, [])
        grants: list[Grant] = []
        try:
            if action == "want" and len(hand) < 4:
                grants = pool.want(writer, self.draw.randint(1, 6))
            elif action == "give" and hand:
                grants = pool.give_back(writer, [hand.pop()])
            elif action == "commit":
                grants = self.commit(pool, writer, hand)
            elif action == "bad":
                pool.commit(writer, self.key(), 4, self.draw.sample(range(CAPACITY), 1), self.key())
                raise AssertionError  # replaced below if the call happened to be allowed
            elif action == "release":
                grants = pool.release([self.key()])
            elif action == "fail":
                grants = self.fail(pool, writer)
            elif action == "hello":
                hand.clear()
                grants = pool.hello(writer)
        except (AlignedServeError, AssertionError):
            self.refused += 1
            self.resynchronise(pool)
        for grant in grants:
            self.at_hand.setdefault(grant.writer, []).extend(grant.block_ids)

    def key(self) -> RequestKey:
        self.keys += 1  # epochs grow: a released epoch does not return
        return RequestKey(f"r{self.draw.randrange(6)}", self.keys // 12 + self.draw.choice([0, 0, 0, 1, 2]))

    def commit(self, pool: KvPool, writer: WriterKey, hand: list[int]) -> list[Grant]:
        key = self.key()
        before, share = pool.holding(key.request_id), self.draw.choice([None, *pool.inventory()])
        block_ids = list(before.block_ids[: self.draw.randint(0, 4)]) if before else []
        if share is not None:
            block_ids += [block for block in share.block_ids[:2] if block not in block_ids]
        fresh = hand[: self.draw.randint(0, 2)]
        block_ids += fresh
        grants = pool.commit(
            writer, key, self.draw.randint(1, 4 * len(block_ids) or 1), block_ids, share.key if share else None
        )
        del hand[: len(fresh)]
        return grants

    def fail(self, pool: KvPool, writer: WriterKey) -> list[Grant]:
        self.writers[self.writers.index(writer)] = WriterKey(writer.role, writer.id, writer.incarnation + 1)
        self.at_hand.pop(writer, None)
        self.lost.append(writer)
        pool.writer_lost(writer)
        self.draw.shuffle(self.lost)
        return pool.writer_dead(self.lost.pop()) if self.draw.random() < 0.7 else []

    def resynchronise(self, pool: KvPool) -> None:
        """A commit with guessed blocks may have used some at hand."""
        held = {block for holding in pool.inventory() for block in holding.block_ids}
        for hand in self.at_hand.values():
            hand[:] = [block for block in hand if block not in held]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_blocks_add_up_and_a_successor_agrees(memory: memoryview, seed: int) -> None:
    region = SPARE_BYTES + 3000  # small: rewritten every few dozen steps
    pool, traffic = open_pool(memory, reserve=2, region=region), Traffic(seed)
    for turn in range(600):
        traffic.step(pool)
        counts = pool.counts()
        assert counts.capacity == counts.free + counts.owned + counts.cached
        if turn % 10 == 0:
            pool.check_integrity()
            successor = open_pool(memory, reserve=2, region=region)
            successor.check_integrity()
            assert successor.counts().owned == counts.owned
    assert pool.counts().requests > 0
    pool.release([RequestKey(f"r{number}", 10**6) for number in range(6)])
    for writer in [*traffic.writers, *traffic.lost]:
        pool.writer_dead(writer)
    assert (pool.counts().free, pool.counts().leased, pool.counts().wanted) == (CAPACITY, 0, 0)
    pool.check_integrity()


def serve_until_killed(handle: StoreHandle, seed: int, pipe: Connection) -> None:
    store = attach_store(handle, SegmentClient(handle.agent_socket, "secret"), geometry=GEOMETRY)
    pool, traffic = open_pool(store.front(), region=SPARE_BYTES + 3000), Traffic(seed)
    while True:
        traffic.step(pool)
        pipe.send_bytes(b".")  # this step was answered


class Watched(AllocationTable):
    """Remembers the state after each record."""

    def append(self, record: Record, *, shrinks: bool = False) -> bool:
        written = super().append(record, shrinks=shrinks)
        if written and hasattr(self, "seen"):
            self.seen.append(self.state())
        return written

    seen: list[PoolState]


@pytest.mark.parametrize("steps", [1, 70, 400])
def test_a_killed_pool_process_leaves_exactly_what_it_had_answered(tmp_path: Path, steps: int) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    server = SegmentServer(tmp_path / "run" / "agent.sock", "secret")
    server.start()
    client = SegmentClient(server.socket_path, "secret")
    store = HostBlockStore.create(client, "kv_pool-0", GEOMETRY, CAPACITY, front_bytes=table_bytes(CAPACITY))
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=serve_until_killed, args=(store.handle(), steps, theirs))
    child.start()
    theirs.close()
    answered = 0
    while answered < steps:
        assert ours.poll(20)
        ours.recv_bytes()
        answered += 1
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    try:
        while ours.poll(0):
            ours.recv_bytes()
            answered += 1
    except EOFError:
        pass

    successor = open_pool(store.front(), region=SPARE_BYTES + 3000)
    successor.check_integrity()
    area = memoryview(bytearray(table_bytes(CAPACITY)))
    watched, traffic = Watched(area, GEOMETRY, CAPACITY, region=SPARE_BYTES + 3000), Traffic(steps)
    replayed = KvPool("kv_pool-0", watched, GEOMETRY.block_size)
    for _ in range(answered):
        traffic.step(replayed)
    watched.seen = [watched.state()]
    traffic.step(replayed)  # the step it was killed in, or before
    left = AllocationTable(store.front(), GEOMETRY, CAPACITY, region=SPARE_BYTES + 3000).state()
    assert left in watched.seen
    server.close()


def test_an_invalid_writer_changes_nothing(pool: KvPool) -> None:
    for invalid in (WriterKey("decode", "a" * 70_000, 1), WriterKey("", "x", 1)):
        for declare in (pool.writer_lost, pool.writer_dead):
            with pytest.raises(TransferError):
                declare(invalid)
    assert pool.writers() == []
