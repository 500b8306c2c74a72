"""Bring a request's KV back to the pool: only what is new, where the pool still holds the rest."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.control.convert import key_from_proto
from alignedserve.errors import AlignedServeError
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer.channel import Channel


async def write_back(
    pool: PoolWriter, channel: Channel, stored: pb.StoredRequest, source_ids: Sequence[int], block_size: int
) -> pb.StoredRequest:
    """Copy the KV in `source_ids` (blocks of the channel's source) to the pool and commit it.

    `stored` says how many tokens there are, and what of them the pool holds already: its full blocks are kept, the
    last, partly filled one is written anew beside the old, so that a reader of the old never sees it change. Where the
    pool has dropped its copy meanwhile, everything is written. Returns `stored` as it now lies in the pool.
    """
    kept = min(stored.pool_tokens // block_size, len(stored.pool_block_ids))
    if stored.pool_tokens < stored.kv_tokens or not stored.pool_block_ids:
        try:
            block_ids = await _write(pool, channel, stored, source_ids, stored.pool_block_ids[:kept])
        except AlignedServeError:
            if not kept:
                raise
            block_ids = await _write(pool, channel, stored, source_ids, ())
    else:
        block_ids = list(stored.pool_block_ids)
    result = pb.StoredRequest()
    result.CopyFrom(stored)
    result.store_id = stored.pool_id
    result.pool_tokens = stored.kv_tokens
    result.block_ids[:] = block_ids
    result.pool_block_ids[:] = block_ids
    return result


async def _write(
    pool: PoolWriter, channel: Channel, stored: pb.StoredRequest, source_ids: Sequence[int], kept: Sequence[int]
) -> list[int]:
    fresh = await pool.take(len(source_ids) - len(kept))
    try:
        await channel.copy(list(source_ids[len(kept) :]), fresh)
        block_ids = [*kept, *fresh]
        await pool.commit(key_from_proto(stored.spec.key), stored.kv_tokens, block_ids, kept_blocks=len(kept))
    except AlignedServeError:
        pool.give(fresh)
        raise
    return block_ids
