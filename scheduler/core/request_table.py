"""Every open request and its state.

    QUEUED ──► PREFILLING ──► WAITING ──► PREFETCHED ──► DECODING ──► ENDED
          │                      ▲            │             │
          └──── KV adopted ──────┴── Returned ┴─────────────┘        (and every state ──► ENDED)

From PREFETCHED on only the decode instance decides about the request, until it returns it. A request may jump from
PREFETCHED to WAITING (returned before it joined), from DECODING to WAITING (evicted), and to ENDED from every state
(finished, cancelled, lost).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.errors import AccountingError
from alignedserve.request import BATCH_PRIORITY, RequestKey
from alignedserve.scheduler.core.events import RequestMeta
from alignedserve.scheduler.core.pool_shard import PoolShard
from alignedserve.scheduler.core.pool_stays import Arrival, PoolStays, Waiting, WaitingLengths
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.priorities import rank_of


class RequestState(enum.StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    WAITING = "waiting"
    PREFETCHED = "prefetched"
    DECODING = "decoding"
    ENDED = "ended"


LEGAL: dict[RequestState, tuple[RequestState, ...]] = {
    RequestState.QUEUED: (RequestState.PREFILLING, RequestState.WAITING, RequestState.ENDED),
    RequestState.PREFILLING: (RequestState.WAITING, RequestState.ENDED),
    RequestState.WAITING: (RequestState.PREFETCHED, RequestState.ENDED),
    RequestState.PREFETCHED: (RequestState.DECODING, RequestState.WAITING, RequestState.ENDED),
    RequestState.DECODING: (RequestState.WAITING, RequestState.ENDED),
    RequestState.ENDED: (),
}


@dataclass(slots=True)
class Record:
    """One open request. `entered_s`: when it last entered each state."""

    meta: RequestMeta
    state: RequestState = RequestState.QUEUED
    entered_s: dict[RequestState, float] = field(default_factory=dict)
    kv_tokens: int = 0  # as last reported (prefilled or returned); before that, of the KV that an earlier epoch left
    blocks: int = 0  # of its KV in the pool or a buffer
    shard: PoolShard | None = None  # the shard that holds its KV, or held it last; None: not known
    pool_tokens: int = 0  # of its copy in the pool, if there is one
    prefill_tokens: int = 0  # cost of its prefill; 0 for all but the first of a group
    reading_s: float = 0.0  # of its prefill: predicted time for attention to cached and earlier tokens
    prefill_id: str = ""  # the instance that prefills it, or whose buffer holds it
    decode_id: str = ""  # the decode instance that decides about it
    buffer: BufferKind = BufferKind.BATCH
    joined_iteration: int = 0  # iterations that its decode instance was known to have run when it joined
    first_token_due_s: float = 0.0  # when its prefill was predicted to be done; 0: no prediction to learn from
    cancelled: bool = False  # its cancellation was requested
    recalled: bool = False  # it was recalled from its decode instance
    moved: bool = False  # it was returned after a recall, and has not joined since
    arrival: Arrival | None = None  # in the pool, where it waits or waited last

    @property
    def key(self) -> RequestKey:
        return self.meta.key

    @property
    def rank(self) -> int:
        """Of its priority."""
        return rank_of(self.meta.priority)

    @property
    def background(self) -> bool:
        """It only takes what others leave."""
        return self.meta.priority >= BATCH_PRIORITY

    def waiting(self, now_s: float) -> Waiting | None:
        """Its present stay in the pool; None if it is not there."""
        if self.state is not RequestState.WAITING or self.arrival is None:
            return None
        return self.key.epoch, self.arrival, self.kv_tokens, now_s - self.entered_s[self.state]


class RequestTable:
    """Records by key; counts by state; keys by gateway. Only `move` changes a state."""

    def __init__(self) -> None:
        self._records: dict[RequestKey, Record] = {}
        self._by_id: dict[str, RequestKey] = {}
        self._by_gateway: dict[str, dict[RequestKey, None]] = {}
        self.counts = dict.fromkeys(RequestState, 0)
        self.background = dict.fromkeys(RequestState, 0)  # of `counts`, those that only take what others leave
        self.waiting = WaitingLengths()  # of those in state WAITING, whose `kv_tokens` do not change meanwhile
        self.stays = PoolStays()  # in state WAITING, which have ended

    def __len__(self) -> int:
        return len(self._records)

    def hurried(self, state: RequestState) -> int:
        """The number of requests in this state that do not only take what others leave."""
        return self.counts[state] - self.background[state]

    def records(self) -> Iterable[Record]:
        """All records. Must not be changed during iteration."""
        return self._records.values()

    def get(self, key: RequestKey) -> Record | None:
        return self._records.get(key)

    def latest(self, request_id: str) -> RequestKey | None:
        """The key, including its epoch, under which the request is open."""
        return self._by_id.get(request_id)

    def of_gateway(self, gateway_id: str) -> list[RequestKey]:
        return list(self._by_gateway.get(gateway_id, ()))

    def gateways(self) -> set[str]:
        """The gateways that own open requests."""
        return set(self._by_gateway)

    def add(self, meta: RequestMeta, now_s: float) -> Record:
        """Add a request in state QUEUED. Raises AccountingError if its id is already open, in any epoch."""
        if meta.key.request_id in self._by_id:
            raise AccountingError(f"{meta.key} is already open", request_id=meta.key.request_id)
        record = Record(meta)
        record.entered_s[RequestState.QUEUED] = now_s
        self._records[meta.key] = record
        self._by_id[meta.key.request_id] = meta.key
        self._by_gateway.setdefault(meta.gateway_id, {})[meta.key] = None
        self.counts[RequestState.QUEUED] += 1
        self.background[RequestState.QUEUED] += record.background
        return record

    def move(self, record: Record, state: RequestState, now_s: float) -> None:
        """Enter `state`; ENDED removes the record. Raises AccountingError for an illegal transition."""
        if state not in LEGAL[record.state]:
            raise AccountingError(
                f"{record.key}: {record.state.value} cannot become {state.value}", request_id=record.key.request_id
            )
        background = record.background
        self.counts[record.state] -= 1
        self.background[record.state] -= background
        if record.state is RequestState.WAITING:
            self.waiting.add(record.kv_tokens, -1)
            if state is RequestState.ENDED and record.arrival is not None:
                waited_s = now_s - record.entered_s[RequestState.WAITING]
                self.stays.end(record.key, record.arrival, record.kv_tokens, waited_s)
        elif state is RequestState.WAITING:
            self.waiting.add(record.kv_tokens, 1)
            record.arrival = self.stays.arrive(self.counts[state])
        elif state is RequestState.DECODING:
            self.stays.join(record.key.request_id)
        record.state = state
        record.entered_s[state] = now_s
        if state is not RequestState.ENDED:
            self.counts[state] += 1
            self.background[state] += background
            return
        del self._records[record.key]
        del self._by_id[record.key.request_id]
        of_gateway = self._by_gateway[record.meta.gateway_id]
        del of_gateway[record.key]
        if not of_gateway:
            del self._by_gateway[record.meta.gateway_id]

    def leave_pool(self, record: Record, decode_id: str, now_s: float) -> None:
        """WAITING -> PREFETCHED."""
        waited_s, arrival = now_s - record.entered_s[RequestState.WAITING], record.arrival
        self.move(record, RequestState.PREFETCHED, now_s)
        if arrival is not None:
            self.stays.leave(record.key, arrival, record.kv_tokens, waited_s, decode_id)

    def check_integrity(self) -> None:
        counts, background = dict.fromkeys(RequestState, 0), dict.fromkeys(RequestState, 0)
        waiting = WaitingLengths()
        for record in self._records.values():
            if record.state is RequestState.WAITING:
                waiting.add(record.kv_tokens, 1)
            counts[record.state] += 1
            background[record.state] += record.background
        gateways = sum(len(keys) for keys in self._by_gateway.values())
        right = counts == self.counts and background == self.background and waiting.same(self.waiting)
        if not right or not len(self._records) == len(self._by_id) == gateways:
            raise AccountingError("the request table does not match a recount")
