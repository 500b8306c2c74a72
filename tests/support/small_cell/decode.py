"""A decode instance of a small cell: the real iteration scheduler, copies, and iterations that only count tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.actions import Prefetch
from alignedserve.scheduler.core.events import Finished, Joined, Lost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import (
    BufferKind,
    CancelOutcome,
    Candidate,
    Evict,
    IterationPlan,
    IterationStatus,
    RunItem,
)
from alignedserve.scheduler.priorities import rank_of
from alignedserve.scheduler.systems import default_objective_s
from alignedserve.simulator.buffers import decode_report
from support.chains import chain_of
from support.small_cell import times
from support.small_cell.pool import Write
from support.small_cell.requests import Service

if TYPE_CHECKING:
    from support.small_cell.cell import SmallCell


class Decode:
    def __init__(self, cell: SmallCell, name: str) -> None:
        self.cell, self.name = cell, name
        self.alive = True
        config = cell.config
        self.cache = BlockAllocator(cell.shape.decode_cache, f"{name}/cache")
        pace = Pace(math.inf, lambda lengths: sum(map(times.iteration_s, lengths))) if cell.shape.priorities else None
        self.scheduler = IterationScheduler.configured(
            config, self.cache, cell.shape.block_size, default_objective_s(config.scheduler), pace
        )
        self.source: dict[RequestKey, str] = {}  # the prefill instance of each candidate, or "" for the pool
        self.length: dict[RequestKey, int] = {}  # KV tokens of each request that is held
        self.broken: set[RequestKey] = set()  # being copied from an instance that has ended
        self.joined_s: dict[RequestKey, float] = {}  # of requests that hold blocks of the cache
        self.tombstones: set[RequestKey] = set()  # cancelled before they were announced
        self.busy = self.kicked = False
        self.reported: tuple[int, IterationStatus, int] | None = None
        self.home = cell.shards.home(name)
        self.report()

    def report(self) -> None:
        waits = sum(self.home.missing_blocks(write) for write in self.home.waiting if write.writer is self)
        status = self.scheduler.status()
        state = self.cache.free_blocks, status, waits
        if state == self.reported:
            return
        self.reported = state
        self.cell.tell_core(self, decode_report(self.name, self.cache, status, waits))

    # candidates

    def offer(self, key: RequestKey, kv_tokens: int, kind: BufferKind, batch_id: int, source: str) -> None:
        if key in self.tombstones:
            self.tombstones.discard(key)
            self.release_source(key, source)
            self.cell.stopped(self, key)
            return
        request = self.cell.request(key)
        chain = (
            None
            if request.group_size < 2
            else chain_of([request.group_id] * request.prompt, self.cell.shape.block_size)
        )
        self.source[key], self.length[key] = source, kv_tokens
        most = request.prompt + request.most
        objective_s = request.wait_objective_s
        candidate = Candidate(
            key,
            kv_tokens,
            most,
            chain,
            kind,
            batch_id,
            wait_objective_s=objective_s,
            rank=rank_of(request.priority),
        )
        self.scheduler.offer(candidate, self.cell.now_s)
        self.kick()

    def offer_from_pool(self, action: Prefetch) -> None:
        for key in action.keys:
            pool = self.cell.shards.where(key)
            kv_tokens = None if pool is None else pool.lengths.get(key)
            if self.cell.shards.is_gone(key):
                self.cell.tell_core(self, Lost((key,), "its shard is gone"))
            elif kv_tokens is not None:
                self.offer(key, kv_tokens, action.buffer, action.batch_id, "")

    def release_source(self, key: RequestKey, source: str) -> None:
        if source in self.cell.prefills:
            self.cell.send(self, self.cell.prefills[source], "consumed", key)

    def recall(self, keys: Iterable[RequestKey]) -> None:
        self.scheduler.recall(keys)
        self.kick()

    def mark_urgent(self, due_s: Mapping[RequestKey, float]) -> None:
        self.scheduler.mark_urgent(due_s)
        self.kick()

    def cancel(self, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            outcome = self.scheduler.cancel(key)
            if outcome is CancelOutcome.NOT_HERE:
                self.tombstones.add(key)
            elif outcome is not CancelOutcome.COPYING:
                self.drop(key)
        self.kick()

    def drop(self, key: RequestKey) -> None:
        self.release_source(key, self.source.get(key, ""))
        self.forget(key)
        self.cell.stopped(self, key)

    def forget(self, key: RequestKey) -> None:
        self.source.pop(key, None)
        self.length.pop(key, None)
        self.broken.discard(key)
        self.end_service(key)

    def end_service(self, key: RequestKey) -> None:
        begin_s = self.joined_s.pop(key, None)
        if begin_s is not None:
            self.cell.services.append(Service(key.request_id, self.name, begin_s, self.cell.now_s))

    def refresh_lease(self) -> None:
        pairs = [self.cell.prefills[name] for name in self.cell.pairs[self.name] if name in self.cell.prefills]
        self.scheduler.set_requests_buffer_lease(max((pair.top_up_lease(self.name) for pair in pairs), default=0))

    def source_lost(self, prefill_id: str) -> None:
        self.lose([key for key, source in self.source.items() if source == prefill_id], prefill_id)
        self.refresh_lease()

    def shard_lost(self, name: str) -> None:
        stored = self.cell.shards.stored
        self.lose([key for key, source in self.source.items() if not source and stored.get(key) == name], name)

    def lose(self, keys: Iterable[RequestKey], source: str) -> None:
        for key in keys:
            if self.scheduler.withdraw(key):
                self.forget(key)
                self.cell.tell_core(self, Lost((key,), f"{source} was lost"))
            else:
                self.broken.add(key)
        self.kick()

    # the loop

    def kick(self) -> None:
        if not self.kicked and not self.busy:
            self.kicked = True
            self.cell.after(0.0, self, self.iterate)

    def iterate(self) -> None:
        self.kicked = False
        if self.busy:
            return
        plan = self.scheduler.plan(self.cell.now_s)
        if self.cell.rng.random() < 0.1:
            self.scheduler.check_integrity()
        self.cell.counts["stalled"] += plan.stalled
        self.start_copies(plan)
        if plan.run:
            self.busy = True
            longest = max(item.kv_tokens for item in plan.run)
            self.cell.after(times.iteration_s(longest), self, self.iterated, plan.run)
        self.report()

    def iterated(self, run: Sequence[RunItem]) -> None:
        self.busy = False
        tokens = []
        for item in run:
            request = self.cell.request(item.key)
            finished = False
            if request.key == item.key and item.key in self.length:
                if not item.kv_tokens == request.kv_tokens == self.length[item.key]:
                    raise AssertionError(f"{item} does not go on where {request} is")
                finished = request.generate(self.cell.now_s)
                self.length[item.key] += 1
            tokens.append((item.key, finished))
        self.scheduler.advance(tokens)
        for key, finished in tokens:
            if finished:
                self.forget(key)
                self.cell.finish(self, key)
        self.iterate()

    # copies

    def start_copies(self, plan: IterationPlan) -> None:
        for join in plan.joins:
            blocks = len(join.block_ids) - join.resident_blocks
            self.joined_s[join.key] = self.cell.now_s
            self.cell.after(self.cell.delay(times.copy_in_s(blocks)), self, self.copied_in, join.key)
        for evict in plan.evictions:
            self.evict(evict)
        for key in plan.give_back.keys:
            self.give_back(key)

    def copied_in(self, key: RequestKey) -> None:
        if key in self.broken:
            self.scheduler.copy_failed(key)
            self.forget(key)
            self.cell.tell_core(self, Lost((key,), "its source is gone"))
        elif self.scheduler.copied_in(key):
            self.release_source(key, self.source.pop(key))
            self.cell.tell_core(self, Joined(self.name, (key,)))
        else:
            self.drop(key)
        self.kick()

    def evict(self, evict: Evict) -> None:
        self.cell.counts["evicted"] += 1
        request = self.cell.request(evict.key)
        if request.key == evict.key:
            request.wait(self.cell.now_s, evicted=True)
        if evict.to_pool:
            then = partial(self.written, evict)
            failed = partial(self.eviction_failed, evict.key)
            self.home.write(Write(self, evict.key, evict.kv_tokens, None, then, failed))
            return
        for name in self.cell.pairs[self.name]:
            prefill = self.cell.prefills.get(name)
            if prefill is not None and prefill.buffers.leased_blocks(self.name) >= len(evict.block_ids):
                prefill.buffers.adopt(evict.key, len(evict.block_ids), self.name)
                self.cell.after(self.cell.delay(times.COPY_OUT_S), self, self.evicted, evict.key, name, prefill)
                return
        self.cell.after(0.0, self, self.eviction_failed, evict.key)  # the lease ended with its prefill instance

    def evicted(self, key: RequestKey, name: str, prefill: object) -> None:
        if self.cell.prefills.get(name) is not prefill:
            self.eviction_failed(key)
            return
        self.source[key] = name
        self.end_service(key)
        if not self.scheduler.copied_out(key):
            self.drop(key)
        self.refresh_lease()
        self.kick()

    def eviction_failed(self, key: RequestKey) -> None:
        if not self.scheduler.copy_failed(key):
            self.drop(key)
        self.kick()

    def written(self, evict: Evict, blocks: int, new_blocks: int) -> None:
        self.cell.after(self.cell.delay(times.COPY_OUT_S), self, self.returned, evict, blocks)

    def returned(self, evict: Evict, blocks: int) -> None:
        if self.scheduler.copied_out(evict.key):
            self.forget(evict.key)
            self.cell.returned(self, evict.key, evict.kv_tokens, blocks, self.home)
        else:
            self.drop(evict.key)
        self.kick()

    def give_back(self, key: RequestKey) -> None:
        self.cell.counts["given back"] += 1
        kv_tokens, source = self.length[key], self.source[key]
        self.forget(key)
        if source in self.cell.prefills:
            self.cell.send(self, self.cell.prefills[source], "give_back", key, kv_tokens)
        elif not source:
            self.cell.write_back(self, key, kv_tokens)
        else:
            self.cell.tell_core(self, Finished((key,)))
