"""Steps 5 and 6 of the paper: hand-over into the decode cache, and eviction from it. Copies run beside iterations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from alignedserve.control.prefixes import cached_prefix, joint_weights
from alignedserve.decode_worker.buffer_link import BufferLink
from alignedserve.decode_worker.endings import Ending
from alignedserve.decode_worker.held import EvictionOrder
from alignedserve.errors import AlignedServeError, TransferError
from alignedserve.kv_pool.remote_shards import PoolReader
from alignedserve.kv_pool.writeback import write_back
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion
from alignedserve.transfer.copier import Copier, Route

logger = logging.getLogger(__name__)

GRANTED_WITHIN_S = 0.5  # blocks for an answer that has ended; its KV is held in the cache so long
GRANT_LOOK_S = 0.01


class Handover:
    """Copies KV between this instance's cache and the pool and buffers.

    The decode thread calls `pull`; the rest is used from the event loop.
    """

    def __init__(
        self,
        copier: Copier,
        from_pool: PoolReader,
        to_pool: Channel,
        pool: PoolWriter,
        block_size: int,
        cached: PoolWriter | None = None,
    ) -> None:
        """`cached` leases blocks for answers that have ended; None: they are not cached."""
        self._cached = cached
        self._copier = copier
        self._from_pool = from_pool
        self._to_pool = to_pool
        self._pool = pool
        self._block_size = block_size
        self.links: dict[str, BufferLink] = {}

    def pull(
        self, stored: pb.StoredRequest, block_ids: Sequence[int], resident: int, *, settled: bool = False
    ) -> Completion:
        """Start to copy the KV of `stored` into `block_ids` of the cache, without the first `resident` blocks.

        `settled`: no iteration under way uses the blocks that are written to, so the copy need not wait for one.

        A failed copy is tried once more. The second attempt reads from the pool if checksums are on and the pool holds
        all tokens. Without checksums it reads the same blocks again, because the pool's blocks may have been released
        and belong to another request. Raises TransferError if the store of `stored` is not attached.
        """
        part = slice(resident, len(block_ids))
        first = again = Route(self._source(stored.store_id), stored.block_ids[part], stored.checksums[part], settled)
        if self._copier.verify and stored.pool_tokens == stored.kv_tokens:
            with contextlib.suppress(TransferError):  # the shard is lost: only the buffer has the KV
                pool = self._from_pool.channel(stored.pool_id)
                again = Route(pool, stored.pool_block_ids[part], stored.pool_checksums[part], settled)
        return self._copier.copy([first, again], block_ids[resident:], stored.spec.key.request_id)

    def _source(self, store_id: str) -> Channel:
        link = self.link_of(store_id)
        return link.pulls[store_id] if link is not None else self._from_pool.channel(store_id)

    def link_of(self, store_id: str) -> BufferLink | None:
        """The link to the prefill instance with this buffer; None if it is a shard, or is not linked."""
        return next((link for link in list(self.links.values()) if store_id in link.pulls), None)

    def leased_blocks(self) -> int:
        """The most blocks that one link has leased for an eviction."""
        return max((link.leased_blocks for link in self.links.values()), default=0)

    async def evict(self, order: EvictionOrder) -> pb.StoredRequest:
        """Copy an evicted request to a candidate request buffer or the pool. Returns it with its new place.

        Raises TransferError if the copy or its commit fails, and StaleError if a newer epoch has replaced the request.
        """
        order.stored.weights = joint_weights(order.stored.weights, self._pool.weights)
        if not order.to_pool:
            for link in sorted(self.links.values(), key=lambda link: -link.leased_blocks):
                if (blocks := link.take_leased(len(order.block_ids))) is not None:
                    return await self._to_requests_buffer(order, link, blocks)
        source = Route(self._to_pool, order.block_ids, await self._checksums(order))
        return await write_back(self._pool, self._copier, source, order.stored, self._block_size)

    async def cache(self, ending: Ending) -> int:
        """Copy an answer's KV to the prefix cache, from its beginning, in parts as large as the lease at hand.

        Ends when the shard grants no block for `GRANTED_WITHIN_S`. Returns how many blocks were not copied. Raises
        TransferError if a copy fails or the shard cannot take it.
        """
        assert self._cached is not None
        done, count, until_s = 0, len(ending.block_ids), time.monotonic() + GRANTED_WITHIN_S
        while done < count:
            if fresh := self._cached.take_some(count - done):
                await self._cache_part(self._cached, ending, done, fresh)
                done, until_s = done + len(fresh), time.monotonic() + GRANTED_WITHIN_S
            elif time.monotonic() < until_s:
                await asyncio.sleep(GRANT_LOOK_S)
            else:
                break
        return count - done

    async def _cache_part(self, pool: PoolWriter, ending: Ending, done: int, fresh: Sequence[int]) -> None:
        first, source = ending.first_block + done, ending.block_ids[done : done + len(fresh)]
        tokens = ending.tokens[: (first + len(fresh)) * self._block_size]
        try:
            checksums = await self._copier.checksums(self._to_pool.source, source)
            route = Route(self._to_pool, source, checksums)
            await self._copier.copy([route, route], fresh, ending.key.request_id)
            prefix = cached_prefix(tokens, ending.salt, joint_weights(ending.weights, pool.weights))
            await pool.cache(ending.key, prefix, first, fresh, checksums)
        except AlignedServeError:
            pool.give(fresh)
            raise

    async def _checksums(self, order: EvictionOrder) -> list[int]:
        return await self._copier.checksums(self._to_pool.source, order.block_ids)

    async def _to_requests_buffer(self, order: EvictionOrder, link: BufferLink, blocks: list[int]) -> pb.StoredRequest:
        assert link.evict_channel is not None
        generation = link.generation
        try:
            checksums = await self._checksums(order)
            route = Route(link.evict_channel, order.block_ids, checksums)
            await self._copier.copy([route, route], blocks, order.key.request_id)
        except TransferError:
            if link.generation == generation:
                link.put_back(blocks)
            raise
        if link.generation != generation:
            raise TransferError(f"the link to {link.prefill_id} broke: the blocks were no longer leased")
        stored = pb.StoredRequest()
        stored.CopyFrom(order.stored)
        stored.store_id = link.requests_store_id
        stored.block_ids[:] = blocks
        stored.checksums[:] = checksums
        link.evicted(stored)
        return stored
