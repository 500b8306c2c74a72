"""Chunked prefill: prompts share a pass in order of arrival, and start only with room for the whole prompt."""

import random

import pytest

from alignedserve.errors import AccountingError, InvalidRequestError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.prefill_chunks import Chunk, ChunkScheduler
from support.chains import chain_of

A, B, C = (RequestKey(name) for name in "abc")


def make(capacity=100, block_size=4):
    allocator = BlockAllocator(capacity, "prefill-0")
    return ChunkScheduler(allocator, block_size), allocator


def test_prompts_share_a_forward_pass_and_a_long_one_is_cut():
    chunks, _ = make()
    chunks.add(A, 5)
    chunks.add(B, 20)
    chunks.add(C, 3)
    assert chunks.plan(16, 8) == [Chunk(A, 0, 5, True), Chunk(B, 0, 11, False)]
    assert chunks.plan(16, 8) == [Chunk(B, 11, 9, True), Chunk(C, 0, 3, True)]
    assert chunks.plan(16, 8) == []


def test_at_most_max_requests_share_a_forward_pass():
    chunks, _ = make()
    for key in A, B, C:
        chunks.add(key, 2)
    assert [chunk.key for chunk in chunks.plan(100, 2)] == [A, B]


def test_a_prompt_starts_only_with_room_for_all_of_it_and_no_other_overtakes_it():
    chunks, allocator = make(capacity=4)
    chunks.add(A, 9)
    chunks.add(B, 8)
    chunks.add(C, 1)
    first = chunks.plan(4, 8)
    assert first == [Chunk(A, 0, 4, False)]
    assert allocator.owned_blocks == 3
    assert not chunks.done(first[0])
    (second,) = chunks.plan(100, 8)  # one block is free: C would fit, but B is first in the queue
    assert second == Chunk(A, 4, 5, True)
    assert chunks.done(second)
    assert chunks.plan(100, 8) == []
    chunks.release(A)
    assert [chunk.key for chunk in chunks.plan(100, 8)] == [B, C]


def test_a_completed_prompt_keeps_its_blocks_until_they_are_released():
    chunks, allocator = make()
    chunks.add(A, 6)
    (chunk,) = chunks.plan(8, 8)
    assert chunks.done(chunk) is True
    assert allocator.owned_blocks == 2
    assert chunks.blocks_of(A) == [0, 1]
    chunks.release(A)
    chunks.release(A)
    assert allocator.owned_blocks == 0


def test_a_cancelled_prompt_frees_its_blocks_once_nothing_of_it_is_being_computed():
    chunks, allocator = make()
    chunks.add(A, 10)
    chunks.add(B, 10)
    (chunk,) = chunks.plan(4, 8)
    assert chunks.cancel(B)
    assert chunks.pending_tokens == 10
    assert chunks.cancel(A)
    assert chunks.pending_tokens == 0
    assert allocator.owned_blocks == 3
    assert chunks.plan(4, 8) == []
    assert chunks.done(chunk) is False
    assert allocator.owned_blocks == 0
    assert chunks.pending_prompts == 0
    assert not chunks.cancel(A)


def test_tokens_that_come_from_elsewhere_are_not_computed_but_have_room():
    chunks, allocator = make()
    chunks.add(A, 10, start=8)
    assert chunks.pending_tokens == 2
    assert chunks.plan(100, 8) == []
    assert allocator.owned_blocks == 3
    assert chunks.take_fetches() == [A]
    assert chunks.take_fetches() == []
    chunks.add(B, 4)
    assert chunks.plan(100, 8) == [Chunk(B, 0, 4, True)]  # others need not wait for a copy
    assert chunks.fetched(A)
    assert chunks.plan(100, 8) == [Chunk(A, 8, 2, True)]


def test_a_prompt_fetches_only_what_another_has_not_fetched():
    chunks, allocator = make()
    chunks.add(A, 10, start=8, chain=chain_of("abcdefgh", 4))
    chunks.add(B, 14, start=12, chain=chain_of("abcdefghijkl", 4))
    chunks.add(C, 10, start=8, chain=chain_of("abcdefgh", 4))
    assert chunks.plan(100, 8) == []
    assert chunks.take_fetches() == [A]  # the others wait for it
    assert chunks.fetched(A)
    assert [chunk.key for chunk in chunks.plan(100, 8)] == [A, C]  # and need no copy
    assert chunks.take_fetches() == [B]
    assert [chunks.shared_blocks(key) for key in (A, B, C)] == [0, 2, 2]
    assert allocator.owned_blocks == 3 + 2 + 1
    assert chunks.fetched(B, failed=True)
    assert chunks.plan(100, 8) == [Chunk(B, 8, 6, True)]  # blocks of others are not written to
    chunks.check_integrity()


def test_what_could_not_be_brought_is_computed():
    chunks, _ = make()
    chunks.add(A, 10, start=8)
    chunks.plan(100, 8)
    chunks.take_fetches()
    assert chunks.fetched(A, failed=True)
    assert chunks.pending_tokens == 10
    assert chunks.plan(100, 8) == [Chunk(A, 0, 10, True)]
    chunks.check_integrity()


@pytest.mark.parametrize("taken", [True, False])
def test_a_prompt_cancelled_while_its_kv_is_brought_keeps_its_blocks_until_the_copy_has_ended(taken):
    chunks, allocator = make()
    chunks.add(A, 10, start=8)
    chunks.plan(100, 8)
    if taken:
        chunks.take_fetches()
    assert chunks.cancel(A)
    assert allocator.owned_blocks == (3 if taken else 0)
    if taken:
        assert not chunks.fetched(A)
    assert chunks.take_fetches() == []
    assert allocator.owned_blocks == chunks.pending_prompts == chunks.pending_tokens == 0


def test_what_can_never_be_prefilled_is_refused():
    chunks, _ = make(capacity=2)
    with pytest.raises(InvalidRequestError):
        chunks.add(A, 9)
    with pytest.raises(InvalidRequestError):
        chunks.add(A, 0)
    chunks.add(A, 8)
    with pytest.raises(AccountingError):
        chunks.add(A, 8)


def test_random_use_computes_every_token_once_and_ends_with_nothing_held():
    rng = random.Random(1)
    chunks, allocator = make(capacity=12)
    lengths, computed, cancelled, in_flight = {}, {}, set(), []
    for step in range(3000):
        if step < 2500 and rng.random() < 0.3:
            key = RequestKey(str(step))
            lengths[key] = rng.randint(1, 48)
            chunks.add(key, lengths[key])
        if rng.random() < 0.05 and lengths:
            key = rng.choice(list(lengths))
            if chunks.cancel(key):
                cancelled.add(key)
        in_flight += chunks.plan(rng.randint(1, 20), 4)
        while in_flight and rng.random() < 0.7:
            chunk = in_flight.pop(0)
            complete = chunks.done(chunk)
            if chunk.key not in cancelled:
                assert chunk.start == computed.get(chunk.key, 0)
                computed[chunk.key] = chunk.start + chunk.count
                assert complete == (computed[chunk.key] == lengths[chunk.key])
            if complete:
                chunks.release(chunk.key)
        chunks.check_integrity()
    assert chunks.pending_prompts == 0
    assert not in_flight
    assert allocator.owned_blocks == 0
    assert {key: lengths[key] for key in lengths if key not in cancelled} == {
        key: count for key, count in computed.items() if key not in cancelled
    }
