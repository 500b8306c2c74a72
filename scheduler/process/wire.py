"""Between the messages of gateways and workers and the values that the core knows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from alignedserve.control.convert import failure_to_proto, key_from_proto, key_to_proto, keys_to_proto
from alignedserve.errors import AlignedServeError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import prefill_worker_pb2 as pw
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.actions import MarkUrgent, Prefetch, Recall
from alignedserve.scheduler.core.events import (
    BufferKind,
    DecodeReported,
    HeldRequest,
    PairsChanged,
    PrefillReported,
    RequestMeta,
    ShardsChanged,
)
from alignedserve.scheduler.cost.pass_model import Passes


def request_meta(key: RequestKey, head: pb.RequestHead) -> RequestMeta:
    """A request that was submitted. Of the million that may be kept, each has no string of its own but its id."""
    return RequestMeta(
        key=key,
        prefix_tokens=head.prompt_tokens + head.output_tokens,
        max_total_tokens=head.prompt_tokens + head.max_tokens,
        group_id=head.group_id if head.group_size > 1 else "",
        gateway_id=sys.intern(head.gateway_id),
        age_s=max(0.0, (time.time_ns() - head.arrival_ns) / 1e9),
        wait_objective_s=head.wait_objective_s,
    )


def pairs_changed(view: sv.ClusterView) -> PairsChanged:
    """Who prefetches for whom, and over which links."""
    pairs: dict[str, list[str]] = {}
    for pair in view.pairs:
        pairs.setdefault(pair.decode_id, []).append(pair.prefill_id)
    ranks = sorted((pair.decode_id, pair.prefill_id, pair.link_rank) for pair in view.pairs if pair.link_rank)
    return PairsChanged(tuple((name, tuple(paired)) for name, paired in sorted(pairs.items())), tuple(ranks))


def shards_changed(view: sv.ClusterView) -> ShardsChanged:
    """Which shards of the pool there are, and which of them each instance writes to: its own node's."""
    of_node = {shard.node_id: shard.pool_id for shard in view.pools}
    workers = (peer for peer in view.peers if peer.process.role in ("prefill", "decode"))
    homes = sorted((peer.process.id, of_node[peer.node_id]) for peer in workers if peer.node_id in of_node)
    return ShardsChanged(tuple(shard.pool_id for shard in view.pools), tuple(homes))


def held_requests(inventory: dw.DecodeInventory) -> Iterator[HeldRequest]:
    """What a decode instance says that it decides about."""
    for held in inventory.requests:
        meta = RequestMeta(
            key=key_from_proto(held.key),
            prefix_tokens=held.prefix_tokens,
            max_total_tokens=held.max_total_tokens,
            group_id=held.group_id,
            gateway_id=held.gateway_id,
            wait_objective_s=held.wait_objective_s,
        )
        prefill_id, _, buffer = held.store_id.partition("/")
        kind = BufferKind.REQUESTS if buffer.startswith("requests") else BufferKind.BATCH
        yield HeldRequest(meta, held.running, held.kv_tokens, held.blocks, prefill_id if buffer else "", kind)


def prefetch_command(action: Prefetch, pool_ids: Sequence[str]) -> pw.PrefillCommand | dw.DecodeCommand:
    """To the prefill instance whose buffers they go through; to the decode instance where there are none.

    `pool_ids`: the shard that has each.
    """
    prefetch = pw.Prefetch(
        decode_id=action.decode_id,
        buffer=pw.Buffer.Name(int(action.buffer)),
        batch_id=action.batch_id,
        requests=[
            pb.PooledRequest(key=key_to_proto(key), pool_id=pool_id)
            for key, pool_id in zip(action.keys, pool_ids, strict=True)
        ],
    )
    if action.prefill_id is not None:
        return pw.PrefillCommand(prefetch=prefetch)
    return dw.DecodeCommand(candidates=prefetch)


def candidates_command(action: Recall | MarkUrgent) -> dw.DecodeCommand:
    if isinstance(action, Recall):
        return dw.DecodeCommand(recall=keys_to_proto(action.keys))
    urgent = dw.UrgentRequests(keys=map(key_to_proto, action.keys), due_in_s=action.due_in_s)
    return dw.DecodeCommand(urgent=urgent)


def prefill_reported(prefill_id: str, message: pw.PrefillDescription) -> PrefillReported:
    return PrefillReported(
        prefill_id,
        message.pending_tokens,
        message.cache_blocks,
        message.batch_buffer_blocks,
        message.batch_buffer_free_blocks,
        message.requests_buffer_blocks,
        message.requests_buffer_free_blocks,
        message.pool_wait_blocks,
        _passes(message.measured),
    )


def decode_reported(decode_id: str, message: dw.DecodeDescription) -> DecodeReported:
    return DecodeReported(
        decode_id,
        message.cache_blocks,
        message.cache_free_blocks,
        message.running,
        message.shortest_tokens,
        message.longest_tokens,
        message.batch_id,
        message.batch_buffer_requests,
        message.requests_buffer_requests,
        message.pool_wait_blocks,
        _passes(message.measured),
        message.batch_shortest_tokens,
        message.batch_longest_tokens,
    )


def _passes(message: pb.Passes) -> Passes | None:
    if not message.passes:
        return None
    return Passes(message.passes, message.tokens, message.cached_tokens, message.seconds)


def rejection(keys: Iterable[RequestKey], error: AlignedServeError) -> sc.Rejection:
    return sc.Rejection(keys=[key_to_proto(key) for key in keys], failure=failure_to_proto(error))
