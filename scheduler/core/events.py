"""Events of the scheduler core. Frozen values; times are arguments of `handle`, not fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from alignedserve.request import RequestKey
from alignedserve.scheduler.cost.pass_model import Passes
from alignedserve.scheduler.instance.plan import BufferKind


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """What a policy may know of a request. Never its output length, which is unknown in production.

    `prefix_tokens` counts the prompt and the tokens generated in earlier epochs. `max_total_tokens` is the most it can
    grow to. Requests of one `group_id` share their prompt's blocks. `base_tokens`: the number of tokens whose KV the
    pool already holds, in `base_blocks` blocks that an earlier epoch committed, `own_blocks` of them not shared.
    `whole`: it needs no more KV to decode. `base_pool_id`: the shard that holds the base. `age_s`: how long its gateway
    has had it. `wait_objective_s`: the longest wait between its prefill (or an eviction) and its next token; 0: the
    configured default. `priority`: of what waits, a lower one goes first. `cached`: (shard, tokens) of the prompt's KV
    that shards' prefix caches had when it was submitted. `reads`: (shard, seconds) until what of it is on disk is in
    memory, as predicted then. `marks`: of the prompt's beginnings (`prefix_marks.py`).
    """

    key: RequestKey
    prefix_tokens: int
    max_total_tokens: int
    group_id: str
    gateway_id: str
    base_tokens: int = 0
    base_blocks: int = 0
    own_blocks: int = 0
    whole: bool = False
    base_pool_id: str = ""
    age_s: float = 0.0
    wait_objective_s: float = 0.0
    priority: int = 0
    cached: tuple[tuple[str, int], ...] = ()
    reads: tuple[tuple[str, float], ...] = ()
    marks: bytes = b""

    def reads_left(self, waited_s: float = 0.0) -> dict[str, float]:
        """`reads` after it has waited here for `waited_s`. KV of its own is used where it is."""
        passed_s = self.age_s + waited_s
        reads = () if self.base_tokens else self.reads
        return {shard: ready_s - passed_s for shard, ready_s in reads if ready_s > passed_s}


@dataclass(frozen=True, slots=True)
class Submitted:
    """A group (n answers to one prompt, often one) was submitted."""

    requests: tuple[RequestMeta, ...]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The request's KV is committed in the pool; `new_blocks` of its blocks are not shared with its group.

    `pool_id`: the shard that holds it, which may differ from its base's. May be any value if there is only one shard.
    """

    key: RequestKey
    kv_tokens: int
    blocks: int
    new_blocks: int
    pool_id: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The requests ended (last token, cancelled or a final error) and hold nothing at their worker any more."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker could not continue these requests: the gateway is to submit them again.

    `distrust`: the pool's copies of them could not be read, and must not be used again.
    """

    keys: tuple[RequestKey, ...]
    reason: str
    distrust: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """The requests entered the running batch of `decode_id` for the first time since their prefetch."""

    decode_id: str
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """A decode instance gave the request back: its KV, `kv_tokens` long, is committed in the pool again.

    `waited_s`: time since it was evicted. For a request that never joined, the core knows the wait itself. `pool_id`:
    the shard that holds all of it now, which may differ from before. `from_buffer`: a prefill instance reports the
    return.
    """

    key: RequestKey
    kv_tokens: int
    blocks: int
    waited_s: float = 0.0
    pool_id: str = ""
    from_buffer: bool = False


@dataclass(frozen=True, slots=True)
class PrefillReported:
    """Free blocks are those that a prefetch could take now, without those leased for evictions.

    `pool_wait_blocks`: pool blocks that returns of its candidates wait for, because the pool has none free. `measured`:
    chunks that it has computed since its last report of them. `copy_s_per_token`: of cached prefixes that it has copied
    from other shards; 0: there were none.
    """

    prefill_id: str
    pending_tokens: int
    cache_blocks: int
    batch_buffer_blocks: int
    batch_buffer_free_blocks: int
    requests_buffer_blocks: int
    requests_buffer_free_blocks: int
    pool_wait_blocks: int = 0
    measured: Passes | None = None
    copy_s_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeReported:
    """`pool_wait_blocks`: pool blocks that its evictions (and returns) wait for, because the pool has none free.

    `measured`: iterations since its last report of them. `batch_shortest_tokens`, `batch_longest_tokens`: prefix
    lengths of the requests that its running batch was formed from; 0 if none of them are left. `max_running`: as in
    `IterationStatus`; 0: as configured. `request_blocks`: the most of one request; 0: `cache_blocks`.
    """

    decode_id: str
    cache_blocks: int
    cache_free_blocks: int
    running: int
    shortest_tokens: int
    longest_tokens: int
    batch_id: int
    batch_buffer_requests: int
    requests_buffer_requests: int
    pool_wait_blocks: int = 0
    measured: Passes | None = None
    batch_shortest_tokens: int = 0
    batch_longest_tokens: int = 0
    max_running: int = 0
    request_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PoolReported:
    pool_id: str
    capacity_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that a decode instance reports to decide about; `blocks` is the size of its KV.

    For a candidate: its buffer, and the prefill instance of that buffer ("": its KV is in the pool).
    """

    meta: RequestMeta
    running: bool
    kv_tokens: int
    blocks: int
    prefill_id: str
    buffer: BufferKind


@dataclass(frozen=True, slots=True)
class InventoryTaken:
    """The requests that a decode instance reports to decide about.

    `restore`: this core has just started, and adopts the requests it does not know. Otherwise such requests were lost
    or ended here, or belong to an older epoch: they are cancelled there.
    """

    decode_id: str
    requests: tuple[HeldRequest, ...]
    restore: bool


@dataclass(frozen=True, slots=True)
class PoolInventoryTaken:
    """Everything that a shard holds, as (KV tokens, blocks). A request that waits in it but is not listed is lost.

    `asked_s`: when the inventory was requested, by the clock of `handle`. Copies that came later may be missing from
    it.
    """

    copies: Mapping[RequestKey, tuple[int, int]]
    pool_id: str = ""
    asked_s: float = math.inf


@dataclass(frozen=True, slots=True)
class CopiesFound:
    """Copies that were found in a shard, as (KV tokens, blocks). Stray copies are dropped."""

    pool_id: str
    copies: Mapping[RequestKey, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """`role` is "prefill", "decode" or "kv_pool"."""

    role: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class InstanceLost:
    role: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class ShardsChanged:
    """All current shards of the pool. A shard that is no longer named is gone with its node, and its KV with it.

    `homes`: (instance, shard) of each prefill and decode instance: it writes only to that shard, on its own node. Until
    the first such event there is one shard, which all instances use.
    """

    pool_ids: tuple[str, ...]
    homes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PairsChanged:
    """Decode instance -> the prefill instances that prefetch for it; an empty tuple: it copies from the pool itself.

    `link_ranks`: `(decode instance, prefill instance, rank)` of the pairs whose link is not of the best kind, rank 0.
    """

    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    link_ranks: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DrainingChanged:
    """All draining instances: they get no new work. They may return without having ended."""

    instance_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class GatewayLost:
    gateway_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Submitted
    | CancelRequested
    | Prefilled
    | Finished
    | Lost
    | Joined
    | Returned
    | PrefillReported
    | DecodeReported
    | PoolReported
    | InventoryTaken
    | PoolInventoryTaken
    | CopiesFound
    | InstanceJoined
    | InstanceLost
    | ShardsChanged
    | PairsChanged
    | DrainingChanged
    | GatewayLost
    | Tick
)
