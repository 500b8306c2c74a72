"""Prompts whose cached beginning was held by an answer that has ended: they are written in full."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alignedserve.errors import StaleError, TransferError
from alignedserve.prefill_worker.jobs import PrefilledJob
from alignedserve.prefill_worker.offload import Offloader
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.transfer.copier import Copier
from support.direct_shard import BLOCKS, PROMPT, ROOT, WRITER, DirectShard
from support.kv_pool import drop_prefix

FIRST, SECOND, THIRD = (RequestKey(name) for name in ("first", "second", "third"))


def offloader_of(shard: DirectShard) -> Offloader:
    writer: Any = shard
    copier = Copier(verify=True, timeout_s=10.0)
    return Offloader("prefill-0", writer, copier, shard.channel(), "kv_pool-0", 4, let_go=shard.unpin)


@pytest.mark.parametrize("others", [[SECOND], [SECOND, THIRD]])
async def test_a_prompt_is_written_in_full_if_the_answer_that_held_its_beginning_has_ended(
    others: list[RequestKey],
) -> None:
    """The first of several answers may end with its first token: then the scheduler has the shard release it."""
    shard = DirectShard()
    base = shard.pin(FIRST)
    shard.release([FIRST])
    specs = [RequestSpec(key, PROMPT, SamplingParams(), [1]) for key in others]
    job = PrefilledJob(FIRST, specs, PROMPT, [5, 6, 7], base, pin=FIRST)
    offloader = offloader_of(shard)
    prefilled, gone = await offloader.offload(job)
    assert [(one.kv_tokens, one.blocks, one.shared_blocks) for one in prefilled] == [(11, 3, 0)] * len(others)
    assert not gone
    assert offloader.idle
    for key in others:
        held = shard.pool.holding(key.request_id)
        assert held is not None
        assert shard.store.checksums(held.block_ids) == shard.source.checksums([5, 6, 7])
    shard.release(others)
    shard.pool.give_back(WRITER, shard.at_hand)
    counts = shard.pool.counts()
    assert (counts.owned, counts.leased, counts.cached) == (0, 0, 2)


@pytest.mark.parametrize("others", [[SECOND], [SECOND, THIRD]])
async def test_blocks_that_another_prompt_has_by_now_are_not_taken_for_the_beginning(others: list[RequestKey]) -> None:
    """They were given up after the answer that held them had ended, and leased again to this very instance."""
    shard = DirectShard()
    base = shard.pin(FIRST)
    shard.release([FIRST])
    shard.at_hand += [block for grant in shard.pool.want(WRITER, BLOCKS - 10) for block in grant.block_ids]
    for block in base.block_ids:
        shard.at_hand.remove(block)
        shard.store.blocks[block] = 0
    specs = [RequestSpec(key, PROMPT, SamplingParams(), [1]) for key in others]
    prefilled, _ = await offloader_of(shard).offload(PrefilledJob(FIRST, specs, PROMPT, [5, 6, 7], base, pin=FIRST))
    assert [one.shared_blocks for one in prefilled] == [0] * len(others)
    for key in others:
        held = shard.pool.holding(key.request_id)
        assert held is not None
        assert shard.store.checksums(held.block_ids) == shard.source.checksums([5, 6, 7])


async def test_what_a_newer_epoch_has_replaced_is_not_written_again() -> None:
    shard = DirectShard()
    base = shard.pin(FIRST)
    shard.release([FIRST, RequestKey("second", 1)])
    job = PrefilledJob(FIRST, [RequestSpec(SECOND, PROMPT, SamplingParams(), [1])], PROMPT, [5, 6, 7], base, pin=FIRST)
    with pytest.raises(StaleError):
        await offloader_of(shard).offload(job)
    assert len(shard.at_hand) == 10


async def test_a_beginning_that_is_held_is_kept() -> None:
    shard = DirectShard()
    base = shard.pin(FIRST)
    job = PrefilledJob(FIRST, [RequestSpec(SECOND, PROMPT, SamplingParams(), [1])], PROMPT, [5, 6, 7], base, pin=FIRST)
    offloader = offloader_of(shard)
    ((one,), _) = await offloader.offload(job)
    assert (one.blocks, one.shared_blocks, offloader.blocks) == (3, 2, 1)


async def waiting_for_room() -> tuple[DirectShard, Offloader, asyncio.Future[tuple[list[Any], list[Any]]], list[int]]:
    """A prompt that holds its beginning and waits, and the blocks that others have."""
    shard = DirectShard()
    base = shard.pin(FIRST)
    others, shard.at_hand = shard.at_hand, []
    job = PrefilledJob(FIRST, [RequestSpec(FIRST, PROMPT, SamplingParams(), [1])], PROMPT, [5, 6, 7], base, pin=FIRST)
    offloader = offloader_of(shard)
    waiting = asyncio.ensure_future(offloader.offload(job))
    await asyncio.sleep(0.02)
    return shard, offloader, waiting, others


async def test_a_prompt_that_waits_for_room_lets_go_of_its_beginning_and_is_written_in_full() -> None:
    shard, offloader, waiting, others = await waiting_for_room()
    assert shard.pool.counts().owned == 2
    offloader.give_up_pins()
    await asyncio.sleep(0.02)
    assert (shard.pool.counts().owned, waiting.done()) == (0, False)
    shard.give(others)
    ((one,), gone) = await waiting
    assert (one.blocks, one.shared_blocks, offloader.blocks, gone) == (3, 0, 3, [])
    held = shard.pool.holding("first")
    assert held is not None
    assert shard.store.checksums(held.block_ids) == shard.source.checksums([5, 6, 7])


async def test_a_prompt_that_waits_for_room_may_be_cancelled_as_it_lets_go() -> None:
    shard, offloader, waiting, others = await waiting_for_room()
    offloader.give_up_pins()
    assert offloader.cancel(FIRST)
    assert await waiting == ([], [FIRST])
    assert offloader.idle
    shard.give(others)
    assert len(shard.at_hand) == 10


async def test_a_beginning_without_anything_else_that_can_be_kept_fails() -> None:
    """Without a cached beginning there is nothing else to try."""
    shard = DirectShard()
    spec = RequestSpec(SECOND, PROMPT, SamplingParams(), [1])
    with pytest.raises(TransferError):
        await offloader_of(shard).offload(PrefilledJob(SECOND, [spec], PROMPT, [5, 6], None))
    assert len(shard.at_hand) == 10


async def test_what_is_computed_again_does_not_give_way_to_a_spoiled_block() -> None:
    """The prompt still holds the block, which differs from what was written, when the shard is told to drop it."""
    shard = DirectShard()
    base = shard.pin(FIRST)
    shard.store.blocks[base.block_ids[1]] += 1
    drop_prefix(shard.pool, ROOT, PROMPT[:8])
    job = PrefilledJob(FIRST, [RequestSpec(FIRST, PROMPT, SamplingParams(), [1])], PROMPT, [5, 6, 7], None, pin=FIRST)
    ((one,), _) = await offloader_of(shard).offload(job)
    assert one.shared_blocks == 0
    found = shard.pool.indexed(ROOT, PROMPT)
    assert shard.store.checksums(found) == shard.source.checksums([5, 6])
    assert base.block_ids[1] not in found
    shard.pool.check_integrity()


@pytest.mark.parametrize(("at_hand", "cached"), [(0, 2), (1, 3), (9, 4)])
async def test_of_a_prompt_that_has_ended_so_much_is_cached_as_there_are_blocks_at_hand(
    at_hand: int, cached: int
) -> None:
    shard, prompt = DirectShard(), [*PROMPT, 11, 12, 13, 14, 15, 16]
    base = shard.pin(FIRST)
    shard.at_hand = shard.at_hand[:at_hand]
    await offloader_of(shard).cache(PrefilledJob(FIRST, [], prompt, [5, 6, 7, 4, 3], base, pin=FIRST))
    found = shard.pool.indexed(ROOT, prompt)
    assert len(found) == cached
    assert shard.store.checksums(found) == shard.source.checksums([5, 6, 7, 4][:cached])
    shard.pool.check_integrity()
