"""Packs the StoredRequest of a request that waits in the pool into bytes, and completes it when it is read."""

from __future__ import annotations

import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from alignedserve.control.convert import enter_stage, key_from_proto, key_to_proto
from alignedserve.control.prefixes import stored_tokens
from alignedserve.errors import AlignedServeError, TransferError
from alignedserve.kv_pool.counts import Grant
from alignedserve.kv_pool.pool import KvPool
from alignedserve.kv_pool.records import Holding
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import kv_pool_pb2 as kp
from alignedserve.request import RequestKey, Stage

logger = logging.getLogger(__name__)

MOST_READ_BYTES = 4 << 20  # a list of stored requests ends once it is larger than this
_MOST_TOKENS = 1 << 20
_MOST_REQUESTS = 1024


def pack(spec: pb.RequestSpec, prefill_id: str, weights: str, evicted_ns: int = 0, evictions: int = 0) -> bytes:
    """The payload of a commit: the StoredRequest without its block ids, which the shard knows."""
    stored = pb.StoredRequest(spec=spec, prefill_id=prefill_id, weights=weights)
    stored.evicted_ns, stored.evictions = evicted_ns, evictions
    return stored.SerializeToString()


def unpacked(payload: bytes, holding: Holding, pool_id: str) -> bytes:
    """The serialised StoredRequest with the blocks of `holding`. (Protobuf merges messages whose bytes are joined.)"""
    where = location(pool_id, holding.kv_tokens, holding.block_ids, holding.checksums)
    return payload + where.SerializeToString()


def stored_in(pool: KvPool, keys: Iterable[RequestKey], pool_id: str) -> Iterator[list[bytes]]:
    """The serialised StoredRequests of those of `keys` that the shard has, in lists of a few MiB."""
    found: list[bytes] = []
    size = 0
    for key in keys:
        try:
            read = pool.read(key)
        except AlignedServeError as error:
            logger.error("%s", error, extra={"request_id": key.request_id})
            continue
        if read is not None:
            found.append(unpacked(read[1], read[0], pool_id))
            size += len(found[-1])
            if size > MOST_READ_BYTES:
                yield found
                found, size = [], 0
    if found:
        yield found


def holding_to_proto(held: Holding, pool_id: str, *, ids: bool = True) -> kp.Holding:
    """The message for `held`. Without `ids` it has the number of blocks, but not their ids and checksums."""
    message = kp.Holding(key=key_to_proto(held.key), kv_tokens=held.kv_tokens, blocks=len(held.block_ids))
    message.pool_id = pool_id
    if ids:
        message.block_ids.extend(held.block_ids)
        message.checksums.extend(held.checksums)
    return message


def weights_of(pool: KvPool, request_id: str) -> str:
    """Those that computed what the request holds in the shard; "" if that is not known."""
    held = pool.holding(request_id)
    try:
        read = pool.read(held.key) if held is not None else None
    except TransferError as error:
        logger.error("%s", error, extra={"request_id": request_id})
        return ""
    return stored_tokens(read[1])[2] if read is not None else ""


def adopted(pool: KvPool, heads: Iterable[pb.RequestHead], pool_id: str) -> tuple[list[kp.Holding], list[Grant]]:
    """Each request adopts the KV of its epoch before. A failure gives an empty holding: the others still get theirs.

    What has no payload (a pin, or KV that was adopted in part) is of weights that are not known: it ends here, and the
    prefix cache finds it again.
    """
    found, grants = [], list[Grant]()
    for head in heads:
        key, most_tokens = key_from_proto(head.key), head.prompt_tokens + head.output_tokens - 1
        held = pool.holding(key.request_id)
        if held is not None and held.payload is None and held.key.epoch < key.epoch:
            grants += pool.drop([(held.key, held.kv_tokens)])
        weights = weights_of(pool, key.request_id)
        # A request without an output token cannot be decoded from its KV, so it needs no payload.
        renew = functools.partial(renewed, head=head, now_ns=time.time_ns()) if head.output_tokens else None
        try:
            (holding,), more = pool.adopt([(key, most_tokens)], renew)
        except AlignedServeError as error:
            logger.warning("the KV of a request was not adopted: %s", error, extra={"request_id": key.request_id})
            found.append(holding_to_proto(Holding(key, 0, ()), pool_id))
            continue
        grants += more
        message = holding_to_proto(holding, pool_id)
        message.blocks = pool.own_blocks(key.request_id) if holding.block_ids else 0
        message.weights = weights
        message.whole = holding.payload is not None and holding.kv_tokens == most_tokens
        found.append(message)
    return found, grants


def location(pool_id: str, kv_tokens: int, blocks: Sequence[int], checksums: Sequence[int]) -> pb.StoredRequest:
    """The fields of a StoredRequest that say where its KV is, of a request whose KV is only in the pool."""
    return pb.StoredRequest(
        store_id=pool_id,
        kv_tokens=kv_tokens,
        block_ids=blocks,
        checksums=checksums,
        pool_id=pool_id,
        pool_tokens=kv_tokens,
        pool_block_ids=blocks,
        pool_checksums=checksums,
    )


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
    return pack(spec, stored.prefill_id, stored.weights)


class LastCommitted:
    """The StoredRequests that this process committed last. A request that is prefetched soon needs no read.

    The blocks that a request holds in a shard change only if its epoch or the length of its KV changes, so these
    identify the copy. Each is kept until it is taken.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS, most_requests: int = _MOST_REQUESTS) -> None:
        """`most_tokens`: the largest sum of KV lengths, and of grammars' characters, that is kept."""
        self._most_tokens, self._most_requests = most_tokens, most_requests
        self._requests: OrderedDict[RequestKey, pb.StoredRequest] = OrderedDict()
        self._tokens = 0  # their sum

    def note(self, stored: pb.StoredRequest) -> None:
        """The request was committed. The oldest are dropped if there are too many."""
        key = key_from_proto(stored.spec.key)
        self._drop(key)
        self._requests[key] = stored
        self._tokens += _size(stored)
        while self._tokens > self._most_tokens or len(self._requests) > self._most_requests:
            self._drop(next(iter(self._requests)))

    def take(self, request: pb.PooledRequest) -> pb.StoredRequest | None:
        """Removes and returns the request. None if this very copy is not known here."""
        stored = self._drop(key_from_proto(request.key))
        if stored is None or (stored.pool_id, stored.pool_tokens) != (request.pool_id, request.kv_tokens):
            return None
        return stored

    def _drop(self, key: RequestKey) -> pb.StoredRequest | None:
        stored = self._requests.pop(key, None)
        self._tokens -= 0 if stored is None else _size(stored)
        return stored


def _size(stored: pb.StoredRequest) -> int:
    return stored.pool_tokens + len(stored.spec.sampling.grammar.text)


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
