"""Of an answer that has ended so much is cached as there is room for, from its beginning."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alignedserve.control.convert import spec_to_proto
from alignedserve.control.prefixes import joint_weights
from alignedserve.decode_worker.endings import Ending, Endings
from alignedserve.decode_worker.handover import Handover
from alignedserve.engine.live import LiveRequest
from alignedserve.metrics import Page
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.transfer.copier import Copier
from support.direct_shard import PROMPT, ROOT, DirectShard

KEY = RequestKey("r")


@pytest.mark.parametrize(("capacity", "held"), [(15, 0), (32, 2), (48, 3), (160, 5)])
def test_a_sixteenth_of_the_cache_is_held_at_most(capacity: int, held: int) -> None:
    allocator = BlockAllocator(capacity, "cache")
    endings = Endings(allocator, 4, "kv_pool-0")
    spec = RequestSpec(KEY, [1] * 9, SamplingParams(), [2] * 20)
    stored = pb.StoredRequest(spec=spec_to_proto(spec), pool_id="kv_pool-0", pool_tokens=9)
    block_ids = allocator.allocate(8, KEY)
    assert block_ids is not None
    endings.hold(KEY, stored, 28, block_ids)
    allocator.release_all(KEY)
    assert allocator.owned_blocks == held
    found = endings.ended(LiveRequest(spec, None), stored)
    tokens = ([1] * 9 + [2] * 20)[: (2 + held) * 4]
    assert found == ([Ending(KEY, tokens, b"", 2, block_ids[2 : 2 + held])] if held else [])
    endings.copied(KEY)
    assert not allocator.owned_blocks


@pytest.mark.parametrize(("output", "copied"), [(4, 1), (3, 1), (2, 0)])
def test_what_an_iteration_under_way_writes_is_not_copied(output: int, copied: int) -> None:
    """It was held when the iteration was launched. The token of the one before has ended the request."""
    allocator = BlockAllocator(64, "cache")
    endings = Endings(allocator, 4, "kv_pool-0")
    spec = RequestSpec(KEY, [1] * 10, SamplingParams(), [2] * output)
    stored = pb.StoredRequest(spec=spec_to_proto(spec), pool_id="kv_pool-0", pool_tokens=10)
    block_ids = allocator.allocate(4, KEY)
    assert block_ids is not None
    endings.hold(KEY, stored, spec.prefix_length, block_ids)
    allocator.release_all(KEY)
    found = endings.ended(LiveRequest(spec, None), stored)
    assert [ending.block_ids for ending in found] == [block_ids[2 : 2 + copied]][:copied]
    endings.copied(KEY)
    assert not allocator.owned_blocks


@pytest.mark.parametrize(("at_hand", "cached"), [(0, 2), (1, 3), (9, 4)])
async def test_so_much_is_copied_as_there_are_blocks_at_hand(at_hand: int, cached: int) -> None:
    shard, tokens = DirectShard(), [*PROMPT, 11, 12, 13, 14, 15]
    shard.at_hand = shard.at_hand[:at_hand]
    writer: Any = shard
    none: Any = None
    handover = Handover(Copier(verify=True, timeout_s=10.0), none, shard.channel(), none, 4, writer)
    assert await handover.cache(Ending(KEY, tokens, b"", 2, [7, 4])) == 4 - cached
    found = shard.pool.indexed(ROOT, tokens)
    assert len(found) == cached
    assert shard.store.checksums(found) == shard.source.checksums([5, 6, 7, 4][:cached])
    shard.pool.check_integrity()


async def test_an_answer_is_copied_in_parts_as_the_shard_grants_blocks() -> None:
    """As when several end in one iteration: they share one lease."""
    shard, tokens = DirectShard(), [*PROMPT, 11, 12, 13, 14, 15]
    later, shard.at_hand = shard.at_hand[:2], []
    writer: Any = shard
    none: Any = None
    handover = Handover(Copier(verify=True, timeout_s=10.0), none, shard.channel(), none, 4, writer)
    caching = asyncio.ensure_future(handover.cache(Ending(KEY, tokens, b"", 2, [7, 4])))
    for number, block in enumerate(later):
        shard.give([block])
        async with asyncio.timeout(5.0):
            while len(shard.pool.indexed(ROOT, tokens)) < 3 + number:  # noqa: ASYNC110  # there is no event for this
                await asyncio.sleep(0.001)
    assert await caching == 0
    found = shard.pool.indexed(ROOT, tokens)
    assert shard.store.checksums(found) == shard.source.checksums([5, 6, 7, 4])
    shard.pool.check_integrity()


def test_kv_that_several_weights_have_computed_is_found_by_no_other_request() -> None:
    cases = {("a", "a"): "a", ("a", "b"): "a+b", ("a+b", "a"): "a+b", ("", ""): ""}
    assert {both: joint_weights(*both) for both in cases} == cases


def test_what_there_was_no_room_for_is_counted() -> None:
    allocator = BlockAllocator(48, "cache")
    endings = Endings(allocator, 4, "kv_pool-0")
    stored = pb.StoredRequest(pool_id="kv_pool-0", pool_tokens=9)
    block_ids = allocator.allocate(8, KEY)
    assert block_ids is not None
    endings.hold(KEY, stored, 28, block_ids)
    endings.copied(KEY, missed=1)
    page = Page(instance="decode-0")
    endings.show_metrics(page)
    assert 'alignedserve_decode_uncached_answer_blocks_total{instance="decode-0"} 3' in page.text()


@pytest.mark.parametrize(("capacity", "held"), [(64, 0), (160, 7)])
def test_of_a_prompt_of_another_node_all_is_copied_or_nothing(capacity: int, held: int) -> None:
    allocator = BlockAllocator(capacity, "cache")
    endings = Endings(allocator, 4, "kv_pool-1")
    spec = RequestSpec(KEY, [1] * 9, SamplingParams(), [2] * 20)
    stored = pb.StoredRequest(spec=spec_to_proto(spec), pool_id="kv_pool-0", pool_tokens=9)
    block_ids = allocator.allocate(8, KEY)
    assert block_ids is not None
    endings.hold(KEY, stored, 28, block_ids)
    allocator.release_all(KEY)
    assert allocator.owned_blocks == held
    found = endings.ended(LiveRequest(spec, None), stored)
    assert found == ([Ending(KEY, ([1] * 9 + [2] * 20)[:28], b"", 0, block_ids[:7])] if held else [])


@pytest.mark.parametrize(("running", "held"), [(12, 5), (13, 0)])
def test_nothing_is_held_that_running_requests_need_soon(running: int, held: int) -> None:
    allocator = BlockAllocator(160, "cache")
    endings = Endings(allocator, 4, "kv_pool-0")
    endings.running = running
    spec = RequestSpec(KEY, [1] * 9, SamplingParams(), [2] * 20)
    stored = pb.StoredRequest(spec=spec_to_proto(spec), pool_id="kv_pool-0", pool_tokens=9)
    block_ids = allocator.allocate(8, KEY)
    assert allocator.allocate(128, RequestKey("others")) is not None
    assert block_ids is not None
    endings.hold(KEY, stored, 28, block_ids)
    allocator.release_all(KEY)
    assert allocator.owned_blocks == 128 + held
