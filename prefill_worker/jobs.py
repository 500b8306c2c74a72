"""What a prefill instance has of a prompt: its job, the KV that there was before, and the results of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alignedserve.engine.live import LiveRequest
from alignedserve.errors import AlignedServeError
from alignedserve.prefill_worker.layerwise import Ahead
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import RequestKey, RequestSpec, TokenLogprobs

TokenEvents = list[tuple[str, gw.TokenEvent]]


@dataclass(frozen=True, slots=True)
class Base:
    """The KV of a prompt's first `tokens` tokens, in `block_ids` of the shard `pool_id`.

    `here`: it is this node's shard, so its blocks can be kept when the prompt is committed. `cached`: the prefix cache
    had it; else an earlier epoch of the request computed it. `disk_tokens`: of those that came from disk.
    """

    tokens: int
    block_ids: list[int]
    checksums: list[int]
    pool_id: str
    here: bool
    cached: bool = False
    disk_tokens: int = 0

    def after(self, blocks: int) -> Base:
        """What of it lies after the first `blocks` blocks, to be fetched."""
        return replace(self, block_ids=self.block_ids[blocks:], checksums=self.checksums[blocks:])

    def kept_blocks(self, block_size: int) -> list[int]:
        """The full blocks of this node's shard, which need not be written again."""
        return self.block_ids[: self.tokens // block_size] if self.here else []


@dataclass(slots=True)
class PromptJob:
    """The requests of one group (n answers to one prompt), computed once. `lead` names the job.

    `pin`: the request of the group that holds `base` in the pool, if the prefix cache had it.
    """

    lead: RequestKey
    pin: RequestKey
    members: list[LiveRequest]
    tokens: list[int]
    base: Base | None = None
    started: bool = False
    ahead: Ahead | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def logprob_count(self) -> int | None:
        """Requested log-probabilities per prompt token; None if not requested, or already delivered."""
        first = self.members[0].spec
        return None if first.output_token_ids else first.sampling.prompt_logprobs


@dataclass(slots=True)
class Computed:
    """The results of one pass or command. The worker's event loop handles them in order.

    `prefilled` jobs hold their cache blocks until `PrefillLoop.release`.
    """

    events: TokenEvents = field(default_factory=list)
    finished: list[RequestKey] = field(default_factory=list)
    prefilled: list[PrefilledJob] = field(default_factory=list)
    failed: list[tuple[RequestKey, AlignedServeError]] = field(default_factory=list)
    lost: list[RequestKey] = field(default_factory=list)  # their gateway cannot be reached
    unpinned: list[RequestKey] = field(default_factory=list)  # the pins of jobs that ended here
    let_go: list[tuple[RequestKey, Base]] = field(default_factory=list)  # pins that are not needed, of jobs that go on
    fatal: BaseException | None = None  # the loop has ended with this


@dataclass(slots=True)
class PrefilledJob:
    """A computed job. The KV of `tokens` is in `block_ids` of the instance's cache; `members` go on to decode.

    Without members all requests have ended, and the KV is only to be cached.
    """

    lead: RequestKey
    members: list[RequestSpec]
    tokens: list[int]
    block_ids: list[int]
    base: Base | None = None
    ahead: Ahead | None = None
    pin: RequestKey | None = None  # the request that holds a cached base, if it is not the lead
    salt: bytes = b""

    @property
    def kv_tokens(self) -> int:
        return len(self.tokens)
