"""Packs the StoredRequest of a request that waits in the pool into bytes, and completes it when it is read."""

from __future__ import annotations

from alignedserve.control.convert import enter_stage
from alignedserve.errors import TransferError
from alignedserve.kv_pool.records import Holding
from alignedserve.proto import common_pb2 as pb
from alignedserve.request import Stage


def pack(spec: pb.RequestSpec, prefill_id: str, evicted_ns: int = 0) -> bytes:
    """The payload of a commit: the StoredRequest without its block ids, which the shard knows."""
    return pb.StoredRequest(spec=spec, prefill_id=prefill_id, evicted_ns=evicted_ns).SerializeToString()


def unpacked(payload: bytes, holding: Holding, pool_id: str) -> bytes:
    """The serialised StoredRequest with the blocks of `holding`. (Protobuf merges messages whose bytes are joined.)"""
    where = pb.StoredRequest(
        store_id=pool_id,
        kv_tokens=holding.kv_tokens,
        block_ids=holding.block_ids,
        checksums=holding.checksums,
        pool_id=pool_id,
        pool_tokens=holding.kv_tokens,
        pool_block_ids=holding.block_ids,
        pool_checksums=holding.checksums,
    )
    return payload + where.SerializeToString()


def renewed(payload: bytes, head: pb.RequestHead, now_ns: int) -> bytes:
    """The payload for the epoch of `head`, which goes on after the tokens that were delivered.

    `now_ns`: Unix time in ns. Raises TransferError if some of the delivered tokens are not in `payload`.
    """
    stored = pb.StoredRequest.FromString(payload)
    spec = stored.spec
    if len(spec.output_token_ids) < head.output_tokens or len(spec.prompt_token_ids) != head.prompt_tokens:
        raise TransferError(f"{head.key.request_id} was stored without all of its tokens")
    del spec.output_token_ids[head.output_tokens :]
    spec.key.CopyFrom(head.key)
    spec.group_id, spec.group_size = head.group_id, head.group_size
    spec.timings.CopyFrom(pb.Timings(stage=Stage.QUEUE, since_ns=head.submitted_ns))
    enter_stage(spec.timings, Stage.POOL, now_ns)
    return pack(spec, stored.prefill_id)


def pooled(stored: pb.StoredRequest) -> pb.PooledRequest:
    """The message that tells the scheduler of a request whose KV is in the pool."""
    spec = stored.spec
    return pb.PooledRequest(
        key=spec.key,
        pool_id=stored.pool_id,
        kv_tokens=stored.pool_tokens,
        blocks=len(stored.pool_block_ids),
        group_id=spec.group_id if spec.group_size > 1 else "",
        evicted_ns=stored.evicted_ns,
    )
