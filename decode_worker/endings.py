"""KV of answers that have ended, on its way to the prefix cache (MemServe's Caching-3).

The blocks of an answer that its shard lacks stay held in the cache until they have been copied, beside iterations. If
the cache is nearly full, or the shard has no free block for a while, they are given up: caching makes no request wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.engine.live import LiveRequest
from alignedserve.metrics import Page
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator

MOST_SHARE = 1 / 16
"""Most of the cache's blocks that are held for answers that have ended."""

FREE_PER_REQUEST = 2
"""So many blocks stay available for each running request, which must not be evicted for those that have ended: it needs
one soon, and as many are the watermark."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Copy `block_ids` of the cache: the blocks from `first_block` on of the KV of `tokens`.

    `weights`: those that computed the KV that the request came with.
    """

    key: RequestKey
    tokens: list[int]
    salt: bytes
    first_block: int
    block_ids: list[int]
    weights: str = ""


class Endings:
    """Used by the decode thread. `pool_id`: this node's shard, which alone is written to.

    Of a request whose prompt lies in the shard of another node, prompt and answer are copied, or nothing.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, pool_id: str) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._pool_id = pool_id
        self._held: dict[RequestKey, int] = {}  # number of blocks
        self._copying: set[RequestKey] = set()
        # Of all together, so that the cache of one rank is not full of them, where ranks have a cache each.
        self._most = int(allocator.request_blocks * MOST_SHARE)
        self._ranges = allocator.capacity // max(1, allocator.request_blocks)
        self.running = 0  # requests in the last iteration
        self.given_up = 0  # blocks of answers that there was no room for, here or in the shard

    def show_metrics(self, page: Page) -> None:
        meaning = "blocks of answers that were not cached, because the instance or its shard had no room"
        page.counter("decode_uncached_answer_blocks_total", meaning, self.given_up)

    def hold(self, key: RequestKey, stored: pb.StoredRequest, kv_tokens: int, block_ids: Sequence[int]) -> None:
        """The request ends now, and its blocks become free after this call. `kv_tokens`: tokens whose KV is theirs."""
        lacking = block_ids[self._first(stored) : kv_tokens // self._block_size]
        if not lacking or key in self._held:
            return
        room = self._most - sum(self._held.values())  # of a long answer the beginning is held
        if stored.pool_id != self._pool_id and len(lacking) > room:
            room = 0
        if self._allocator.available_beside(lacking[0]) * self._ranges < FREE_PER_REQUEST * self.running:
            room = 0
        if held := lacking[: max(0, room)]:
            self._allocator.retain(held, ("ended", key))
            self._held[key] = len(held)
        self.given_up += len(lacking) - len(held)

    def ended(self, live: LiveRequest, stored: pb.StoredRequest) -> list[Ending]:
        """What to copy of a request that is held, now that its tokens are known; [] if it is not held."""
        spec, first = live.spec, self._first(stored)
        # Not what only an iteration under way writes, which may fail.
        count = min(self._held.get(live.key, 0), (spec.prefix_length - 1) // self._block_size - first)
        if count <= 0:
            self.drop(live.key)
            return []
        tokens = [*spec.prompt_token_ids, *spec.output_token_ids][: (first + count) * self._block_size]
        block_ids = self._allocator.blocks_of(("ended", live.key))[:count]
        self._copying.add(live.key)
        return [Ending(live.key, tokens, spec.cache_salt, first, block_ids, stored.weights)]

    def _first(self, stored: pb.StoredRequest) -> int:
        """The number of the first block that this node's shard lacks, as far as the request tells."""
        return stored.pool_tokens // self._block_size if stored.pool_id == self._pool_id else 0

    def drop(self, key: RequestKey) -> None:
        """The request did not end as expected: free its blocks, unless they are being copied. Idempotent."""
        if key not in self._copying:
            self.copied(key)

    def copied(self, key: RequestKey, missed: int = 0) -> None:
        """The copy of its blocks has ended, or was not begun. `missed`: blocks that the shard had no room for."""
        self.given_up += missed
        self._copying.discard(key)
        if self._held.pop(key, None) is not None:
            self._allocator.release_all(("ended", key))
