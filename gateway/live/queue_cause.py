"""What requests in the queue wait for at this moment: a prefill instance, or room in the KV pool."""

from __future__ import annotations

from alignedserve.gateway.live.explain import FOR_PREFILL, FOR_ROOM
from alignedserve.gateway.live.samples import Samples

ROOMY_SHARE = 0.5  # of the blocks of the pool: no reserve is larger (`Admission.reserve_blocks`)


def queue_cause(now: Samples) -> str:
    """FOR_PREFILL if every instance has work and the pool has room, FOR_ROOM if it is the reverse; "": not known.

    `now`: the metrics of all processes. Shards are the stores with the name of their process.
    """
    work = [tokens for _, tokens in now.each("prefill_pending_tokens")]
    shares = [
        (now.sum("kv_blocks", store=its["store"]) - now.sum("kv_blocks", store=its["store"], state="owned")) / capacity
        for its, capacity in now.each("kv_capacity_blocks")
        if capacity and its.get("store") == its.get("instance")
    ]
    if not work or not shares:
        return ""
    if all(work) and min(shares) >= ROOMY_SHARE:
        return FOR_PREFILL
    return FOR_ROOM if not all(work) and max(shares) < ROOMY_SHARE else ""
