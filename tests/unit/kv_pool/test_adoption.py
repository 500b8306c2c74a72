"""A request's next epoch adopts what an older epoch committed, in one step that late messages cannot undo."""

from __future__ import annotations

import pytest

from alignedserve.control.convert import key_to_proto
from alignedserve.errors import StaleError
from alignedserve.kv_pool.pool import Grant, KvPool
from alignedserve.kv_pool.records import Holding
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey
from alignedserve.scheduler.process.adoption import AWAY_S, Adoption
from support.kv_pool import OTHER, PREFILL, leased, open_pool, table_memory

A, B = RequestKey("a"), RequestKey("b")


def test_a_new_epoch_adopts_what_an_older_one_committed(pool: KvPool) -> None:
    newer = RequestKey("a", 1)
    blocks = leased(pool, PREFILL, 6)
    pool.commit(PREFILL, A, 11, blocks[:3])
    (adopted,), _ = pool.adopt([(newer, 100)])
    assert (adopted.key, adopted.kv_tokens, list(adopted.block_ids)) == (newer, 11, blocks[:3])
    pool.release([A])  # messages of the older epoch neither free nor change it
    with pytest.raises(StaleError):
        pool.commit(PREFILL, A, 12, blocks[:4])
    assert pool.adopt([(newer, 100)])[0] == [adopted]  # asked again
    pool.commit(PREFILL, newer, 20, [*blocks[:2], *blocks[3:6]], kept_blocks=2)
    assert pool.counts().owned == 5
    pool.release([newer])
    assert pool.counts().owned == 0


def test_asking_again_does_not_cut_a_request_that_has_gone_on(pool: KvPool) -> None:
    newer = RequestKey("a", 1)
    blocks = leased(pool, PREFILL, 6)
    pool.commit(PREFILL, A, 8, blocks[:2])
    pool.adopt([(newer, 9)])
    pool.commit(PREFILL, newer, 20, blocks[:5], kept_blocks=2)
    (again,), _ = pool.adopt([(newer, 9)])
    assert (again.kv_tokens, list(again.block_ids)) == (20, blocks[:5])
    assert pool.counts().owned == 5


def test_nothing_is_held_for_a_request_that_can_use_nothing(pool: KvPool) -> None:
    newer = RequestKey("a", 1)
    pool.commit(PREFILL, A, 1, leased(pool, PREFILL, 1))
    (adopted,), _ = pool.adopt([(newer, 0)])
    assert (adopted.kv_tokens, adopted.block_ids) == (0, ())
    assert pool.counts().requests == pool.counts().owned == 0
    with pytest.raises(StaleError):
        pool.commit(PREFILL, A, 1, leased(pool, PREFILL, 1))


def test_kv_of_tokens_that_were_never_delivered_is_not_adopted(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 3)
    pool.commit(PREFILL, A, 12, blocks)
    pool.want(OTHER, 18)
    (adopted,), grants = pool.adopt([(RequestKey("a", 1), 7)])
    assert (adopted.kv_tokens, list(adopted.block_ids)) == (7, blocks[:2])
    assert grants == [Grant(OTHER, (blocks[2],))]


def test_there_is_nothing_to_adopt_of_a_request_that_ended_or_was_never_here(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 3)
    pool.commit(PREFILL, RequestKey("a", 2), 12, blocks)
    nothing = [(RequestKey("a", 1), 9), (RequestKey("b", 1), 9)]
    assert [found.block_ids for found in pool.adopt(nothing)[0]] == [(), ()]
    pool.release([RequestKey("a", 3)])
    assert pool.adopt([(RequestKey("a", 3), 9)])[0][0].kv_tokens == 0


def test_what_a_shard_holds_of_an_epoch_before_the_last_is_not_adopted(pool: KvPool) -> None:
    """The shard missed the epoch between, whose tokens may differ from those that it holds."""
    pool.commit(PREFILL, A, 12, leased(pool, PREFILL, 3))
    assert pool.adopt([(RequestKey("a", 2), 14)])[0] == [Holding(RequestKey("a", 2), 0, ())]
    assert pool.counts().requests == pool.counts().owned == 0
    with pytest.raises(StaleError):
        pool.commit(PREFILL, RequestKey("a", 1), 1, leased(pool, PREFILL, 1))


def test_a_node_that_was_cut_off_for_an_epoch_adds_nothing_to_the_next() -> None:
    prompt, elsewhere, here = 5, open_pool(table_memory()), open_pool(table_memory())
    pools = {"here": here, "elsewhere": elsewhere}
    elsewhere.commit(PREFILL, A, 12, leased(elsewhere, PREFILL, 3))  # went on alone: 3 tokens were delivered

    def ask(epoch: int, delivered: int, heard: list[str], now_s: float) -> kp.Holding:
        key = RequestKey("a", epoch)
        head = pb.RequestHead(key=key_to_proto(key), prompt_tokens=prompt, output_tokens=delivered)
        assert list(adoption.ask(key, head, pools, now_s).heads) == [head]
        for pool_id in heard:
            (held,), _ = pools[pool_id].adopt([(key, prompt + delivered - 1)])
            adoption.answered(pool_id, kp.Holding(key=head.key, kv_tokens=held.kv_tokens, block_ids=held.block_ids))
        found = adoption.end(key, heard, now_s + AWAY_S)
        assert found is not None
        return found.base

    adoption = Adoption()
    assert ask(1, 3, ["here"], 0.0).kv_tokens == 0
    here.commit(PREFILL, RequestKey("a", 1), 8, leased(here, PREFILL, 2))
    base = ask(2, 10, ["here", "elsewhere"], 10.0)  # epoch 1 drew tokens 4 to 10
    assert (base.pool_id, base.kv_tokens) == ("here", 8)
    for pool in pools.values():
        pool.check_integrity()


def test_an_adoption_survives_the_pools_process(memory: memoryview) -> None:
    pool = open_pool(memory)
    pool.commit(PREFILL, A, 11, leased(pool, PREFILL, 3))
    pool.adopt([(RequestKey("a", 1), 7)])
    successor = open_pool(memory)
    successor.check_integrity()
    assert [(held.key, held.kv_tokens) for held in successor.inventory()] == [(RequestKey("a", 1), 7)]
    assert successor.counts().owned == 2


def test_once_a_newer_epoch_has_looked_an_older_one_is_too_late(pool: KvPool) -> None:
    blocks = leased(pool, PREFILL, 3)
    assert pool.adopt([(RequestKey("a", 1), 9)])[0][0].block_ids == ()
    with pytest.raises(StaleError):
        pool.commit(PREFILL, A, 11, blocks)
    pool.commit(PREFILL, RequestKey("a", 1), 11, blocks)
    assert pool.own_blocks("a") == 3
    pool.commit(PREFILL, B, 11, blocks, share_with=RequestKey("a", 1))
    assert (pool.own_blocks("a"), pool.own_blocks("unknown")) == (0, 0)
