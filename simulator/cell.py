"""A whole cell in virtual time: the real core, simulated instances and pool around it, and the gateway's part.

The core, the chunk schedulers and the iteration schedulers are those of the cluster. A message takes `message_s`, and
messages between two instances arrive in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from alignedserve.config import Config
from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.core import actions, events
from alignedserve.scheduler.core.pairing import pair_up
from alignedserve.scheduler.core.routing.base import PrefixCopies
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from alignedserve.scheduler.cost.step import ChunkShape, StepCost
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.simulator.clock import Clock
from alignedserve.simulator.decode import SimulatedDecode
from alignedserve.simulator.hardware import Hardware
from alignedserve.simulator.host import OnHardware
from alignedserve.simulator.pool import Pool
from alignedserve.simulator.prefill import SimulatedPrefill
from alignedserve.simulator.prefix.cache import SimulatedPrefixes
from alignedserve.simulator.report.results import RequestResult
from alignedserve.simulator.requests import Replayed
from alignedserve.simulator.sizes import Sizes
from alignedserve.simulator.workload import Arrival, Workload

GATEWAY = "gateway"
STUCK_S = 3600.0  # of virtual time in which only time passes while requests are open: a bug


class Cell(OnHardware):
    """Replays a workload. Call `run` once, then `check_nothing_is_left`."""

    def __init__(
        self,
        workload: Workload,
        config: Config,
        hardware: Hardware,
        costs: tuple[StepCost, StepCost],
        leap: bool,
        iteration_gap_s: float = 0.0,
        *,
        cache_answers: bool = True,
        cache_at_decode: bool = False,
    ) -> None:
        """`config.cluster` gives the number of instances. `costs`: of prefill and of decode instances.

        `iteration_gap_s`: charged before each decode iteration, in addition to the hardware's overhead. The last two:
        as in `CACHE_OPTIONS`, where the configuration has a prefix cache and the workload names blocks.
        """
        self.config = config
        self.hardware = hardware
        self.block_size = hardware.block_size
        self.block_bytes = hardware.block_size * hardware.kv_bytes_per_token
        self.sizes = Sizes.plan(config, hardware)
        self.clock = Clock()
        self.counters: Counter[str] = Counter()
        self.core = SchedulerCore(config, hardware.block_size)
        self.requests: dict[str, Replayed] = {}
        self._arrivals = workload.arrivals
        self._clients = workload.clients
        self._next = 0  # index of the first request that has not arrived
        self._ticking = False
        self._tick_number = 0
        self._moved_s = 0.0  # when anything but time last changed the core
        self._starting = True
        self._trace_tokens = workload.block_tokens if config.kv_pool.prefix_cache else 0  # 0: no prefix cache
        self._prefill_s = lru_cache(4096)(lambda tokens: costs[0].step_s([ChunkShape(tokens, 0)], ()))
        self.cache_answers = cache_answers and bool(self._trace_tokens)
        self._cache_at_decode = cache_at_decode
        shards = ["pool"] if hardware.nodes == 1 else [f"pool-{number}" for number in range(hardware.nodes)]
        disk_blocks = hardware.disk_tokens // hardware.block_size
        self.pools: Mapping[str, Pool] = {
            name: Pool(self, self.sizes.pool, name, self._new_prefixes(self.sizes.pool, disk_blocks)) for name in shards
        }
        self.occupancy: list[tuple[float, int]] = [(0.0, 0)]
        prefill, decode = config.cluster.prefill, config.cluster.decode
        gap_s = hardware.host_overhead_s + iteration_gap_s
        self.prefills = {
            name: SimulatedPrefill(self, name, costs[0]) for name in (f"prefill-{number}" for number in range(prefill))
        }
        self.decodes: Mapping[str, SimulatedDecode] = {
            f"decode-{number}": SimulatedDecode(self, f"decode-{number}", costs[1], number + 1, leap, gap_s)
            for number in range(decode)
        }
        self._pairs = self._pair_up()
        self._start()
        if self._trace_tokens:
            rate = min(hardware.network_bandwidth, hardware.pool_bandwidth) / hardware.kv_bytes_per_token
            self.core.routing.copies = PrefixCopies(1.0 / rate, hardware.copy_latency_s)
        self._most_tokens = self.core.max_request_tokens()
        if self._most_tokens <= 0:
            raise ConfigError(f"no request fits in these stores (in blocks): {self.sizes}")

    def _new_prefixes(self, blocks: int, disk_blocks: int = 0) -> SimulatedPrefixes | None:
        if not self._trace_tokens:
            return None
        policy, size = self.config.kv_pool.cache_policy, self.block_size
        tokens = self._trace_tokens
        return SimulatedPrefixes(policy, self._prefill_s, lambda: self.clock.now_s, tokens, blocks, size, disk_blocks)

    def _pair_up(self) -> dict[str, tuple[SimulatedPrefill, ...]]:
        pairs = pair_up(len(self.prefills), len(self.decodes), self._link_rank) if self.config.cluster.prefetch else []
        sizes = self.sizes
        for name, prefill in self.prefills.items():
            served = sum(prefill_id == name for _, prefill_id in pairs)
            if served:
                largest = min(sizes.decode_cache, sizes.pool // 16)
                prefill.lease_blocks = max(1, min(largest, sizes.requests_buffer * 2 // (3 * served)))
        return {name: tuple(self.prefills[p] for d, p in pairs if d == name) for name in self.decodes}

    def _start(self) -> None:
        """All instances and the pool join and report at time 0."""
        for role, names in (("kv_pool", self.pools), ("prefill", self.prefills), ("decode", self.decodes)):
            for name in names:
                self.tell(events.InstanceJoined(role, name))
        if len(self.pools) > 1 or self._trace_tokens:  # hints about cached prefixes name shards
            homes = tuple((one.name, one.pool.name) for one in self.prefills.values())
            homes += tuple((one.name, one.pool.name) for one in self.decodes.values())
            self.tell(events.ShardsChanged(tuple(self.pools), homes))
        pairs = tuple((name, tuple(prefill.name for prefill in paired)) for name, paired in self._pairs.items())
        ranks = ((name, prefill, self._link_rank(name, prefill)) for name, paired in pairs for prefill in paired)
        self.tell(events.PairsChanged(pairs, tuple(link for link in ranks if link[2])))
        for pool in self.pools.values():
            self.tell(events.PoolReported(pool.name, pool.blocks.capacity, pool.blocks.free_blocks))
        for decode in self.decodes.values():
            decode.refresh_lease()
            decode.report()
        for prefill in self.prefills.values():
            prefill.report()
        self._starting = False

    def _link_rank(self, decode_id: str, prefill_id: str) -> int:
        """0 on one node, 1 over the network."""
        return int(self.pool_at(decode_id) is not self.pool_at(prefill_id))

    # used by the instances

    def pool_at(self, instance: str) -> Pool:
        """The shard of the instance's node."""
        shards = list(self.pools.values())
        return shards[int(instance.rpartition("-")[2]) % len(shards)]

    def shard_of(self, key: RequestKey) -> Pool:
        """The shard that the request's KV was written to last."""
        return self.pools[self.request(key).pool]

    def cache_at_decode(self, blocks: int) -> SimulatedPrefixes | None:
        """The prefix cache of a decode instance; None: it keeps nothing."""
        return self._new_prefixes(blocks) if self._cache_at_decode else None

    def paired(self, decode_id: str) -> tuple[SimulatedPrefill, ...]:
        """The prefill instances paired with the decode instance."""
        return self._pairs[decode_id]

    def neighbour(self, prefill_id: str) -> SimulatedDecode | None:
        """The decode instance on the same machine: the one with the same number, if it exists."""
        return self.decodes.get(prefill_id.replace("prefill", "decode"))

    def request(self, key: RequestKey) -> Replayed:
        """The request, in whatever epoch it is now."""
        return self.requests[key.request_id]

    def max_total_tokens(self, request: Replayed) -> int:
        """The client's limit: the longest request that can be served, so that it reveals nothing about its output."""
        return max(self._most_tokens, request.arrival.input_tokens + request.arrival.output_tokens)

    # messages

    def send(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a method of another instance, one message time later."""
        if self._starting:
            call(*arguments)
        else:
            self.clock.after(self.hardware.message_s, call, *arguments)

    def send_core(self, event: events.Event) -> None:
        self.send(self.tell, event)

    def send_returned(self, key: RequestKey, kv_tokens: int, pool_id: str) -> None:
        """The request is in this shard again, with `kv_tokens` tokens of KV."""
        since_s = self.request(key).waiting_since_s
        waited_s = 0.0 if since_s is None else self.clock.now_s - since_s
        self.send_core(events.Returned(key, kv_tokens, self.blocks_for(kv_tokens), waited_s, pool_id))

    def tell(self, event: events.Event) -> None:
        """Deliver an event to the core now."""
        self._moved_s = self.clock.now_s
        self._handle(event)
        if not self._ticking and self.core.needs_ticks:
            self._ticking = True
            self._plan_tick()

    def _handle(self, event: events.Event) -> None:
        for action in self.core.handle(event, self.clock.now_s):
            self._carry_out(action)

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.StartPrefill():
                self.send(self.prefills[action.prefill_id].start, action)
            case actions.Prefetch():
                self.counters["batches" if action.buffer is BufferKind.BATCH else "late_batches"] += 1
                if action.prefill_id is None:
                    self.send(self.decodes[action.decode_id].offer_from_pool, action)
                else:
                    self.send(self.prefills[action.prefill_id].prefetch, action)
            case actions.Recall():
                self.send(self.decodes[action.decode_id].recall, action.keys)
            case actions.MarkUrgent():
                self.send(self.decodes[action.decode_id].mark_urgent, action.due_s(self.clock.now_s))
            case actions.CancelAt() if action.instance_id in self.decodes:
                self.send(self.decodes[action.instance_id].cancel, action.keys)
            case actions.ReleasePool():
                self._release(action)
            case actions.Reject():
                for key in action.keys:
                    self._refuse(self.request(key), str(action.error))
            case actions.ReportLost():
                for key in action.keys:
                    self.send(self._resubmit, key)

    def _release(self, action: actions.ReleasePool) -> None:
        for pool in [self.pools[action.pool_id]] if action.pool_id else self.pools.values():
            self.send(pool.release, action)

    # time

    def _plan_tick(self) -> None:
        """Plan the next tick. Ticks are at whole multiples of `tick_s`, each once, regardless of rounding."""
        tick_s = self.config.scheduler.tick_s
        self._tick_number = max(self._tick_number, math.floor(self.clock.now_s / tick_s)) + 1
        self.clock.at(self._tick_number * tick_s, self._tick)

    def _tick(self) -> None:
        for decode in self.decodes.values():
            decode.report_growth()
        self._handle(events.Tick())
        if self.clock.now_s - self._moved_s > STUCK_S:
            raise AccountingError(f"no progress since {self._moved_s:g} s: {self.core.describe()}")
        self._ticking = self.core.needs_ticks
        if self._ticking:
            self._plan_tick()

    # the gateway's part

    def run(self) -> None:
        """Run until every request has ended."""
        for _ in range(min(self._clients, len(self._arrivals)) or 1):
            self._plan_arrival()
        self.clock.run()

    def _plan_arrival(self) -> None:
        """Plan the next arrival, if there is one more: at its own time, or in a closed loop now."""
        if self._next < len(self._arrivals):
            arrival = self._arrivals[self._next]
            self._next += 1
            if self._clients:
                arrival = replace(arrival, arrival_s=self.clock.now_s)
            self.clock.at(arrival.arrival_s, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        if not self._clients:
            self._plan_arrival()
        request = Replayed(arrival, RequestResult(arrival), RequestKey(arrival.request_id))
        request.stage_since_s = self.clock.now_s
        if self.requests.setdefault(arrival.request_id, request) is not request:
            raise ConfigError(f"the workload has two requests {arrival.request_id!r}")
        self._submit(request)

    def _submit(self, request: Replayed) -> None:
        most = self.max_total_tokens(request)
        meta = events.RequestMeta(
            key=request.key,
            prefix_tokens=request.prefix_tokens,
            max_total_tokens=most,
            group_id="",
            gateway_id=GATEWAY,
            wait_objective_s=request.arrival.wait_objective_s,
            priority=request.arrival.priority,
            cached=self._cached(request.arrival),
        )
        self.tell(events.Submitted((meta,)))

    def _cached(self, arrival: Arrival) -> tuple[tuple[str, int], ...]:
        """What each shard has of the prompt, as far as the routing knows."""
        if not self._trace_tokens:
            return ()
        coming = self.core.routing.KNOWS_COMING
        caches = ((pool.name, pool.prefixes) for pool in self.pools.values() if pool.prefixes is not None)
        found = ((name, cache.match(arrival, coming=coming)) for name, cache in caches)
        return tuple((name, tokens) for name, tokens in found if tokens)

    def _refuse(self, request: Replayed, reason: str) -> None:
        request.result.refused = reason
        self.end(request)

    def end(self, request: Replayed) -> None:
        """The request has ended now. In a closed loop its client sends the next one."""
        request.end(self.clock.now_s)
        for pool in self.pools.values():
            if pool.prefixes is not None:
                pool.prefixes.release(request.key, ended=True)
                pool.prefixes.under_way.ended(request.key)
        if self._clients:
            self._plan_arrival()

    def _resubmit(self, key: RequestKey) -> None:
        """Last resort of a full pool: its KV was dropped, and is computed again with the generated tokens."""
        request = self.request(key)
        for decode in self.decodes.values():
            decode.freeze(key)
        if request.ended or request.key != key:
            return
        self.counters["dropped_requests"] += 1
        request.key = RequestKey(key.request_id, key.epoch + 1)
        request.stop_waiting(self.clock.now_s, dropped=True)
        request.enter(Stage.QUEUE, self.clock.now_s)
        self._submit(request)

    def check_nothing_is_left(self) -> None:
        """Every request has all its tokens or was refused, and no store holds anything. Raises AccountingError."""
        self.core.check_integrity()
        prefixes = [one.prefixes for one in self.pools.values()] + [one.prefixes for one in self.decodes.values()]
        for one in filter(None, prefixes):
            one.check_nothing_is_held()
        for arrival in self._arrivals:
            request = self.requests[arrival.request_id]
            wanted = 0 if request.result.refused else arrival.output_tokens
            if not request.ended or request.tokens != wanted:
                raise AccountingError(f"{arrival.request_id} has {request.tokens} tokens of {wanted}")
        pools = self.pools.values()
        stores = [*(pool.blocks for pool in pools), *(decode.cache for decode in self.decodes.values())]
        for prefill in self.prefills.values():
            prefill.chunks.check_integrity()
            stores += [prefill.cache, prefill.buffers.batch, prefill.buffers.requests]
        for store in stores:
            store.check_integrity()
        for decode in self.decodes.values():
            decode.scheduler.check_integrity()
        held = {store.store_id: store.owned_blocks for store in stores if store.owned_blocks}
        busy = [decode.name for decode in self.decodes.values() if not decode.holds_nothing()]
        counted = {state: count for state, count in self.core.describe().items() if count}
        copies = sum(len(pool.copies) for pool in pools)
        if held or busy or counted or copies:
            raise AccountingError(f"leaked: blocks {held}, busy {busy}, core {counted}, {copies} copies")
