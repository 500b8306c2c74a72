"""What the core knows of the instances: their reports, and its own count of what is on its way to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from alignedserve.batch_size import LEAST
from alignedserve.config import Config
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import DecodeReported, PrefillReported
from alignedserve.scheduler.core.request_table import Record
from alignedserve.scheduler.core.routing.load import PrefillLoad
from alignedserve.scheduler.cost.pass_model import CostModel, LinearCostModel
from alignedserve.scheduler.instance.plan import BufferKind

TIE = 1e-3  # weight of the load of requests that yield to others
MOST_PREDICTED = 256  # shapes of iterations whose predicted time is cached


@dataclass(slots=True)
class BufferRoom:
    """One candidate buffer of a prefill instance, in blocks."""

    capacity: int = 0
    reported_free: int = 0
    committed: int = 0  # of requests that were prefetched into it and have not left it, by the core's own count
    issued: int = 0  # of `committed`, since the last report
    bounced: bool = False  # a candidate came back from it: nothing is sent to it until it has reported

    def report(self, capacity: int, free: int) -> None:
        self.capacity, self.reported_free, self.issued, self.bounced = capacity, free, 0, False

    def take(self, blocks: int) -> None:
        self.committed += blocks
        self.issued += blocks

    @property
    def unclaimed(self) -> int:
        """Room by the core's own count: correct if only prefetches use the buffer."""
        return self.capacity - self.committed

    @property
    def free(self) -> int:
        """Room as reported, less what was issued since: correct if evictions use the buffer too."""
        return min(self.unclaimed, self.reported_free - self.issued)


@dataclass(slots=True)
class PrefillView:
    prefill_id: str
    load: PrefillLoad
    buffers: dict[BufferKind, BufferRoom] = field(default_factory=lambda: {kind: BufferRoom() for kind in BufferKind})
    prefilling: dict[RequestKey, None] = field(default_factory=dict)
    buffered: dict[RequestKey, None] = field(default_factory=dict)
    pool_wait_blocks: int = 0

    def report(self, event: PrefillReported, block_size: int) -> None:
        self.load.cache_tokens = event.cache_blocks * block_size
        self.load.copy_s_per_token = event.copy_s_per_token
        if event.measured is not None:
            self.load.cost.observe_chunks(event.measured)
        self.pool_wait_blocks = event.pool_wait_blocks
        self.buffers[BufferKind.BATCH].report(event.batch_buffer_blocks, event.batch_buffer_free_blocks)
        self.buffers[BufferKind.REQUESTS].report(event.requests_buffer_blocks, event.requests_buffer_free_blocks)

    def room(self, kind: BufferKind) -> int:
        buffer = self.buffers[kind]
        if buffer.bounced:
            return 0
        return buffer.unclaimed if kind is BufferKind.BATCH else buffer.free


@dataclass(slots=True)
class Background:
    """The requests here or on their way that only take what others leave: blocks and tokens when they were sent."""

    requests: int = 0
    blocks: int = 0
    tokens: int = 0

    def count(self, record: Record, sign: int) -> None:
        """Add (1) or remove (-1) a request, if it is one of these."""
        if not record.background:
            return
        self.requests += sign
        self.blocks += sign * record.blocks
        self.tokens += sign * record.kv_tokens


@dataclass(slots=True)
class DecodeView:
    decode_id: str
    report: DecodeReported | None = None
    candidates: dict[BufferKind, dict[RequestKey, Record]] = field(
        default_factory=lambda: {kind: {} for kind in BufferKind}
    )
    candidate_blocks: dict[BufferKind, int] = field(default_factory=lambda: dict.fromkeys(BufferKind, 0))
    overdue: dict[RequestKey, float] = field(default_factory=dict)  # in its candidate batch, or sent alone: when due
    decoding: dict[RequestKey, Record] = field(default_factory=dict)
    asked_back: list[Record] = field(default_factory=list)  # from other instances, for this one
    joined_blocks: int = 0  # since the last report
    bounced: bool = False  # it gave a candidate back: no late joins until it has reported
    batch_id: int = 0  # of the last candidate batch that it was sent
    batch_rank: int = 0  # the least rank in it
    background: Background = field(default_factory=Background)
    batch_sent_s: float = -math.inf  # when it was last sent a candidate batch, or a few requests in place of one
    cost: CostModel = field(default_factory=LinearCostModel)
    mean_tokens: int = 0  # mean prefix length in its recent iterations; 0: not known yet
    iterations: int = 0  # that it has reported; up to a tenth of a second behind
    most_requests: int = 0  # in the largest batch that was measured
    held_tokens: int = 0  # of all requests that are here or on their way, when they were sent
    _coming: tuple[int, int] | None = None  # (shortest, longest) of those; None: to be recomputed
    _predicted: dict[tuple[int, int], float] = field(default_factory=dict)  # (requests, tokens of each) -> seconds

    def take_report(self, report: DecodeReported) -> None:
        self.report, self.joined_blocks, self.bounced = report, 0, False
        if report.measured is not None:
            self.cost.observe_iterations(report.measured)
            self._predicted.clear()
            self.mean_tokens = report.measured.cached_tokens // max(1, report.measured.tokens)
            self.iterations += report.measured.passes
            self.most_requests = max(self.most_requests, report.measured.tokens // report.measured.passes)

    @property
    def size(self) -> int:
        """Requests that decode here or will."""
        return len(self.decoding) + sum(map(len, self.candidates.values()))

    @property
    def idle(self) -> bool:
        return self.report is not None and not self.report.running and not self.size

    @property
    def cache_blocks(self) -> int:
        return 0 if self.report is None else self.report.cache_blocks

    @property
    def request_blocks(self) -> int:
        """The most blocks of one request: of a rank, where ranks have a cache each."""
        return 0 if self.report is None else self.report.request_blocks or self.report.cache_blocks

    def max_running(self, config: Config) -> int:
        """The most requests that it runs, as it reports them."""
        reported = 0 if self.report is None else self.report.max_running
        return reported or config.decode.max_running or LEAST

    def batch_lengths(self) -> tuple[int, int] | None:
        """(shortest, longest) prefix length that the running batch was formed from.

        If nothing runs, those of the requests on their way. None when idle, and when only late joins are left of the
        batch: requests that match those are for the next batch.
        """
        if self.report is not None and self.report.running:
            longest = self.report.batch_longest_tokens
            return (self.report.batch_shortest_tokens, longest) if longest else None
        if self._coming is None:
            coming = [record.kv_tokens for record in self.held()]
            self._coming = (min(coming), max(coming)) if coming else None
        return self._coming

    def add_length(self, tokens: int) -> None:
        """A request of this prefix length decodes here or is on its way."""
        self.held_tokens += tokens
        if self._coming is not None:
            shortest, longest = self._coming
            self._coming = min(shortest, tokens), max(longest, tokens)

    def drop_length(self, tokens: int) -> None:
        self.held_tokens -= tokens
        if self._coming is not None and tokens in self._coming:
            self._coming = None

    def held(self) -> Iterator[Record]:
        """The requests that are here or on their way. Must not be changed during iteration."""
        return chain(self.decoding.values(), *(held.values() for held in self.candidates.values()))

    def mean_held(self) -> float:
        """The mean prefix length of those, when they were sent; infinite if there are none."""
        return self.held_tokens / self.size if self.size else math.inf

    def distance(self, tokens: int) -> int:
        """Tokens between a prefix length and the mean of those here or on their way; 0 if there are none."""
        return abs(tokens - self.held_tokens // self.size) if self.size else 0

    def load_s(self) -> float:
        """The predicted time of an iteration of all requests that are here or on their way.

        Of those that only take what others leave, just enough to tell apart instances that are equal otherwise.
        """
        size, behind = self.size, self.background
        whole_s = self.predict_equal_s(size, self.held_tokens // size) if size else 0.0
        if not behind.requests:
            return whole_s
        others = size - behind.requests
        return TIE * whole_s + (
            self.predict_equal_s(others, (self.held_tokens - behind.tokens) // others) if others else 0.0
        )

    def predict_equal_s(self, requests: int, tokens: int) -> float:
        """The time of an iteration of `requests` requests of one prefix length.

        Cached, since each new request asks it of all instances.
        """
        shape = requests, tokens
        found = self._predicted.get(shape)
        if found is None:
            if len(self._predicted) >= MOST_PREDICTED:
                self._predicted.clear()
            found = self._predicted[shape] = self.cost.predict_iteration_s([tokens] * requests)
        return found

    def running_batch_id(self) -> int:
        """The batch that a late join joins."""
        return self.report.batch_id if self.report is not None and self.report.running else self.batch_id

    def free_blocks(self, config: Config, block_size: int) -> int:
        """Cache blocks left when all requests on their way have joined and have room to grow for some iterations."""
        if self.report is None:
            return 0
        growth = -(-config.decode.join_iterations // block_size) + 1  # plus one for the watermark
        coming = sum(self.candidate_blocks.values()) + self.joined_blocks
        return self.report.cache_free_blocks - coming - growth * self.size

    def has_room(self, config: Config, block_size: int, blocks: int) -> bool:
        """Whether a request of `blocks` blocks could join after all requests that are on their way here."""
        return self.size < self.max_running(config) and self.free_blocks(config, block_size) >= blocks

    def room_for_others(self, config: Config, block_size: int) -> tuple[int, int]:
        """(blocks, requests) that it has room for if those that only take what others leave give way."""
        behind = self.background
        growth = -(-config.decode.join_iterations // block_size) + 1
        blocks = self.free_blocks(config, block_size) + behind.blocks + growth * behind.requests
        return blocks, self.max_running(config) - (self.size - behind.requests)


@dataclass(slots=True)
class Instances:
    """Views by id, and which prefill instances prefetch for which decode instance."""

    prefill: dict[str, PrefillView] = field(default_factory=dict)
    decode: dict[str, DecodeView] = field(default_factory=dict)
    pairs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    link_ranks: dict[tuple[str, str], int] = field(default_factory=dict)  # of pairs, if not 0 (the best)
    draining: frozenset[str] = frozenset()  # these get no new work
    homes: dict[str, str] = field(default_factory=dict)  # instance -> the shard of the pool that it writes to
    _decode_at: dict[str, list[DecodeView]] = field(default_factory=dict)  # by home; cached until `placed`

    def placed(self) -> None:
        """Instances or shards were added, removed or moved."""
        self._decode_at.clear()

    def decode_at(self, pool_id: str) -> list[DecodeView]:
        """The decode instances that evict to the shard."""
        if pool_id not in self._decode_at:
            found = [view for view in self.decode.values() if self.homes.get(view.decode_id) == pool_id]
            self._decode_at[pool_id] = found
        return self._decode_at[pool_id]

    def open_prefill(self) -> list[PrefillView]:
        """The prefill instances that get prompts."""
        return [view for view in self.prefill.values() if view.prefill_id not in self.draining]

    def open_decode(self) -> list[DecodeView]:
        """The decode instances that get candidates."""
        return [view for view in self.decode.values() if view.decode_id not in self.draining]

    def drained(self) -> list[str]:
        """The draining instances that hold no request, as far as the core knows."""
        if not self.draining:
            return []
        busy = {view.prefill_id for view in self.prefill.values() if view.prefilling or view.buffered}
        busy |= {view.decode_id for view in self.decode.values() if view.size}
        return sorted(self.draining - busy)

    def bounced(self, decode_id: str, prefill_id: str, kind: BufferKind) -> None:
        """A candidate came back without having joined: the known room and prefix lengths there are out of date.

        Without this a request could go back and forth as fast as messages travel.
        """
        if prefill_id in self.prefill:
            self.prefill[prefill_id].buffers[kind].bounced = True
        if decode_id in self.decode:
            self.decode[decode_id].bounced = True

    def forget_bounces(self) -> None:
        for prefill in self.prefill.values():
            for buffer in prefill.buffers.values():
                buffer.bounced = False
        for decode in self.decode.values():
            decode.bounced = False

    def paired(self, decode: DecodeView) -> list[PrefillView]:
        """Prefill instances that are up and prefetch for this one. Empty: it copies from the pool itself."""
        names = self.pairs.get(decode.decode_id, ())
        return [self.prefill[name] for name in names if name in self.prefill and name not in self.draining]

    def link_rank(self, decode: DecodeView, prefill: PrefillView) -> int:
        """The rank of the pair's link; 0 is the best kind."""
        return self.link_ranks.get((decode.decode_id, prefill.prefill_id), 0)

    def roomiest(self, decode: DecodeView, kind: BufferKind) -> list[tuple[PrefillView, int]]:
        """For each link rank, best first, the paired instance with the most room in such a buffer, and that room."""
        best: dict[int, tuple[PrefillView, int]] = {}
        for prefill in self.paired(decode):
            rank, room = self.link_ranks.get((decode.decode_id, prefill.prefill_id), 0), prefill.room(kind)
            if rank not in best or room > best[rank][1]:
                best[rank] = prefill, room
        return [best[rank] for rank in sorted(best)]
