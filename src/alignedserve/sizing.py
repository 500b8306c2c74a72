"""How many blocks each store gets: decided once for the cluster, from model, memory and configuration."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from alignedserve.config import Config
from alignedserve.errors import ResourceError
from alignedserve.model import ModelInfo

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Capacities in blocks. `prefill_cache` and `decode_cache` are 0 where an instance's own device decides."""

    block_size: int
    pool: int
    prefill_cache: int
    decode_cache: int
    batch_buffer: int
    requests_buffer: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StorePlan:
        return cls(**json.loads(text))


def plan_stores(config: Config, model: ModelInfo, available_bytes: int) -> StorePlan:
    """Divide host memory. `available_bytes` is what the node with the pool has free.

    Caches and buffers on a CPU are touched only as they fill, so they are sized for work, within a share of memory:
    a decode cache holds four requests of the longest kind (32,768 tokens at least), a prefill cache two.

    Raises ResourceError, with the figures, where the pool asked for does not fit or cannot hold one block.
    """
    geometry = model.geometry(config.kv_pool.block_size)
    per_instance = available_bytes // (8 * max(1, config.cluster.prefill + config.cluster.decode))
    longest = geometry.blocks_for(model.max_positions) + 1

    def own(configured: int, requests: int, least_tokens: int) -> int:
        wanted = max(requests * longest, geometry.blocks_for(least_tokens))
        return configured or max(2, min(wanted, per_instance // geometry.block_bytes))

    decode_cache = own(config.decode.cache_blocks, 4, 32768)
    prefill_cache = own(config.prefill.cache_blocks, 2, 16384)
    largest = min(longest, decode_cache)
    share = config.scheduler.max_batch_blocks or int(decode_cache * config.scheduler.max_batch_share)
    served = -(-config.cluster.decode // config.cluster.prefill)  # decode instances that share one's buffers
    batch_buffer = config.prefill.batch_buffer_blocks or served * max(share, largest)
    # A decode instance leases room for its largest request there, to evict without asking; the rest is for late joins.
    requests_buffer = config.prefill.requests_buffer_blocks or served * largest + batch_buffer // 2
    return StorePlan(
        block_size=config.kv_pool.block_size,
        pool=_pool_blocks(config, geometry.block_bytes, available_bytes),
        prefill_cache=prefill_cache,
        decode_cache=decode_cache,
        batch_buffer=batch_buffer,
        requests_buffer=requests_buffer,
    )


def _pool_blocks(config: Config, block_bytes: int, available_bytes: int) -> int:
    wanted = int(config.kv_pool.size_gib * GIB) or available_bytes // 4
    if wanted > available_bytes:
        raise ResourceError(
            f"kv_pool.size_gib asks for {wanted / GIB:.2f} GiB, but only {available_bytes / GIB:.2f} GiB of memory are "
            "available; ask for less"
        )
    blocks = wanted // block_bytes
    if blocks < 2:
        raise ResourceError(
            f"a pool of {wanted / GIB:.3f} GiB holds {blocks} blocks of {block_bytes / (1 << 20):.2f} MiB; "
            "set kv_pool.size_gib higher"
        )
    return blocks
