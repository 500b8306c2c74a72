"""What a decode instance holds of a request, and what one turn of its loop led to."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.control.convert import key_from_proto, spec_to_proto
from alignedserve.engine.live import LiveRequest
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import RequestKey


@dataclass(slots=True)
class Held:
    """A candidate or a running request. `stored` is where its KV lay last; `resident`: it is in the cache now."""

    stored: pb.StoredRequest
    live: LiveRequest | None = None
    resident: bool = False
    cancelled: bool = False  # while a copy is in flight: what ends with it
    evictions_fail_since_s: float | None = None  # the first and the last eviction in a row that failed
    eviction_failed_s: float = 0.0

    def describe(self) -> dw.HeldRequest:
        """As a scheduler that does not know it needs it."""
        spec = self.stored.spec
        answer = self.live.spec.output_token_ids if self.live is not None else spec.output_token_ids
        prompt = len(spec.prompt_token_ids)
        return dw.HeldRequest(
            key=spec.key,
            prefix_tokens=prompt + len(answer),
            max_total_tokens=prompt + spec.sampling.max_tokens,
            group_id=spec.group_id,
            gateway_id=spec.gateway_id,
            running=self.resident,
            kv_tokens=prompt + len(answer) - 1 if self.resident else self.stored.kv_tokens,
            blocks=len(self.stored.block_ids),
            store_id=self.stored.store_id,
            wait_objective_s=spec.wait_objective_s,
        )

    def current(self) -> pb.StoredRequest:
        """`stored`, with the tokens and times of now."""
        stored = pb.StoredRequest()
        stored.CopyFrom(self.stored)
        if self.live is not None:
            stored.spec.CopyFrom(spec_to_proto(self.live.spec))
        return stored


@dataclass(frozen=True, slots=True)
class EvictionOrder:
    """Copy `block_ids` of the cache out; `stored` says what they hold, and what of it the pool has already."""

    key: RequestKey
    stored: pb.StoredRequest
    block_ids: list[int]
    to_pool: bool


@dataclass(slots=True)
class Outcome:
    """Handled on the worker's event loop, in order.

    `release`: pulled, their source may free them. `give_back`: candidates that return to the tree. `returned`: evicted
    to the pool and committed there. `lost`: their KV is gone, the gateway is to submit them again.
    `unreadable`: likewise, and what the pool holds of them could not be read.
    `inventory`: asked for; what is reported after it has happened after it.
    """

    events: list[tuple[str, gw.TokenEvent]] = field(default_factory=list)
    finished: list[RequestKey] = field(default_factory=list)
    joined: list[RequestKey] = field(default_factory=list)
    release: list[pb.StoredRequest] = field(default_factory=list)
    give_back: list[pb.StoredRequest] = field(default_factory=list)
    evictions: list[EvictionOrder] = field(default_factory=list)
    returned: list[pb.StoredRequest] = field(default_factory=list)
    lost: list[RequestKey] = field(default_factory=list)
    unreadable: list[RequestKey] = field(default_factory=list)
    inventory: list[dw.HeldRequest] | None = None
    status_changed: bool = False
    drained: bool = False  # told to drain, and nothing is left here
    fatal: BaseException | None = None  # the loop has ended with this

    def drop(self, held: Held) -> None:
        """A cancelled request holds nothing here any more; what it holds at its source is to be freed."""
        self.release.append(held.stored)
        self.finished.append(key_from_proto(held.stored.spec.key))

    @property
    def holds_anything(self) -> bool:
        return bool(
            self.events
            or self.finished
            or self.joined
            or self.release
            or self.give_back
            or self.evictions
            or self.returned
            or self.lost
            or self.unreadable
            or self.inventory is not None
        )
