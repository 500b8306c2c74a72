"""A cell whose decode instances consist of ranks: prefill instances, the pool, and placements instead of a core.

Prompts are prefilled in order of arrival while the pool has room for them beside `kv_pool.growth_reserve`, each at the
instance with the least to compute. Requests join from the pool, without candidate buffers. An evicted request that
waits too long for room in the pool loses its KV and is prefilled again, before all others.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alignedserve.config import Config
from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.core import events
from alignedserve.scheduler.core.actions import ReleasePool, StartPrefill
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.ranks.base import Placement
from alignedserve.simulator.clock import Clock
from alignedserve.simulator.decode import SimulatedDecode
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.host import OnHardware
from alignedserve.simulator.pool import Pool
from alignedserve.simulator.prefill import SimulatedPrefill
from alignedserve.simulator.ranks.instance import RankedInstance
from alignedserve.simulator.report.results import RequestResult
from alignedserve.simulator.requests import Replayed
from alignedserve.simulator.sizes import Sizes
from alignedserve.simulator.slowed import SlowedCost
from alignedserve.simulator.workload import Arrival


class RankCell(OnHardware):
    """Replays arrivals, sorted by time. Call `run` once, then `check_nothing_is_left`.

    `placements`: one for each decode instance. `sizes.decode_cache` is that of one rank.
    """

    decodes: Mapping[str, SimulatedDecode] = {}
    cache_answers = False

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: Config,
        hardware: Hardware,
        costs: tuple[StepCost, StepCost],
        placements: Sequence[Placement],
        leap: bool,
    ) -> None:
        """`config.cluster.prefetch` must be off. `costs`: of prefill instances and of one rank."""
        self.config = config
        self.hardware = hardware
        self.block_size = hardware.block_size
        self.block_bytes = hardware.block_size * hardware.kv_bytes_per_token
        self.sizes = Sizes.plan(config, hardware)
        self.clock = Clock()
        self.counters: Counter[str] = Counter()
        self.requests: dict[str, Replayed] = {}
        self.last_join_s = 0.0  # when a request last began to decode for the first time
        self.pool = Pool(self, self.sizes.pool)  # one, without a prefix cache
        self.pools: Mapping[str, Pool] = {self.pool.name: self.pool}
        self.occupancy: list[tuple[float, int]] = [(0.0, 0)]
        self.prefills = {
            name: SimulatedPrefill(self, name, costs[0])
            for name in (f"prefill-{number}" for number in range(config.cluster.prefill))
        }
        decode_cost = SlowedCost.of(costs[1], hardware.decode_slowdown)
        self.instances = [
            RankedInstance(
                self,
                f"decode-{number}",
                placement,
                decode_cost,
                clock_rank=number + 1,
                leap=leap,
                gap_s=hardware.host_overhead_s,
            )
            for number, placement in enumerate(placements)
        ]
        self._arrivals = arrivals
        self._queue: deque[Replayed] = deque()  # not yet at a prefill instance
        self._held: dict[RequestKey, int] = {}  # pool blocks that are spoken for, from the prefill's start
        self._held_blocks = 0
        self._joined: set[RequestKey] = set()
        self._numbered = 0
        self._reserve = math.ceil(self.sizes.pool * config.kv_pool.growth_reserve)
        fitting = min(self.sizes.decode_cache, self.sizes.pool - self._reserve, self.sizes.prefill_cache)
        self._most_tokens = fitting * self.block_size
        if self._most_tokens <= 0:
            raise ConfigError(f"no request fits in these stores (in blocks): {self.sizes}")

    # what instances and the pool use

    def pool_at(self, instance: str) -> Pool:
        return self.pool

    def neighbour(self, prefill_id: str) -> SimulatedDecode | None:
        """None: ranks and prefill instances share no machine."""
        return None

    def request(self, key: RequestKey) -> Replayed:
        return self.requests[key.request_id]

    def max_total_tokens(self, request: Replayed) -> int:
        """The client's limit: the longest request that can be served, so that it reveals nothing about its output."""
        return self._most_tokens

    def numbered(self) -> int:
        self._numbered += 1
        return self._numbered

    def send(self, call: Callable[..., None], *arguments: Any) -> None:
        self.clock.after(self.hardware.message_s, call, *arguments)

    def send_core(self, event: events.Event) -> None:
        self.send(self.tell, event)

    def send_returned(self, key: RequestKey, kv_tokens: int, pool_id: str) -> None:
        raise AccountingError(f"{key} was returned, but no candidate is prefetched", request_id=key.request_id)

    def tell(self, event: events.Event) -> None:
        """Take what prefill instances and the pool report."""
        if isinstance(event, events.Prefilled):
            min(self.instances, key=lambda one: one.requests).add(event.key, event.kv_tokens)
        elif isinstance(event, events.Finished):
            for key in event.keys:
                self._let_go(key)
        self._dispatch()

    def hold(self, key: RequestKey, kv_tokens: int) -> None:
        """The request's KV is about to be written to the pool."""
        blocks = self.blocks_for(kv_tokens)
        self._held[key] = blocks
        self._held_blocks += blocks

    def release(self, key: RequestKey) -> None:
        """The pool's copy of the request is no longer needed."""
        self._let_go(key)
        self.pool.release(ReleasePool((key,)))  # no message: it could overtake the write of an eviction soon after
        self.send(self._dispatch)

    def compute_again(self, key: RequestKey) -> None:
        """Last resort of a full pool: its KV was dropped, and is computed again with the generated tokens."""
        self.counters["dropped_requests"] += 1
        self._let_go(key)
        request = self.request(key)
        request.stop_waiting(self.clock.now_s, dropped=True)
        request.enter(Stage.QUEUE, self.clock.now_s)
        self._queue.appendleft(request)
        self.send(self._dispatch)

    def _let_go(self, key: RequestKey) -> None:
        self._held_blocks -= self._held.pop(key, 0)

    def joined(self, key: RequestKey) -> None:
        """The request decodes from now on."""
        if key not in self._joined:
            self._joined.add(key)
            self.last_join_s = self.clock.now_s

    def end(self, request: Replayed) -> None:
        request.end(self.clock.now_s)

    # prompts

    def run(self) -> None:
        """Run until every request has ended."""
        if self._arrivals:
            self.clock.at(self._arrivals[0].arrival_s, self._arrive, 0)
        self.clock.run()

    def _arrive(self, number: int) -> None:
        arrival = self._arrivals[number]
        if number + 1 < len(self._arrivals):
            self.clock.at(self._arrivals[number + 1].arrival_s, self._arrive, number + 1)
        request = Replayed(arrival, RequestResult(arrival), RequestKey(arrival.request_id))
        request.stage_since_s = self.clock.now_s
        if self.requests.setdefault(arrival.request_id, request) is not request:
            raise ConfigError(f"the workload has two requests {arrival.request_id!r}")
        tokens = arrival.input_tokens + arrival.output_tokens
        if tokens > self._most_tokens:
            request.result.refused = f"{tokens} tokens; the stores hold at most {self._most_tokens} of a request"
            self.end(request)
            return
        self._queue.append(request)
        self._dispatch()

    def _dispatch(self) -> None:
        limit = self.config.prefill.queued_tokens
        while self._queue:
            request = self._queue[0]
            tokens = request.prefix_tokens
            if self._held_blocks + self.blocks_for(tokens) > self.sizes.pool - self._reserve:
                return
            prefill = min(self.prefills.values(), key=lambda one: one.chunks.pending_tokens)
            pending = prefill.chunks.pending_tokens
            if pending and pending + tokens > limit:
                return
            self._queue.popleft()
            self.hold(request.key, tokens)
            prefill.start(StartPrefill(prefill.name, (request.key,)))

    def check_nothing_is_left(self) -> None:
        """Every request has all its tokens or was refused, and no store holds anything. Raises AccountingError."""
        for arrival in self._arrivals:
            request = self.requests[arrival.request_id]
            wanted = 0 if request.result.refused else arrival.output_tokens
            if not request.ended or request.tokens != wanted:
                raise AccountingError(f"{arrival.request_id} has {request.tokens} tokens of {wanted}")
        stores = [self.pool.blocks]
        for prefill in self.prefills.values():
            prefill.chunks.check_integrity()
            stores.append(prefill.cache)
        for store in stores:
            store.check_integrity()
        for instance in self.instances:
            instance.check_nothing_is_left()
        held = {store.store_id: store.owned_blocks for store in stores if store.owned_blocks}
        if held or self.pool.copies or self._held_blocks:
            raise AccountingError(f"leaked: blocks {held}, {len(self.pool.copies)} copies, {self._held_blocks} held")
