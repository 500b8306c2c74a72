"""What the scheduler core is told. Frozen values; times are arguments of `handle`, not fields."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from alignedserve.request import RequestKey
from alignedserve.scheduler.cost.pass_model import Passes


class BufferKind(enum.IntEnum):
    """The two buffers on a prefill instance (paper, section 3.4)."""

    BATCH = 1
    REQUESTS = 2


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """What a policy may know of a request. Never its output length: nobody knows that in production.

    `prefix_tokens` counts the prompt and what was generated in earlier epochs; `max_total_tokens` is the most it can
    grow to. Requests of one `group_id` share their prompt's blocks. `base_tokens`: of so many of them the pool holds
    the KV already, in `base_blocks` blocks that an earlier epoch committed (`own_blocks` of them nobody else's);
    `whole`: it needs no more to decode. `base_pool_id`: the shard that they lie in.
    `age_s`: how long its gateway has had it. `wait_objective_s`: it should not wait longer between its prefill (or an
    eviction) and its next token; 0: the configured default.
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


@dataclass(frozen=True, slots=True)
class Submitted:
    """A group (n answers to one prompt, often one) was submitted."""

    requests: tuple[RequestMeta, ...]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Its KV is committed in the pool; `new_blocks` of its blocks are not shared with an earlier one of its group.

    `pool_id`: the shard that it lies in, which may be another than its base's. Any where only one shard is named.
    """

    key: RequestKey
    kv_tokens: int
    blocks: int
    new_blocks: int
    pool_id: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """Ended (last token, cancelled or a final error) wherever it was; holds nothing there any more."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker could not go on with these: the gateway is to submit them again.

    `distrust`: what the pool holds of them could not be read, and is not to be used again.
    """

    keys: tuple[RequestKey, ...]
    reason: str
    distrust: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """Entered the running batch of `decode_id` for the first time since its prefetch."""

    decode_id: str
    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """Given back by its decode instance: its KV, `kv_tokens` long, is committed in the pool again.

    `waited_s`: since it was evicted. How long one has waited that never joined the core knows itself. `pool_id`: the
    shard that all of it lies in now, which may be another than before. `from_buffer`: a prefill instance says so.
    """

    key: RequestKey
    kv_tokens: int
    blocks: int
    waited_s: float = 0.0
    pool_id: str = ""
    from_buffer: bool = False


@dataclass(frozen=True, slots=True)
class PrefillReported:
    """Free blocks are those that a prefetch could take now: without what is leased for evictions.

    `pool_wait_blocks`: pool blocks that give-backs of its candidates wait for, because the pool has none free.
    `measured`: chunks that it has computed since the last time that it said so.
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


@dataclass(frozen=True, slots=True)
class DecodeReported:
    """`pool_wait_blocks`: pool blocks that its evictions (and give-backs) wait for, because the pool has none free.

    `measured`: iterations since the last time that it said so. `batch_shortest_tokens`, `batch_longest_tokens`: of
    those that its running batch was formed of; 0 where none of them are left.
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


@dataclass(frozen=True, slots=True)
class PoolReported:
    pool_id: str
    capacity_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that a decode instance says it decides about; `blocks` is what its KV takes up.

    Of a candidate: the buffer that it lies in, and whose that is ("": it lies in the pool).
    """

    meta: RequestMeta
    running: bool
    kv_tokens: int
    blocks: int
    prefill_id: str
    buffer: BufferKind


@dataclass(frozen=True, slots=True)
class InventoryTaken:
    """What a decode instance decides about, as it says itself.

    `restore`: this core has just started, and takes over what it does not know. Else such requests were lost or ended
    here, or are an older epoch's: they are cancelled there.
    """

    decode_id: str
    requests: tuple[HeldRequest, ...]
    restore: bool


@dataclass(frozen=True, slots=True)
class PoolInventoryTaken:
    """Everything that a shard holds, as (KV tokens, blocks): what waits in it but is not there is lost.

    `asked_s`: what has come to it since it was asked, by the clock of `handle`, may be there all the same.
    """

    copies: Mapping[RequestKey, tuple[int, int]]
    pool_id: str = ""
    asked_s: float = math.inf


@dataclass(frozen=True, slots=True)
class CopiesFound:
    """Copies in a shard, as (KV tokens, blocks), that nobody looked for: where they are strays they are dropped."""

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
    """All shards of the pool that there are; one that is no longer named has gone with its node, and its KV with it.

    `homes`: (instance, shard) of each prefill and decode instance: it writes to that shard only, its own node's. Until
    this was first said there is one shard, which is everybody's.
    """

    pool_ids: tuple[str, ...]
    homes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PairsChanged:
    """Decode instance -> the prefill instances that prefetch for it; an empty tuple: straight from the pool.

    `link_ranks`: `(decode instance, prefill instance, rank)` of the pairs whose link is not of the best kind, rank 0.
    """

    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    link_ranks: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DrainingChanged:
    """All instances that are to end: nothing new is sent to them. They may come back without having ended."""

    instance_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class GatewayLost:
    gateway_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


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
