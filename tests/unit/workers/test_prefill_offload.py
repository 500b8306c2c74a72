"""Prompts whose cached beginning was held by an answer that has ended: they are written in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from alignedserve.control.prefixes import prefix_tokens
from alignedserve.errors import StaleError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.writer import Committed
from alignedserve.prefill_worker.loop import Base, PrefilledJob
from alignedserve.prefill_worker.offload import Offloader
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey, RequestSpec, SamplingParams
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.copier import Copier
from alignedserve.transfer.host_channel import HostChannel
from support.prefix_pool import index_memory, open_indexed

GEOMETRY = KvGeometry("random", "float32", layers=2, kv_heads=2, head_dim=8, block_size=4)
BLOCKS, ROOT, WRITER = 16, root_digest("model", ""), WriterKey("prefill", "prefill-0", 1)
PROMPT = list(range(11))
FIRST, SECOND, THIRD = (RequestKey(name) for name in ("first", "second", "third"))


class Shard:
    """A shard with the beginning of PROMPT cached, and a writer's side of it without messages."""

    def __init__(self) -> None:
        self.pool, _ = open_indexed(index_memory(BLOCKS), BLOCKS)
        self.source = HostBlockStore.private("cache", GEOMETRY, 8)
        self.store = HostBlockStore.private("kv_pool-0", GEOMETRY, BLOCKS)
        self.source.blocks[:] = np.random.default_rng(0).integers(0, 256, self.source.blocks.shape, dtype=np.uint8)
        self.at_hand = [block for grant in self.pool.want(WRITER, 12) for block in grant.block_ids]
        blocks = self.take_some(2)
        self.store.blocks[blocks] = self.source.blocks[[5, 6]]
        self.pool.cache(WRITER, ROOT, PROMPT[:8], blocks, 0, self.store.checksums(blocks))

    def take_some(self, count: int) -> list[int]:
        taken, self.at_hand = self.at_hand[:count], self.at_hand[count:]
        return taken

    async def take(self, count: int) -> list[int]:
        return self.take_some(count)

    def give(self, block_ids: Iterable[int]) -> None:
        self.at_hand += block_ids

    def release(self, keys: Iterable[RequestKey]) -> None:
        self.pool.release(keys)

    async def commit(
        self,
        key: RequestKey,
        kv_tokens: int,
        block_ids: Sequence[int],
        share_with: RequestKey | None,
        kept_blocks: int,
        checksums: Sequence[int],
        payload: bytes,
    ) -> Committed:
        tokens = PROMPT[:kv_tokens]
        self.pool.commit(WRITER, key, kv_tokens, block_ids, share_with, kept_blocks, checksums, payload, tokens, ROOT)
        held = self.pool.holding(key.request_id)
        assert held is not None
        self.give(set(block_ids[kept_blocks:]) - set(held.block_ids))
        return Committed(list(held.block_ids), list(held.checksums))

    async def cache(
        self,
        key: RequestKey,
        prefix: kp.CachedPrefix,
        first_block: int,
        block_ids: Sequence[int],
        checksums: Sequence[int],
    ) -> None:
        tokens = prefix_tokens(prefix)
        cached, _ = self.pool.cache(WRITER, ROOT, tokens, block_ids, first_block, checksums, key.request_id)
        self.give(set(block_ids) - set(cached))

    def pin(self, key: RequestKey) -> Base:
        held, _ = self.pool.pin(key, ROOT, PROMPT, len(PROMPT))
        assert held.kv_tokens == 8
        return Base(8, list(held.block_ids), list(held.checksums), "kv_pool-0", here=True, cached=True)

    def offloader(self) -> Offloader:
        writer: Any = self
        copier = Copier(verify=True, timeout_s=10.0)
        return Offloader("prefill-0", writer, copier, HostChannel(self.source, self.store), "kv_pool-0", 4)


@pytest.mark.parametrize("others", [[SECOND], [SECOND, THIRD]])
async def test_a_prompt_is_written_in_full_if_the_answer_that_held_its_beginning_has_ended(
    others: list[RequestKey],
) -> None:
    """The first of several answers may end with its first token: then the scheduler has the shard release it."""
    shard = Shard()
    base = shard.pin(FIRST)
    shard.release([FIRST])
    specs = [RequestSpec(key, PROMPT, SamplingParams(), [1]) for key in others]
    job = PrefilledJob(FIRST, specs, PROMPT, [5, 6, 7], base, pin=FIRST)
    offloader = shard.offloader()
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


async def test_what_a_newer_epoch_has_replaced_is_not_written_again() -> None:
    shard = Shard()
    base = shard.pin(FIRST)
    shard.release([FIRST, RequestKey("second", 1)])
    job = PrefilledJob(FIRST, [RequestSpec(SECOND, PROMPT, SamplingParams(), [1])], PROMPT, [5, 6, 7], base, pin=FIRST)
    with pytest.raises(StaleError):
        await shard.offloader().offload(job)
    assert len(shard.at_hand) == 10


async def test_a_beginning_that_is_held_is_kept() -> None:
    shard = Shard()
    base = shard.pin(FIRST)
    job = PrefilledJob(FIRST, [RequestSpec(SECOND, PROMPT, SamplingParams(), [1])], PROMPT, [5, 6, 7], base, pin=FIRST)
    offloader = shard.offloader()
    ((one,), _) = await offloader.offload(job)
    assert (one.blocks, one.shared_blocks, offloader.blocks) == (3, 2, 1)


async def test_a_beginning_without_anything_else_that_can_be_kept_fails() -> None:
    """Without a cached beginning there is nothing else to try."""
    shard = Shard()
    spec = RequestSpec(SECOND, PROMPT, SamplingParams(), [1])
    with pytest.raises(TransferError):
        await shard.offloader().offload(PrefilledJob(SECOND, [spec], PROMPT, [5, 6], None))
    assert len(shard.at_hand) == 10


async def test_what_is_computed_again_does_not_give_way_to_a_spoiled_block() -> None:
    """The prompt still holds the block, which differs from what was written, when the shard is told to drop it."""
    shard = Shard()
    base = shard.pin(FIRST)
    shard.store.blocks[base.block_ids[1]] += 1
    shard.pool.drop_prefix(ROOT, PROMPT[:8])
    job = PrefilledJob(FIRST, [RequestSpec(FIRST, PROMPT, SamplingParams(), [1])], PROMPT, [5, 6, 7], None, pin=FIRST)
    ((one,), _) = await shard.offloader().offload(job)
    assert one.shared_blocks == 0
    found = shard.pool.indexed(ROOT, PROMPT)
    assert shard.store.checksums(found) == shard.source.checksums([5, 6])
    assert base.block_ids[1] not in found
    shard.pool.check_integrity()


@pytest.mark.parametrize(("at_hand", "cached"), [(0, 2), (1, 3), (9, 4)])
async def test_of_a_prompt_that_has_ended_so_much_is_cached_as_there_are_blocks_at_hand(
    at_hand: int, cached: int
) -> None:
    shard, prompt = Shard(), [*PROMPT, 11, 12, 13, 14, 15, 16]
    base = shard.pin(FIRST)
    shard.at_hand = shard.at_hand[:at_hand]
    await shard.offloader().cache(PrefilledJob(FIRST, [], prompt, [5, 6, 7, 4, 3], base, pin=FIRST))
    found = shard.pool.indexed(ROOT, prompt)
    assert len(found) == cached
    assert shard.store.checksums(found) == shard.source.checksums([5, 6, 7, 4][:cached])
    shard.pool.check_integrity()
