"""Writes a request's KV back to the pool. If this node's shard still holds a part, only the rest is copied."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.control.convert import key_from_proto
from alignedserve.errors import AlignedServeError
from alignedserve.kv_pool.stored import pack
from alignedserve.kv_pool.writer import PoolWriter
from alignedserve.proto import common_pb2 as pb
from alignedserve.transfer.copier import Copier, Route


async def write_back(
    pool: PoolWriter, copier: Copier, source: Route, stored: pb.StoredRequest, block_size: int
) -> pb.StoredRequest:
    """Copy the KV of `source`, whose channel leads to this node's shard, and commit it there.

    `stored` has the number of tokens, and the part of them that the pool already holds. If a shard holds all of them,
    nothing is written. Else full blocks in this node's shard are kept. A last, partly filled block is written to a new
    block, so that a reader of the old block never sees it change. KV that is in another shard, or was dropped from this
    one meanwhile, is written in full. Returns `stored` with the KV's new place in the pool.

    Raises TransferError if the copy fails or the shard refuses the commit, and StaleError if a newer epoch has replaced
    the request.
    """
    if stored.pool_block_ids and stored.pool_tokens >= stored.kv_tokens:
        return _in_pool(stored, stored.pool_id, stored.pool_block_ids, stored.pool_checksums)
    here = stored.pool_id == source.channel.destination.store_id
    kept = min(stored.pool_tokens // block_size, len(stored.pool_block_ids)) if here else 0
    try:
        return await _write(pool, copier, source, stored, kept)
    except AlignedServeError:
        if not kept:
            raise
        return await _write(pool, copier, source, stored, 0)


async def _write(
    pool: PoolWriter, copier: Copier, source: Route, stored: pb.StoredRequest, kept: int
) -> pb.StoredRequest:
    """Write the blocks after the first `kept` blocks of the pool's copy, and commit both."""
    route = Route(source.channel, source.source_ids[kept:], source.checksums[kept:])
    fresh = await pool.take(len(route.source_ids))
    key = key_from_proto(stored.spec.key)
    try:
        await copier.copy([route, route], fresh, key.request_id)
        block_ids = [*stored.pool_block_ids[:kept], *fresh]
        checksums = [*stored.pool_checksums[:kept], *route.checksums]
        payload = pack(stored.spec, stored.prefill_id, stored.weights, stored.evicted_ns, stored.evictions)
        held = await pool.commit(key, stored.kv_tokens, block_ids, None, kept, checksums, payload)
    except AlignedServeError:
        pool.give(fresh)
        raise
    return _in_pool(stored, source.channel.destination.store_id, held.block_ids, held.checksums)


def _in_pool(
    stored: pb.StoredRequest, pool_id: str, block_ids: Sequence[int], checksums: Sequence[int]
) -> pb.StoredRequest:
    result = pb.StoredRequest()
    result.CopyFrom(stored)
    result.store_id = result.pool_id = pool_id
    result.pool_tokens = stored.kv_tokens
    for ids in (result.block_ids, result.pool_block_ids):
        ids[:] = block_ids
    for sums in (result.checksums, result.pool_checksums):
        sums[:] = checksums
    return result
