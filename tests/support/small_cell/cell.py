"""The small cell: virtual time, links, the gateway, and the scheduler core, whose actions it executes."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from alignedserve.config import ClusterConfig, Config, DecodeConfig, KvPoolConfig, PrefillConfig, SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.core import actions, events
from alignedserve.scheduler.core.scheduler_core import SchedulerCore
from support.small_cell import times
from support.small_cell.decode import Decode
from support.small_cell.pool import Pool, Write
from support.small_cell.prefill import Prefill
from support.small_cell.requests import Request, Service
from support.small_cell.shards import Shards


class Part(Protocol):
    """A process of the cell. If it is not `alive`, no message reaches it, and its work stops."""

    name: str
    alive: bool


class Gateway:
    name = "gateway"
    alive = True


class CoreProcess:
    name = "core"
    alive = True


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in blocks and tokens. The defaults are too small for the load, to force contention."""

    seed: int = 0
    block_size: int = 4
    prefills: int = 1
    decodes: int = 1
    nodes: int = 1  # instances are distributed over them; each node has a shard of `pool_blocks`
    prefetch: bool = True
    pool_blocks: int = 240
    prefill_cache: int = 40
    decode_cache: int = 40
    batch_buffer: int = 16
    requests_buffer: int = 12
    max_running: int = 16
    token_budget: int = 32
    groups: int = 75
    rate: float = 60.0  # groups a second
    max_prompt: int = 60
    max_answer: int = 40
    cancel_share: float = 0.0
    priorities: tuple[int, ...] = ()  # of each group one of them; empty: 0
    scheduler: SchedulerConfig = SchedulerConfig(min_batch_requests=4, leaf_tokens=4, starvation_after_s=0.5)  # noqa: RUF009

    def config(self) -> Config:
        return Config(
            cluster=ClusterConfig(prefetch=self.prefetch),
            kv_pool=KvPoolConfig(block_size=self.block_size),
            prefill=PrefillConfig(token_budget=self.token_budget, max_requests=4, queue_tokens=128),
            decode=DecodeConfig(max_running=self.max_running, join_iterations=4),
            scheduler=self.scheduler,
        )


class SmallCell:
    """Use `submit` or `arrive_at_random`, disturb with `lose_*`, then `run` and `check_nothing_is_left`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.config = shape.config()
        self.rng = random.Random(shape.seed)
        self.now_s = 0.0
        self.requests: dict[str, Request] = {}
        self.counts: Counter[str] = Counter()
        self.log: list[tuple[float, actions.Action]] = []
        self.services: list[Service] = []  # completed services
        self._left: set[RequestKey] = set()  # reported lost: their next epoch may adopt their KV in the pool
        self.coming = 0  # planned arrivals and disturbances
        self._queue: list[tuple[float, int, Part, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._links: dict[tuple[str, str], float] = {}
        self.core = SchedulerCore(self.config, shape.block_size)
        self._core_process, self._gateway = CoreProcess(), Gateway()
        prefill_ids = tuple(f"prefill-{i}" for i in range(shape.prefills))
        decode_ids = tuple(f"decode-{i}" for i in range(shape.decodes))
        self.pairs = dict.fromkeys(decode_ids, prefill_ids if shape.prefetch else ())
        self.prefills: dict[str, Prefill] = {}
        self.decodes: dict[str, Decode] = {}
        self.shards = Shards(self, shape.nodes, [*prefill_ids, *decode_ids])
        if self.shards.named:
            self._handle(self.shards.event())
        for name in prefill_ids:
            self._new_prefill(name)
        for name in decode_ids:
            self._new_decode(name)
        self.tell_core(self._gateway, events.PairsChanged(tuple(self.pairs.items())))

    # time and messages

    def after(self, seconds: float, owner: Part, call: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (self.now_s + seconds, self._scheduled, owner, call, arguments))

    def delay(self, mean_s: float) -> float:
        return mean_s * self.rng.uniform(0.5, times.SLOWEST)

    def send(self, source: Part, target: Part, method: str, *arguments: Any) -> None:
        """Call a method of another process. The messages of one link arrive in order."""
        self._deliver(source, target, getattr(target, method), *arguments)

    def tell_core(self, source: Part, event: events.Event) -> None:
        self._deliver(source, self._core_process, self._handle, event)

    def _deliver(self, source: Part, target: Part, call: Callable[..., None], *arguments: Any) -> None:
        link = source.name, target.name
        arrival_s = max(self._links.get(link, 0.0), self.now_s + self.delay(times.MESSAGE_S))
        self._links[link] = arrival_s
        self.after(arrival_s - self.now_s, target, call, *arguments)

    def run(self, limit_s: float = 600.0) -> None:
        """Run until no event is left. Raises AssertionError after `limit_s` seconds of virtual time."""
        self._tick()
        while self._queue:
            self.now_s, _, owner, call, arguments = heapq.heappop(self._queue)
            if self.now_s > limit_s:
                raise AssertionError(f"still not done after {limit_s} s: {self.core.describe()}")
            if owner.alive:
                call(*arguments)

    def _tick(self) -> None:
        if self.core.needs_ticks:
            self._handle(events.Tick())
        self._audit()
        for decode in self.decodes.values():
            decode.kick()
        if self.coming or any(not request.ended for request in self.requests.values()):
            self.after(self.config.scheduler.tick_s / 2, self._core_process, self._tick)

    # the core

    def _handle(self, event: events.Event) -> None:
        self.shards.note(event)
        for action in self.core.handle(event, self.now_s):
            self.log.append((self.now_s, action))
            self._carry_out(action)
        if self.rng.random() < 0.05:
            self.core.check_integrity()

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.StartPrefill():
                self._command(self.prefills.get(action.prefill_id), "start", action)
            case actions.Prefetch(prefill_id=None):
                self._command(self.decodes.get(action.decode_id), "offer_from_pool", action)
            case actions.Prefetch():
                self._command(self.prefills.get(action.prefill_id or ""), "prefetch", action)
            case actions.Recall():
                self._command(self.decodes.get(action.decode_id), "recall", action.keys)
            case actions.MarkUrgent():
                self._command(self.decodes.get(action.decode_id), "mark_urgent", action.due_s(self.now_s))
            case actions.CancelAt():
                holders: dict[str, Any] = {**self.prefills, **self.decodes}
                self._command(holders.get(action.instance_id), "cancel", action.keys)
            case actions.ReleasePool():
                self.release_pool(action)
            case actions.Reject():
                for key in action.keys:
                    self.request(key).ended = self.request(key).ended or action.error.code
            case actions.ReportLost():
                self._left.update(action.keys)
                for key in action.keys:
                    self._deliver(self._core_process, self._gateway, self._resubmit, key)

    def release_pool(self, action: actions.ReleasePool) -> None:
        for name, pool in self.shards.pools.items():
            if not action.pool_id or action.pool_id == name:
                self._command(pool, "release", action)

    def _command(self, target: Part | None, method: str, argument: Any) -> None:
        if target is not None:
            self.send(self._core_process, target, method, argument)

    # the gateway

    def request(self, key: RequestKey) -> Request:
        return self.requests[key.request_id]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_size)

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests.update({request.request_id: request for request in requests})
        self.tell_core(self._gateway, events.Submitted(tuple(request.meta for request in requests)))

    def cancel(self, request: Request) -> None:
        if not request.ended:
            request.ended = "cancelled"
            self._deliver(self._gateway, self._core_process, self._cancel, request.key)

    def _cancel(self, key: RequestKey) -> None:
        if not self.core.is_open(key):
            self._release(key)
        self._handle(events.CancelRequested((key,)))

    def _release(self, key: RequestKey) -> None:
        self.release_pool(actions.ReleasePool((key,)))

    def _resubmit(self, key: RequestKey) -> None:
        request = self.request(key)
        if request.ended or request.key != key:
            return  # its last tokens arrived before the report of its loss
        self.counts["resubmitted"] += 1
        request.epoch += 1
        request.waiting_since_s = None
        for pool in self.shards.ask(request):
            self.send(self._core_process, pool, "adopt", request)

    def adopted(self, pool: Pool, request: Request, tokens: int, blocks: int) -> None:
        """A shard reports the KV that it holds of a lost request."""
        self._deliver(pool, self._core_process, self._adopted, pool, request, tokens, blocks)

    def _adopted(self, pool: Pool, request: Request, tokens: int, blocks: int) -> None:
        found = self.shards.answered(pool, request, tokens, blocks)
        if found is not None:
            self._submit_again(*found)

    def _submit_again(self, request: Request, meta: events.RequestMeta) -> None:
        if request.ended:
            self._release(meta.key)
        else:
            self._handle(events.Submitted((meta,)))

    def finish(self, source: Part, key: RequestKey) -> None:
        """The worker sends the last token to the gateway, and reports the end to the core."""
        request = self.request(key)
        request.ended = request.ended or "finished"
        self.tell_core(source, events.Finished((key,)))

    def stopped(self, source: Part, key: RequestKey) -> None:
        """A worker has dropped a cancelled (or lost) request."""
        self.tell_core(source, events.Finished((key,)))

    def write_back(self, source: Part, key: RequestKey, kv_tokens: int) -> None:
        """Commit the missing KV of a returned request to the node's own shard, and report it returned.

        If another shard has all of it, nothing is written.
        """
        pool = self.shards.home(source.name)
        holder = self.shards.where(key)
        if holder is not None and holder.lengths.get(key) == kv_tokens:
            pool = holder

        def committed(blocks: int, new_blocks: int) -> None:
            self.returned(source, key, kv_tokens, blocks, pool)

        pool.write(Write(source, key, kv_tokens, None, committed))

    def returned(self, source: Part, key: RequestKey, kv_tokens: int, blocks: int, pool: Pool | None) -> None:
        assert pool is not None
        since_s = self.request(key).waiting_since_s
        waited_s = 0.0 if since_s is None else self.now_s - since_s
        self.tell_core(source, events.Returned(key, kv_tokens, blocks, waited_s, pool.name))

    # load and disturbances

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call a function at a given time. `run` does not end before it."""
        self.coming += 1

        def do() -> None:
            self.coming -= 1
            call()

        self.after(time_s - self.now_s, self._gateway, do)

    def arrive_at_random(self) -> None:
        """`shape.groups` Poisson arrivals. Most prompts have similar lengths. Some groups have three requests."""
        time_s = 0.0
        for _ in range(self.shape.groups):
            time_s += self.rng.expovariate(self.shape.rate)
            self.at(time_s, self._arrive)

    def _arrive(self) -> None:
        shape, rng = self.shape, self.rng
        size = rng.choice([1, 1, 1, 1, 3])
        number = len(self.requests)
        prompt = rng.randint(1, shape.max_prompt) if rng.random() < 0.3 else min(shape.max_prompt, rng.randint(8, 16))
        group = []
        for i in range(size):
            answer = rng.randint(1, shape.max_answer)
            most = rng.choice([answer, shape.max_answer])
            group.append(Request(f"r{number + i}", prompt, answer, most, f"g{number}", size))
        if shape.priorities:
            priority = rng.choice(shape.priorities)
            for request in group:
                request.priority = priority
        self.submit(group)
        for request in group:
            if rng.random() < shape.cancel_share:
                self.at(self.now_s + rng.uniform(0.0, 1.0), partial(self.cancel, request))

    def lose_prefill(self, name: str) -> None:
        """Kill the process. Its successor starts a little later."""
        self._lose(self.prefills.pop(name), "prefill", partial(self._new_prefill, name))
        for decode in self.decodes.values():
            self.after(self.delay(0.002), decode, decode.source_lost, name)

    def lose_decode(self, name: str) -> None:
        self._lose(self.decodes.pop(name), "decode", partial(self._new_decode, name))
        for prefill in self.prefills.values():
            self.after(self.delay(0.002), prefill, prefill.drop_decode, name)

    def lose_pool(self, number: int = 0) -> None:
        """Kill the shard's process. Its blocks and the waiting writers stay, and a successor continues with them."""
        pool = list(self.shards.pools.values())[number % len(self.shards.pools)]
        pool.alive = False
        newcomer = Gateway()
        newcomer.name = pool.name
        self.tell_core(newcomer, events.InstanceLost("kv_pool", pool.name))
        self.at(self.now_s + 0.2, partial(self._revive_pool, pool))

    def _revive_pool(self, pool: Pool) -> None:
        if not pool.alive and self.shards.pools.get(pool.name) is pool:
            pool.alive = True
            self.introduce("kv_pool", pool.name)
            self.counts["pool lost"] += 1
            pool.report()
            pool.serve()
            for asked in self.shards.adopting.values():
                self.send(self._core_process, pool, "adopt", asked.request)

    def lose_node(self, number: int, *, another: bool) -> None:
        """Lose the node's instances and shard. Its instances start again elsewhere, on a new node if `another`."""
        names = list(self.shards.pools)
        lost = names[number % len(names)]
        for instance in [name for name, home in self.shards.homes.items() if home == lost]:
            if instance in self.prefills:
                self.lose_prefill(instance)
            elif instance in self.decodes:
                self.lose_decode(instance)
        self.counts["nodes lost"] += 1
        new = self.shards.add() if another or len(names) == 1 else None
        self.shards.lose(lost, names[number % len(names) - 1] if new is None else new.name)
        for decode in self.decodes.values():
            self.after(self.delay(0.002), decode, decode.shard_lost, lost)
        self._deliver(self._gateway, self._core_process, self._shard_lost, lost, new)

    def _shard_lost(self, lost: str, new: Pool | None) -> None:
        self._handle(self.shards.event())
        if new is not None:
            new.report()
        for request, meta in self.shards.forget(lost):
            self._submit_again(request, meta)

    def _audit(self) -> None:
        """Messages that release something can be lost with a process. Find and free what no process claims."""
        for pool in self.shards.pools.values():
            for key in list(pool.lengths):
                unclaimed = self.request(key).ended and not self.core.is_open(key)
                if unclaimed and (self.counts["pool lost"] or key in self._left):
                    pool.release(actions.ReleasePool((key,)))

    def _lose(self, part: Part, role: str, successor: Callable[[], None]) -> None:
        part.alive = False
        self.tell_core(part, events.InstanceLost(role, part.name))
        self.shards.serve()
        self.at(self.now_s + 0.2, successor)

    def _new_prefill(self, name: str) -> None:
        self.introduce("prefill", name)
        self.prefills[name] = Prefill(self, name)
        for decode in self.decodes.values():
            self.after(0.0, decode, decode.refresh_lease)

    def _new_decode(self, name: str) -> None:
        self.introduce("decode", name)
        self.decodes[name] = Decode(self, name)
        self.after(0.0, self.decodes[name], self.decodes[name].refresh_lease)

    def introduce(self, role: str, name: str) -> None:
        newcomer = Gateway()
        newcomer.name = name
        self.tell_core(newcomer, events.InstanceJoined(role, name))

    def check_nothing_is_left(self) -> None:
        """Every request has ended, and no process holds a block. Raises AssertionError."""
        self._audit()
        self.core.check_integrity()
        open_requests = [request.request_id for request in self.requests.values() if not request.ended]
        stores = [pool.blocks for pool in self.shards.pools.values()]
        for part in self.prefills.values():
            stores += [part.cache, part.buffers.batch, part.buffers.requests]
        stores += [part.cache for part in self.decodes.values()]
        held = {store.store_id: store.owned_blocks for store in stores if store.owned_blocks}
        for store in stores:
            store.check_integrity()
        busy = [part.name for part in self.decodes.values() if not part.scheduler.holds_nothing()]
        counted = {state: count for state, count in self.core.describe().items() if count}
        if open_requests or held or busy or counted:
            raise AssertionError(f"left: {open_requests[:9]} open, blocks {held}, busy {busy}, core {counted}")
