"""Admission: which requests are accepted, and when a prompt may be prefilled.

A request that no store can hold is refused permanently; one that finds the queue full is told when to retry. A prompt
is prefilled only when its shard has room for it beside the growth reserve. Each shard has its own reserve, which only
writes from its node use.
"""

from __future__ import annotations

import math

from alignedserve.errors import InvalidRequestError, OverloadedError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import RequestMeta
from alignedserve.scheduler.core.pool_shard import PoolShard
from alignedserve.scheduler.core.state import CoreState

MOST_RETRY_AFTER_S = 60.0


class Admission:
    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._config = state.config
        self._block_size = state.block_size
        self._instances = state.instances
        self._queue = state.queue
        self._ledger = state.ledger
        self._decode_cache_blocks = 0  # as last known
        self._max_request_tokens: int | None = None  # None: recompute

    def ready(self) -> bool:
        """Whether each role has reported. Before that nothing can be judged or started."""
        return self.max_request_tokens() > 0

    def max_request_tokens(self) -> int:
        """The longest request (prompt and answer) that can be served; 0 while a role is missing.

        It must fit in a decode cache and in the smallest shard (it may be evicted to any). It must also fit in a
        prefill cache, since it may have to be prefilled again. While no decode instance is up, the last known cache
        size counts: its successor will have the same, and prompts can be prefilled until then. The value is read
        several times per event, so it is cached until `sizes_changed`.
        """
        if self._max_request_tokens is None:
            self._max_request_tokens = self._find_max_request_tokens()
        return self._max_request_tokens

    def sizes_changed(self) -> None:
        """An instance was added, removed or has reported."""
        self._max_request_tokens = None

    def _find_max_request_tokens(self) -> int:
        decode = max((view.request_blocks for view in self._instances.decode.values()), default=0)
        self._decode_cache_blocks = decode = decode or self._decode_cache_blocks
        prefill = max((view.load.cache_tokens for view in self._instances.prefill.values()), default=0)
        pool = min((shard.capacity for shard in self._ledger.shards if shard.up), default=0)
        share = math.ceil(pool * self._config.kv_pool.growth_reserve)
        return min(decode * self._block_size, prefill, (pool - share) * self._block_size)

    def queue_full(self, requests: int, rank: int = 0) -> OverloadedError | None:
        """The error if a newly submitted group of `requests` finds the queue full, else None.

        It does not if `make_place` can refuse others instead.
        """
        missing = self._missing_places(requests)
        return None if missing <= 0 or self._behind(missing, rank) else self._full()

    def make_place(self, requests: int, rank: int, now_s: float) -> None:
        """Refuse queued requests of higher ranks so that a group that `queue_full` accepts has places."""
        missing = self._missing_places(requests)
        if missing > 0:
            self._state.reject(self._state.open(self._behind(missing, rank)), self._full(), now_s)

    def _missing_places(self, requests: int) -> int:
        return len(self._queue) + requests - self._config.scheduler.max_queue

    def _behind(self, requests: int, rank: int) -> list[RequestKey]:
        """Queued requests of higher ranks, at least `requests`, the last of the highest first; [] if there are fewer.

        Groups that were submitted again keep their places.
        """
        keys: list[RequestKey] = []
        for group in self._queue.last_behind(rank):
            keys += group.keys
            if len(keys) >= requests:
                return keys
        return []

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"{len(self._queue)} requests are waiting for prefill; the limit is {self._config.scheduler.max_queue}",
            retry_after_s=self.retry_after_s(),
        )

    def too_large(self, meta: RequestMeta) -> InvalidRequestError | None:
        most = self.max_request_tokens()
        if not most or meta.max_total_tokens <= most:
            return None
        return InvalidRequestError(
            f"the request may grow to {meta.max_total_tokens} tokens (prompt and max_tokens); "
            f"this cluster serves at most {most}",
            param="max_tokens",
            max_request_tokens=most,
        )

    def retry_after_s(self) -> float:
        """When the queue will have drained, predicted from the prefill instances' rates; whole seconds."""
        loads = [view.load for view in self._instances.prefill.values()]
        if not loads:
            return MOST_RETRY_AFTER_S
        share = self._queue.tokens // len(loads)
        wait_s = min(load.predicted_ttft_s(share) for load in loads)
        return float(min(MOST_RETRY_AFTER_S, max(1, math.ceil(wait_s))))

    def group_blocks(self, tokens: int, requests: int) -> list[int]:
        """Blocks that each answer to a prompt of `tokens` needs: the first needs all, the others those not shared."""
        blocks = self._state.blocks_for(tokens)
        return [blocks] + [blocks - tokens // self._block_size] * (requests - 1)

    def reserve_blocks(self, shard: PoolShard) -> int:
        """Blocks of a shard that no prefill may take: they are for running requests that grow and are evicted.

        This is the configured share, but at least room to evict the longest request of each decode instance that evicts
        to this shard and runs several requests.
        """
        share = math.ceil(shard.capacity * self._config.kv_pool.growth_reserve)
        evictable = 0
        for view in self._state.decode_at(shard):
            if view.report is not None and (len(view.decoding) > 1 or view.size > 1):
                evictable += self._state.blocks_for(view.report.longest_tokens) + 1
        return min(max(share, evictable), shard.capacity // 2)

    def missing_blocks(self, shard: PoolShard, blocks: int, most_tokens: int, own_blocks: int = 0) -> int:
        """Blocks that a shard lacks to begin a prefill of `blocks` more; 0 or less: it may begin.

        Beside the reserve, the request must have room to grow to `most_tokens`. A shard that holds only the request's
        `own_blocks` takes whatever fits at all, so that a large request is never stuck.
        """
        if shard.committed <= own_blocks and not shard.reserved:
            return blocks - shard.free
        growth = min(self._state.blocks_for(most_tokens), shard.capacity // 4)
        return blocks + max(self.reserve_blocks(shard), growth) + shard.reserved - shard.free
