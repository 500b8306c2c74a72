"""A shard with the beginning of a prompt cached, and a writer's side of it without messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np

from alignedserve.control.prefixes import prefix_tokens
from alignedserve.geometry import KvGeometry
from alignedserve.kv_pool.prefix_chain import root_digest
from alignedserve.kv_pool.records import WriterKey
from alignedserve.kv_pool.writer import Committed
from alignedserve.prefill_worker.jobs import Base
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.host_channel import HostChannel
from support.prefix_pool import index_memory, open_indexed

GEOMETRY = KvGeometry("random", "float32", layers=2, kv_heads=2, head_dim=8, block_size=4)
BLOCKS, ROOT, WRITER = 16, root_digest("model", ""), WriterKey("prefill", "prefill-0", 1)
PROMPT = list(range(11))


class DirectShard:
    """Blocks 5 and 6 of the instance's cache `source` are cached as the beginning of PROMPT."""

    weights = ""

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
        while len(self.at_hand) < count:  # noqa: ASYNC110  # there is no event for this
            await asyncio.sleep(0.001)
        return self.take_some(count)

    def unpin(self, key: RequestKey, base: Base) -> None:
        self.pool.unpin(key, base.tokens)

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

    def channel(self) -> HostChannel:
        return HostChannel(self.source, self.store)
