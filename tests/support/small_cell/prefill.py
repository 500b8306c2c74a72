"""A prefill instance of a small cell: chunked prefill, offload to the pool, and the candidate buffers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from alignedserve.request import RequestKey
from alignedserve.scheduler.core.actions import Prefetch, StartPrefill
from alignedserve.scheduler.core.events import Lost, Prefilled
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.prefill_chunks import Chunk, ChunkScheduler
from alignedserve.scheduler.priorities import rank_of
from alignedserve.simulator.buffers import SimulatedBuffers
from support.small_cell import times
from support.small_cell.pool import Write

if TYPE_CHECKING:
    from support.small_cell.cell import SmallCell


class Prefill:
    def __init__(self, cell: SmallCell, name: str) -> None:
        self.cell, self.name = cell, name
        self.alive = True
        shape = cell.shape
        self.cache = BlockAllocator(shape.prefill_cache, f"{name}/cache")
        self.chunks = ChunkScheduler(self.cache, shape.block_size)
        self.buffers = SimulatedBuffers(name, shape.batch_buffer, shape.requests_buffer)
        self.groups: dict[RequestKey, list[RequestKey]] = {}  # by the request that carries the prompt
        self.lead: dict[RequestKey, RequestKey] = {}
        self.busy = False
        self.home = cell.shards.home(name)
        self.report()

    def report(self) -> None:
        self.cell.tell_core(self, self.buffers.report(self.name, self.chunks.pending_tokens, self.cache.capacity))

    # prefill

    def start(self, action: StartPrefill) -> None:
        keys = action.keys
        self.groups[keys[0]] = list(keys)
        self.lead.update(dict.fromkeys(keys, keys[0]))
        request = self.cell.request(keys[0])
        rank = rank_of(request.priority)
        self.chunks.add(keys[0], request.prompt + request.tokens, action.base_tokens, rank)
        self.cell.counts["reused"] += action.base_tokens
        self.compute()

    def fetched(self, key: RequestKey) -> None:
        self.chunks.fetched(key, failed=self.cell.rng.random() < 0.1)
        self.compute()

    def compute(self) -> None:
        config = self.cell.config.prefill
        plan = [] if self.busy else self.chunks.plan(config.pass_tokens, config.max_requests)
        for key in self.chunks.take_fetches():
            self.cell.after(self.cell.delay(0.002), self, self.fetched, key)
        if plan:
            self.busy = True
            self.cell.after(0.001 + 1e-4 * sum(chunk.count for chunk in plan), self, self.computed, plan)

    def computed(self, plan: Iterable[Chunk]) -> None:
        self.busy = False
        for chunk in plan:
            if self.chunks.done(chunk):
                self.offload(chunk.key)
        self.compute()

    def offload(self, lead: RequestKey) -> None:
        for key in list(self.groups[lead]):
            if self.cell.request(key).generate(self.cell.now_s):
                self.forget(key)
                self.cell.finish(self, key)
        left = list(self.groups.get(lead, ()))
        if not left:
            self.chunks.release(lead)
        for key in left:
            share = left[0] if key != left[0] else None
            kv_tokens = self.cell.request(key).kv_tokens
            then = partial(self.offloaded, lead, key, kv_tokens)
            self.home.write(Write(self, key, kv_tokens, share, then))

    def offloaded(self, lead: RequestKey, key: RequestKey, kv_tokens: int, blocks: int, new_blocks: int) -> None:
        self.forget(key)
        if lead not in self.groups:
            self.chunks.release(lead)
            self.cell.after(0.0, self, self.compute)
        self.cell.request(key).wait(self.cell.now_s, evicted=False)
        self.cell.tell_core(self, Prefilled(key, kv_tokens, blocks, new_blocks, self.home.name))
        self.report()

    def forget(self, key: RequestKey) -> None:
        lead = self.lead.pop(key)
        self.groups[lead].remove(key)
        if not self.groups[lead]:
            del self.groups[lead]

    def cancel(self, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            if key in self.lead:
                lead = self.lead[key]
                self.forget(key)
                self.home.discard(key)
                if lead not in self.groups and not self.chunks.cancel(lead):
                    self.chunks.release(lead)
                self.cell.stopped(self, key)
        self.compute()
        self.home.serve()

    # candidate buffers

    def prefetch(self, action: Prefetch) -> None:
        for key in action.keys:
            pool = self.cell.shards.where(key)
            kv_tokens = None if pool is None else pool.lengths.get(key)
            if self.cell.shards.is_gone(key):
                self.cell.tell_core(self, Lost((key,), "its shard is gone"))
                continue
            if kv_tokens is None:
                continue  # it has ended; the message about it has not arrived yet
            blocks = self.cell.blocks_for(kv_tokens)
            alive = action.decode_id in self.cell.decodes  # else no instance gets the announcement
            if not (alive and self.buffers.take(action.buffer, key, blocks, action.decode_id)):
                self.cell.counts["bounced"] += 1
                self.cell.returned(self, key, kv_tokens, blocks, pool)
                continue
            self.cell.after(self.cell.delay(times.PREFETCH_S), self, self.announce, action, key, kv_tokens)
        self.report()

    def announce(self, action: Prefetch, key: RequestKey, kv_tokens: int) -> None:
        decode = self.cell.decodes.get(action.decode_id)
        if key in self.buffers and decode is not None:
            self.cell.send(self, decode, "offer", key, kv_tokens, action.buffer, action.batch_id, self.name)

    def top_up_lease(self, decode_id: str) -> int:
        """Blocks of the candidate request buffer that the decode instance may evict to."""
        self.buffers.top_up_lease(decode_id, self.buffers.requests.capacity // 4)
        return self.buffers.leased_blocks(decode_id)

    def free(self, key: RequestKey) -> None:
        decode_id = self.buffers.free(key)
        self.report()
        decode = self.cell.decodes.get(decode_id)
        if decode is not None:
            self.cell.send(self, decode, "refresh_lease")

    def consumed(self, key: RequestKey) -> None:
        if key in self.buffers:
            self.free(key)

    def give_back(self, key: RequestKey, kv_tokens: int) -> None:
        if key in self.buffers:
            self.free(key)
            self.cell.write_back(self, key, kv_tokens)

    def drop_decode(self, decode_id: str) -> None:
        self.buffers.drop_decode(decode_id)
        self.report()
