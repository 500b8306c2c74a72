"""Steps 5 and 6 of the paper: hand-over into the decode cache, and eviction out of it. Copies run beside iterations."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from alignedserve.decode_worker.buffer_link import BufferLink
from alignedserve.decode_worker.held import EvictionOrder
from alignedserve.errors import TransferError
from alignedserve.kv_pool.writeback import write_back
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.completion import Completion

logger = logging.getLogger(__name__)


class Handover:
    """The channels between this instance's cache and everywhere else.

    `pull` is called by the decode thread; the rest from the event loop.
    """

    def __init__(self, from_pool: Channel, to_pool: Channel, pool: PoolWriter, pool_id: str, block_size: int) -> None:
        self._from_pool = from_pool
        self._to_pool = to_pool
        self._pool = pool
        self._pool_id = pool_id
        self._block_size = block_size
        self.links: dict[str, BufferLink] = {}

    def pull(self, stored: pb.StoredRequest, block_ids: Sequence[int], resident: int) -> Completion:
        """Start to copy what lies at `stored` into `block_ids` of the cache, but for the first `resident` blocks.

        Raises TransferError where its store is not attached.
        """
        channel = self._source(stored.store_id)
        return channel.copy(list(stored.block_ids)[resident : len(block_ids)], list(block_ids)[resident:])

    def _source(self, store_id: str) -> Channel:
        if store_id == self._pool_id:
            return self._from_pool
        for link in list(self.links.values()):
            if channel := link.pulls.get(store_id):
                return channel
        raise TransferError(f"store {store_id} is not attached here (its prefill instance may be gone)")

    def link_of(self, store_id: str) -> BufferLink | None:
        """The link to the prefill instance whose buffer this is; None for the pool."""
        return next((link for link in self.links.values() if store_id in link.pulls), None)

    def leased_blocks(self) -> int:
        """The largest room for one eviction."""
        return max((link.leased_blocks for link in self.links.values()), default=0)

    async def evict(self, order: EvictionOrder) -> pb.StoredRequest:
        """Copy an evicted request out; where it lies afterwards. Raises TransferError where nothing could take it."""
        if not order.to_pool:
            for link in sorted(self.links.values(), key=lambda link: -link.leased_blocks):
                if (blocks := link.take_leased(len(order.block_ids))) is not None:
                    return await self._to_requests_buffer(order, link, blocks)
        return await write_back(self._pool, self._to_pool, order.stored, order.block_ids, self._block_size)

    async def _to_requests_buffer(self, order: EvictionOrder, link: BufferLink, blocks: list[int]) -> pb.StoredRequest:
        assert link.evict_channel is not None
        generation = link.generation
        try:
            await link.evict_channel.copy(order.block_ids, blocks)
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
        link.evicted(stored)
        return stored
