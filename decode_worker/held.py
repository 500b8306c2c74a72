"""The state of a request on a decode instance, and the outcome of one turn of the decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from alignedserve.control.convert import key_from_proto, spec_to_proto
from alignedserve.decode_worker.endings import Ending
from alignedserve.engine.live import LiveRequest
from alignedserve.grammar.base import Grammar
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import decode_worker_pb2 as dw
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import BufferKind, Candidate
from alignedserve.scheduler.instance.resident import BlockChain
from alignedserve.scheduler.priorities import rank_of
from alignedserve.transfer.completion import Completion


@dataclass(slots=True)
class Held:
    """A candidate or a running request. `stored` names the last place of its KV; `resident`: it is in the cache now.

    `compiling`: of its grammar; None without one. `chain`: of its KV when it was offered.
    """

    stored: pb.StoredRequest
    compiling: Future[Grammar] | None = None
    chain: BlockChain | None = None
    live: LiveRequest | None = None
    resident: bool = False
    cancelled: bool = False  # cancelled during a copy: the request ends with the copy
    evictions_fail_since_s: float | None = None  # start of a series of failed evictions; the next field is its end
    eviction_failed_s: float = 0.0

    def describe(self) -> dw.HeldRequest:
        """The description of the request for a scheduler that does not know it."""
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
            priority=spec.priority,
        )

    def candidate(self, buffer: BufferKind, batch_id: int) -> Candidate:
        """The request as the iteration scheduler sees it while it waits in a buffer."""
        stored = self.stored
        spec = stored.spec
        return Candidate(
            key=key_from_proto(spec.key),
            kv_tokens=stored.kv_tokens,
            max_total_tokens=len(spec.prompt_token_ids) + spec.sampling.max_tokens,
            chain=self.chain,
            buffer=buffer,
            batch_id=batch_id,
            wait_objective_s=spec.wait_objective_s,
            rank=rank_of(spec.priority),
            evictions=stored.evictions,
        )

    def current(self) -> pb.StoredRequest:
        """`stored` with the current tokens and times."""
        stored = pb.StoredRequest()
        stored.CopyFrom(self.stored)
        if self.live is not None:
            stored.spec.CopyFrom(spec_to_proto(self.live.spec))
        return stored


@dataclass(frozen=True, slots=True)
class EvictionOrder:
    """Copy `block_ids` out of the cache. `stored` describes their KV, and the part that the pool already has."""

    key: RequestKey
    stored: pb.StoredRequest
    block_ids: list[int]
    to_pool: bool


@dataclass(slots=True)
class Outcome:
    """The results of one turn or message. The worker's event loop handles them in order.

    `release`: requests whose source may free its blocks. `give_back`: candidates that return to the quad-tree.
    `endings`: answers whose KV is to be cached.
    `returned`: requests that were evicted to the pool and committed there. `lost`: requests whose KV is lost; their
    gateways submit them again. `unreadable`: the same, and the pool's KV of them could not be read. `inventory`: the
    reply to a query; later reports describe later events.
    """

    events: list[tuple[str, gw.TokenEvent]] = field(default_factory=list)
    finished: list[RequestKey] = field(default_factory=list)
    joined: list[RequestKey] = field(default_factory=list)
    release: list[pb.StoredRequest] = field(default_factory=list)
    give_back: list[pb.StoredRequest] = field(default_factory=list)
    evictions: list[EvictionOrder] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    returned: list[pb.StoredRequest] = field(default_factory=list)
    lost: list[RequestKey] = field(default_factory=list)
    unreadable: list[RequestKey] = field(default_factory=list)
    inventory: list[dw.HeldRequest] | None = None
    status_changed: bool = False
    drained: bool = False  # the drain is complete: no request is left
    fatal: BaseException | None = None  # the loop has ended with this

    def drop(self, held: Held) -> None:
        """Finish a cancelled request that holds no cache blocks, and free its blocks at the source."""
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
            or self.endings
            or self.returned
            or self.lost
            or self.unreadable
            or self.inventory is not None
        )


class Pull(Protocol):
    """Starts a copy into the cache (`Handover.pull`)."""

    def __call__(
        self, stored: pb.StoredRequest, block_ids: Sequence[int], resident: int, *, settled: bool = False
    ) -> Completion: ...
