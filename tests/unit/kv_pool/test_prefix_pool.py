"""A shard with a prefix index: what commits share, what stays cached, who may have it, and what a successor keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from alignedserve.control.convert import key_to_proto
from alignedserve.errors import StaleError, TransferError
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.kv_pool.stored import adopted, pack
from alignedserve.kv_pool.table import AllocationTable
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.values import ValuePolicy
from support.kv_pool import DECODE, OTHER, PREFILL, drop_prefix, leased
from support.prefix_pool import GEOMETRY, Fuse, Killed, index_memory, open_indexed

CAPACITY = 20
A, B, C = RequestKey("a"), RequestKey("b"), RequestKey("c")
ROOT, SALTED = root_digest("model"), root_digest("model", "salt")
PROMPT = list(range(100, 114))  # three full blocks of 4, and two tokens


@pytest.fixture
def memory() -> memoryview:
    return index_memory(CAPACITY)


@pytest.fixture
def pool(memory: memoryview) -> KvPool:
    return open_indexed(memory, CAPACITY)[0]


def commit(pool: KvPool, key: RequestKey, tokens: list[int], checksums: bool = False) -> list[int]:
    """Commit blocks leased for it, and return what is left of them. Returns the request's final blocks."""
    blocks = leased(pool, PREFILL, -(-len(tokens) // 4))
    sums = [1000 + block for block in blocks] if checksums else []
    pool.commit(PREFILL, key, len(tokens), blocks, checksums=sums, token_ids=tokens, root=ROOT)
    pool.check_integrity()
    pool.give_back(PREFILL, pool._blocks.leased_to(PREFILL))
    return held(pool, key)


def held(pool: KvPool, key: RequestKey) -> list[int]:
    holding = pool.holding(key.request_id)
    assert holding is not None
    return list(holding.block_ids)


def states(pool: KvPool) -> tuple[int, int, int]:
    counts = pool.counts()
    assert counts.free + counts.owned + counts.cached == counts.capacity
    return counts.free, counts.owned, counts.cached


def test_a_pin_ends_before_its_request_and_what_can_be_decoded_from_stays(pool: KvPool) -> None:
    commit(pool, A, PROMPT)
    pool.release([A])
    pool.pin(B, ROOT, PROMPT, 1000)
    pool.unpin(B, 8)  # of another length: the request has something else by now
    assert states(pool) == (17, 3, 0)
    pool.unpin(B, 12)
    assert states(pool) == (17, 0, 3)
    blocks = leased(pool, PREFILL, 4)
    pool.commit(PREFILL, B, 14, blocks, payload=b"spec", token_ids=PROMPT, root=ROOT)
    for tokens in (14, None):
        pool.unpin(B, tokens)
        assert states(pool)[1] == 4
    pool.release([B])
    pool.pin(A, ROOT, PROMPT, 1000)
    pool.unpin(A)  # a lender does not know which answers the borrower got
    assert states(pool)[1] == 0
    pool.check_integrity()


def test_what_a_lost_prompt_had_pinned_is_cached_and_found_again(pool: KvPool) -> None:
    commit(pool, A, PROMPT)
    pool.release([A])
    pool.pin(B, ROOT, PROMPT, 1000)
    again = RequestKey("b", 1)
    head = pb.RequestHead(key=key_to_proto(again), prompt_tokens=len(PROMPT))
    (found,), _ = adopted(pool, [head], "k0")
    assert (found.kv_tokens, list(found.block_ids), found.whole) == (0, [], False)
    assert states(pool) == (17, 0, 3)
    with pytest.raises(StaleError):
        commit(pool, B, PROMPT)
    assert pool.pin(again, ROOT, PROMPT, 1000)[0].kv_tokens == 12


def test_kv_that_was_adopted_in_part_is_cached_when_it_is_lost_again(pool: KvPool) -> None:
    spec = pb.RequestSpec(key=key_to_proto(B), prompt_token_ids=PROMPT, output_token_ids=[7])
    blocks = leased(pool, PREFILL, 4)
    pool.commit(PREFILL, B, 14, blocks, payload=pack(spec, "p0", "weights"), token_ids=PROMPT, root=ROOT)

    def adopt(epoch: int) -> kp.Holding:
        key = key_to_proto(RequestKey("b", epoch))
        (found,), _ = adopted(pool, [pb.RequestHead(key=key, prompt_tokens=14, output_tokens=3)], "k0")
        return found

    first = adopt(1)
    assert (first.kv_tokens, first.weights, first.whole) == (14, "weights", False)
    assert adopt(2).kv_tokens == 0, "of which weights it is, is not known any more"
    assert states(pool) == (17, 0, 3)
    pool.check_integrity()


def test_full_blocks_are_cached_after_their_request_and_pinned_by_the_next(pool: KvPool) -> None:
    blocks = commit(pool, A, PROMPT)
    assert states(pool) == (16, 4, 0)
    pool.release([A])
    assert states(pool) == (17, 0, 3)
    assert pool.match(ROOT, PROMPT) == 3
    assert pool.match(ROOT, PROMPT[:11]) == 2
    assert pool.match(SALTED, PROMPT) == 0
    assert pool.match(ROOT, [1, *PROMPT[1:]]) == 0

    holding, grants = pool.pin(B, ROOT, PROMPT, 1000)

    assert (holding.key, holding.kv_tokens, list(holding.block_ids)) == (B, 12, blocks[:3])
    assert (holding.payload, grants) == (None, [])
    assert states(pool) == (17, 3, 0)
    fresh = leased(pool, PREFILL, 1)
    pool.commit(PREFILL, B, 14, [*blocks[:3], *fresh], kept_blocks=3, token_ids=PROMPT, root=ROOT)
    pool.check_integrity()
    assert states(pool) == (16, 4, 0)


@pytest.mark.parametrize(("tokens", "most", "blocks"), [(12, 99, 2), (13, 99, 3), (13, 11, 2), (13, 3, 0), (4, 9, 0)])
def test_a_pin_leaves_the_last_token_to_be_computed(pool: KvPool, tokens: int, most: int, blocks: int) -> None:
    commit(pool, A, PROMPT)
    holding, _ = pool.pin(B, ROOT, PROMPT[:tokens], most)
    assert (len(holding.block_ids), holding.kv_tokens) == (blocks, 4 * blocks)
    assert (pool.holding("b") is not None) == (blocks > 0)


def test_two_requests_that_computed_the_same_hold_the_same_blocks(pool: KvPool) -> None:
    one, other = leased(pool, PREFILL, 4), leased(pool, OTHER, 4)
    pool.commit(PREFILL, A, 14, one, checksums=[1, 2, 3, 4], token_ids=PROMPT, root=ROOT)
    for _ in range(2):  # the answer was lost, so it is said again
        pool.commit(OTHER, B, 14, other, checksums=[5, 6, 7, 8], token_ids=PROMPT, root=ROOT)
        holding = pool.holding("b")
        assert holding is not None
        assert list(holding.block_ids) == [*one[:3], other[3]]
        assert holding.checksums == (1, 2, 3, 8)  # of the blocks that it holds
        assert pool.counts().leased == 3
        pool.check_integrity()
    pool.give_back(OTHER, other[:3])
    # Another request of the group, whose writer names its own blocks or the final ones.
    again = leased(pool, OTHER, 4)
    pool.commit(OTHER, C, 14, [*one[:3], again[3]], B, token_ids=PROMPT, root=ROOT)
    assert held(pool, C) == [*one[:3], again[3]]
    pool.check_integrity()


def test_a_block_that_is_not_the_writers_to_give_stays_and_ends_what_is_indexed(pool: KvPool) -> None:
    blocks = leased(pool, DECODE, 4)
    pool.commit(DECODE, A, 12, blocks[:3])  # without tokens: not indexed
    other = commit(pool, B, PROMPT)
    pool.commit(DECODE, A, 16, blocks, kept_blocks=3, token_ids=[*PROMPT, 1, 2], root=ROOT)
    assert held(pool, A) == blocks
    pool.release([A, B])
    assert states(pool) == (17, 0, 3)
    assert list(pool.pin(C, ROOT, PROMPT, 99)[0].block_ids) == other[:3]
    pool.check_integrity()


def test_a_block_without_a_checksum_does_not_replace_one_with(pool: KvPool) -> None:
    one = commit(pool, A, PROMPT)
    other = commit(pool, B, PROMPT, checksums=True)
    assert not set(one) & set(other)
    assert pool.pin(C, ROOT, PROMPT, 99)[0].checksums == ()
    pool.check_integrity()


def test_checksums_are_those_of_the_pinned_blocks_also_for_a_successor(pool: KvPool, memory: memoryview) -> None:
    blocks = commit(pool, A, PROMPT, checksums=True)
    pool.release([A])
    successor, _ = open_indexed(memory, CAPACITY)
    holding, _ = successor.pin(B, ROOT, PROMPT, 99)
    assert holding.checksums == tuple(1000 + block for block in blocks[:3])


def test_growth_is_indexed_behind_what_was_before(pool: KvPool) -> None:
    blocks = commit(pool, A, PROMPT)
    fresh = leased(pool, DECODE, 2)
    longer = [*PROMPT, *range(6)]
    pool.commit(DECODE, A, 20, [*blocks[:3], *fresh], kept_blocks=3, token_ids=longer, root=ROOT)
    assert pool.match(ROOT, longer) == 5
    assert states(pool) == (15, 5, 0)
    pool.drop([(A, 20)])
    assert states(pool) == (15, 0, 5)
    pool.check_integrity()


def test_generated_kv_is_cached_without_a_holder_once_what_comes_before_is(pool: KvPool) -> None:
    answer = [*PROMPT, *range(6)]
    assert pool.cache(DECODE, ROOT, answer, leased(pool, DECODE, 2), 3) == ([], [])  # nothing comes before it
    lease = pool._blocks.leased_to(DECODE)
    commit(pool, A, PROMPT)
    assert pool.cache(DECODE, ROOT, answer, lease, 3) == (lease, [])
    assert pool.counts().leased == 0
    assert pool.match(ROOT, answer) == 5
    assert pool.cache(DECODE, ROOT, answer, lease, 3) == (lease, [])  # said again
    duplicates = leased(pool, DECODE, 3)
    more = [*answer, *range(4)]
    assert pool.cache(DECODE, ROOT, more, duplicates, 3) == (duplicates[2:], [])
    assert pool._blocks.leased_to(DECODE) == duplicates[:2]
    pool.check_integrity()
    pool.writer_lost(DECODE)
    with pytest.raises(StaleError):
        pool.cache(DECODE, ROOT, more, duplicates, 3)
    pool.release([A])
    assert states(pool) == (12, 2, 6)


def test_cached_blocks_are_room_behind_free_ones(memory: memoryview) -> None:
    pool, index = open_indexed(memory, CAPACITY, reserve=4)
    for number, key in enumerate((A, B, C)):
        commit(pool, key, [number] * 16)
    pool.release([A, B, C])
    assert states(pool) == (8, 0, 12)
    leased(pool, PREFILL, 8)
    assert (states(pool), index.evicted_blocks) == ((8, 0, 12), 0)
    assert [len(grant.block_ids) for grant in pool.want(PREFILL, 10)] == [8]  # four are for decode instances
    assert (states(pool), index.evicted_blocks) == ((16, 0, 4), 8)
    assert [pool.match(ROOT, [number] * 16) for number in range(3)] == [0, 0, 4]  # least recently used first
    assert [len(grant.block_ids) for grant in pool.want(DECODE, 9)] == [4]
    assert states(pool) == (20, 0, 0)
    pool.check_integrity()


def test_a_writer_that_waits_gets_what_becomes_cached(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 20)
    pool.commit(PREFILL, A, 80, blocks, token_ids=list(range(80)), root=ROOT)
    assert pool.want(OTHER, 3) == []
    (grant,) = pool.release([A])
    assert len(grant.block_ids) == 3
    assert pool.match(ROOT, list(range(80))) == 17
    pool.check_integrity()


def test_a_new_epoch_adopts_and_the_rest_is_cached(pool: KvPool) -> None:
    blocks = commit(pool, A, PROMPT)
    (holding,), _ = pool.adopt([(RequestKey("a", 1), 6)])
    assert (holding.kv_tokens, list(holding.block_ids)) == (6, blocks[:2])
    assert states(pool) == (17, 2, 1)
    pinned, _ = pool.pin(RequestKey("a", 1), ROOT, PROMPT, 13)  # more than it has adopted
    assert list(pinned.block_ids) == blocks[:3]
    with pytest.raises(StaleError):
        pool.commit(PREFILL, A, 4, leased(pool, PREFILL, 1))
    pool.release([RequestKey("a", 1)])
    assert pool.pin(RequestKey("a", 1), ROOT, PROMPT, 13)[0].block_ids == ()  # that epoch is over
    pool.check_integrity()


def test_a_request_that_can_be_decoded_is_not_pinned_shorter(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 4)
    pool.commit(PREFILL, A, 14, blocks, payload=b"p", token_ids=PROMPT, root=ROOT)
    assert pool.pin(A, ROOT, PROMPT, 99)[0].kv_tokens == 14
    assert pool.read(A) is not None
    assert pool.pin(RequestKey("a", 1), ROOT, PROMPT, 99)[0].kv_tokens == 12
    assert pool.read(A) is None
    assert pool._table.payloads.used_pages == 0
    pool.check_integrity()


def test_a_prefix_can_be_dropped_while_it_is_held(pool: KvPool) -> None:
    blocks = commit(pool, A, PROMPT)
    commit(pool, B, [*PROMPT[:8], *[7] * 8])
    pool.release([B])
    assert drop_prefix(pool, ROOT, [*PROMPT[:8], 5, 6, 7, 8]) == 0  # others continue what is indexed of it
    assert drop_prefix(pool, ROOT, PROMPT[:8]) == 5
    assert states(pool) == (16, 4, 0)
    assert pool.match(ROOT, PROMPT) == 0
    again = commit(pool, C, PROMPT)
    assert not set(again) & set(blocks)
    pool.release([A, C])
    assert states(pool) == (17, 0, 3)
    pool.check_integrity()


def test_what_is_left_of_a_prefix_whose_end_was_evicted_is_dropped(pool: KvPool) -> None:
    long = list(range(40))
    commit(pool, A, long)
    commit(pool, B, [*long[:8], *[7] * 4])
    pool.release([A, B])
    leased(pool, PREFILL, CAPACITY - 8)
    assert 2 < pool.match(ROOT, long) < 10
    left = pool.match(ROOT, long) - 2
    assert drop_prefix(pool, ROOT, long) == left
    assert pool.match(ROOT, long) == 2
    assert pool.match(ROOT, [*long[:8], *[7] * 4]) == 3
    pool.check_integrity()


def test_there_is_no_room_before_tokens_or_records_of_requests_that_share_their_blocks_are_refused() -> None:
    memory = index_memory(CAPACITY)
    pool, _ = open_indexed(memory, CAPACITY)
    payload = bytes(64 << 10)  # the tokens of a long prompt, of which each request has one block for itself
    number = 0
    while pool.room():
        counts = pool.counts()
        assert pool.room() <= counts.free + counts.cached
        (block,) = leased(pool, PREFILL, 1)
        pool.commit(PREFILL, RequestKey(f"r{number}"), 4, [block], payload=payload)
        number += 1
    assert pool.counts().free > 3
    assert open_indexed(memory, CAPACITY)[0].room() == 0
    pool.commit(PREFILL, RequestKey("more"), 4, leased(pool, PREFILL, 1), payload=payload)  # it was under way
    pool.release([RequestKey("r0"), RequestKey("r1"), RequestKey("r2"), RequestKey("r3")])
    assert pool.room() > 0
    pool.check_integrity()
    table = pool._table
    assert table.room(0) >= CAPACITY
    assert table.room(table._region_bytes) == 0


def test_indexed_blocks_of_another_prefix_are_refused(pool: KvPool) -> None:
    commit(pool, A, PROMPT)
    commit(pool, B, [1] * 8)
    blocks = leased(pool, PREFILL, 1)
    before = pool.inventory(), pool.counts()
    with pytest.raises(TransferError, match="do not continue"):
        pool.commit(PREFILL, C, 8, [blocks[0], held(pool, A)[1]], A)
    with pytest.raises(TransferError, match="do not continue"):
        pool.commit(PREFILL, C, 8, [held(pool, A)[1], blocks[0]], A, token_ids=[1] * 8, root=ROOT)
    with pytest.raises(TransferError, match="16 bytes"):
        pool.commit(PREFILL, C, 4, blocks, token_ids=PROMPT)
    assert (pool.inventory(), pool.counts()) == before


def test_without_an_index_nothing_is_cached_and_what_was_indexed_is_forgotten(memory: memoryview) -> None:
    pool, _ = open_indexed(memory, CAPACITY)
    commit(pool, A, PROMPT)
    pool.release([A])
    plain = KvPool("kv_pool-0", AllocationTable(memory, GEOMETRY, CAPACITY), 4)
    assert states(plain) == (20, 0, 0)
    plain.commit(PREFILL, B, 14, leased(plain, PREFILL, 4), token_ids=PROMPT, root=ROOT)
    assert (plain.match(ROOT, PROMPT), plain.pin(C, ROOT, PROMPT, 99)[0].block_ids) == (0, ())
    assert plain.cache(PREFILL, ROOT, PROMPT, leased(plain, PREFILL, 1), 3) == ([], [])
    assert drop_prefix(plain, ROOT, PROMPT) == 0
    plain.check_integrity()
    plain.release([B])
    assert states(plain) == (20, 0, 0)
    again, _ = open_indexed(memory, CAPACITY)
    assert again.match(ROOT, PROMPT) == 0
    again.check_integrity()


def scene(memory: memoryview, fuse: Fuse) -> KvPool:
    """A shard in which A is cached with a long prefix, B holds a part of it, and DECODE has three blocks."""
    pool, _ = open_indexed(memory, CAPACITY, fuse=fuse)
    commit(pool, A, list(range(32)))
    commit(pool, B, [*range(16), *[9] * 6])
    pool.release([A])
    leased(pool, DECODE, 3)
    return pool


STEPS: dict[str, Callable[[KvPool], object]] = {
    "commit": lambda pool: pool.commit(
        DECODE, C, 12, pool._blocks.leased_to(DECODE), token_ids=[1] * 12, root=ROOT, payload=b"c"
    ),
    "commit of known tokens": lambda pool: pool.commit(
        DECODE, C, 12, pool._blocks.leased_to(DECODE), token_ids=[*range(8), 5, 5, 5, 5], root=ROOT
    ),
    "pin": lambda pool: pool.pin(C, ROOT, list(range(40)), 99),
    "release": lambda pool: pool.release([B]),
    "adopt": lambda pool: pool.adopt([(RequestKey("b", 1), 9)]),
    "evict": lambda pool: pool.want(PREFILL, 11),
    "cache": lambda pool: pool.cache(DECODE, ROOT, list(range(44)), pool._blocks.leased_to(DECODE), 8),
    "drop": lambda pool: drop_prefix(pool, ROOT, list(range(24))),
    "lose": lambda pool: pool.writer_dead(DECODE),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_process_killed_before_any_write_leaves_an_index_of_what_blocks_hold(name: str) -> None:
    """The successor's index has the state before the step, the one after it, or lacks blocks that neither has held."""
    memory, fuse = index_memory(CAPACITY), Fuse()
    pool = scene(memory, fuse)
    fuse.writes = 0
    STEPS[name](pool)
    writes = fuse.writes
    after = pool.inventory()
    assert writes > 0
    for number in range(writes):
        memory, fuse = index_memory(CAPACITY), Fuse()
        pool = scene(memory, fuse)
        before = pool.inventory()
        fuse.left = number
        with pytest.raises(Killed):
            STEPS[name](pool)
        successor, index = open_indexed(memory, CAPACITY)
        successor.check_integrity()
        assert successor.inventory() in (before, after)
        states(successor)
        assert not any(index.indexed[block] for block in successor._blocks.leased_to(DECODE))
        b = successor.holding("b")
        if b is not None and name != "drop":  # what a request holds is still found by its tokens
            assert successor.match(ROOT, [*range(16), *[9] * 6]) >= b.kv_tokens // 4
        STEPS["release"](successor)
        successor.writer_dead(DECODE)
        successor.writer_dead(PREFILL)
        successor.check_integrity()


def test_a_successor_gives_up_what_was_cached_first_and_before_what_is_used_from_then_on(memory: memoryview) -> None:
    policy = ValuePolicy(lambda tokens: tokens**2, 4)
    pool, _ = open_indexed(memory, CAPACITY, policy)
    for number, key in enumerate((A, B, C)):
        commit(pool, key, [number] * 16)
    pool.release([C, A, B])
    pool, _ = open_indexed(memory, CAPACITY, policy)
    commit(pool, RequestKey("d"), [3] * 16)
    pool.release([RequestKey("d")])
    for count, left in ((5, [3, 4, 4, 4]), (3, [0, 4, 4, 4]), (4, [0, 0, 4, 4]), (5, [0, 0, 0, 3])):
        leased(pool, OTHER, count)
        assert [pool.match(ROOT, [number] * 16) for number in range(4)] == left
        pool.check_integrity()


def test_an_index_opened_over_too_little_memory_is_refused() -> None:
    memory = memoryview(bytearray(index_memory(CAPACITY).nbytes - 64 * CAPACITY))
    table = AllocationTable(memory, GEOMETRY, CAPACITY)
    with pytest.raises(TransferError, match="do not fit"):
        table.open_index()


def test_a_base_that_its_holder_has_lost_is_not_taken_from_the_writers_own_lease(pool: KvPool) -> None:
    """Its blocks may hold another prompt's KV by then: the answer that pinned them had ended."""
    commit(pool, C, PROMPT)
    pool.release([C])
    pinned, _ = pool.pin(A, ROOT, PROMPT, 1000)
    base = list(pinned.block_ids)
    pool.release([A])
    mine = leased(pool, PREFILL, CAPACITY)
    fresh = next(block for block in mine if block not in base)
    with pytest.raises(TransferError, match="in full"):
        pool.commit(PREFILL, B, 14, [*base, fresh], share_with=A, kept_blocks=3, token_ids=PROMPT, root=ROOT)
    assert pool.holding("b") is None
    assert not pool.indexed(ROOT, PROMPT)
    pool.check_integrity()


def test_a_request_that_asks_again_counts_once(pool: KvPool) -> None:
    commit(pool, C, PROMPT)
    pool.release([C])
    uses = pool._cache.index.queue._uses  # type: ignore[union-attr]
    held, _ = pool.pin(A, ROOT, PROMPT, 1000)
    before = [uses[block] for block in held.block_ids]
    pool.unpin(A, held.kv_tokens)
    again, _ = pool.pin(A, ROOT, PROMPT, 1000, used_tokens=held.kv_tokens)
    assert again.block_ids == held.block_ids
    assert [uses[block] for block in held.block_ids] == before
