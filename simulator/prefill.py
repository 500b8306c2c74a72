"""A prefill instance: chunked prefill, offload to the pool, and the two candidate buffers (steps 1, 2 and 4)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from alignedserve.request import RequestKey, Stage
from alignedserve.scheduler.core.actions import Prefetch, StartPrefill
from alignedserve.scheduler.core.events import Finished, Prefilled
from alignedserve.scheduler.cost.pass_model import Passes
from alignedserve.scheduler.cost.step import ChunkShape, StepCost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.prefill_chunks import Chunk, ChunkScheduler
from alignedserve.scheduler.priorities import rank_of
from alignedserve.simulator.buffers import SimulatedBuffers
from alignedserve.simulator.links import Link, transfer
from alignedserve.simulator.pool import Pool, Write
from alignedserve.simulator.report.steps import StepRecorder
from alignedserve.simulator.slowed import SlowedCost

if TYPE_CHECKING:
    from alignedserve.simulator.host import Host

REPORT_EVERY_S = 0.1  # minimum interval between reports of pass times


class SimulatedPrefill:
    def __init__(self, cell: Host, name: str, cost: StepCost) -> None:
        self.name = name
        self.steps = StepRecorder()
        sizes = cell.sizes
        self.cache = BlockAllocator(sizes.prefill_cache, f"{name}/cache")
        self.chunks = ChunkScheduler(self.cache, cell.block_size)
        self.buffers = SimulatedBuffers(name, sizes.batch_buffer, sizes.requests_buffer)
        self.pool = cell.pool_at(name)
        self.from_pool, self.to_pool = cell.pool_link(prefill=True), cell.pool_link(prefill=True)
        self.to_peers, self.from_peers = cell.peer_link(prefill=True), cell.peer_link(prefill=True)
        self.lease_blocks = 0  # of the candidate request buffer, for each decode instance; 0: none is paired
        self.gap_s = cell.hardware.host_overhead_s  # before each pass
        self._cell = cell
        self._cost = SlowedCost.of(cost, cell.hardware.prefill_slowdown)
        self._cost_beside = SlowedCost.of(cost, cell.hardware.prefill_slowdown_beside)
        self._arriving_s: dict[RequestKey, float] = {}  # when a prompt's cached prefix is in its shard's memory
        self._under_way = 0  # passes
        self._free_s = [0.0 for _ in cost.stages_s(())]  # of each stage of its pipeline: when it is free
        self._giving_back: set[RequestKey] = set()
        self._reported: tuple[int, int, int] | None = None
        self._measured_s = 0.0
        self._unmeasured = [0, 0, 0, 0.0]  # passes, tokens, cached tokens, seconds

    def report(self) -> None:
        """Report changes to the core."""
        waits = self.pool.waiting_blocks(self) if self._giving_back else 0
        state = self.buffers.batch.available_blocks, self.buffers.requests.available_blocks, waits
        measured = self._take_measured()
        if state == self._reported and measured is None:
            return
        self._reported = state
        pending_tokens = self.chunks.pending_tokens
        self._cell.send_core(self.buffers.report(self.name, pending_tokens, self.cache.capacity, waits, measured))

    def _take_measured(self) -> Passes | None:
        now_s = self._cell.clock.now_s
        passes, tokens, cached, seconds = self._unmeasured
        if not passes or now_s - self._measured_s < REPORT_EVERY_S:
            return None
        self._measured_s = now_s
        self._unmeasured = [0, 0, 0, 0.0]
        return Passes(int(passes), int(tokens), int(cached), seconds)

    # prefill

    def start(self, action: StartPrefill) -> None:
        for key in action.keys:
            if self.pool.prefixes is None or action.base_tokens:
                self._add(key, action.base_tokens)
            else:
                self._find(key, self._cell.pools.get(action.copy_from, self.pool), first=True)
        self._compute()

    def _add(self, key: RequestKey, base_tokens: int) -> None:
        request = self._cell.request(key)
        self.chunks.add(key, request.prefix_tokens, base_tokens, rank_of(request.arrival.priority))

    def _find(self, key: RequestKey, source: Pool, *, first: bool) -> None:
        """Hold what the cache has of the prompt, after copying what only `source` has, and queue the rest.

        If a prompt under way computes more of it, this one waits until that is cached.
        """
        prefixes, there, arrival = self.pool.prefixes, source.prefixes, self._cell.request(key).arrival
        assert prefixes is not None
        assert there is not None
        if self._cell.request(key).key != key:
            prefixes.under_way.ended(key)
            return
        blocks = there.blocks(arrival, arrival.input_tokens - 1)
        ahead = there.under_way.awaited(blocks, there.match(arrival) // there.trace_tokens, there.trace_tokens)
        if first:
            prefixes.query(arrival)
            prefixes.under_way.announce(key, prefixes.blocks(arrival, arrival.input_tokens - 1))
            if ahead is not None:
                self._cell.counters["prefix_waited_prompts"] += 1
                there.under_way.wait(ahead, partial(self._found_later, key, source))
                return
        if source is not self.pool:
            self._copy_from(source, key)
        found = prefixes.hold(key, arrival)
        if found.disk_tokens:
            self._arrive(key, found.disk_tokens, self.pool.disk)
        self.pool.trim()
        self._add(key, found.tokens)

    def _found_later(self, key: RequestKey, source: Pool) -> None:
        self._find(key, source, first=False)
        self._compute()

    def _copy_from(self, source: Pool, key: RequestKey) -> None:
        """Copy the cached blocks that only the other node's shard has of the prompt to this node's."""
        prefixes, there, arrival = self.pool.prefixes, source.prefixes, self._cell.request(key).arrival
        assert prefixes is not None
        assert there is not None
        found = there.hold(key, arrival, hit=False)
        own_tokens = prefixes.match(arrival)
        if found.disk_tokens:
            self._arrive(key, found.disk_tokens, source.disk)
        if found.tokens > own_tokens:
            self._cell.counters["prefix_copied_tokens"] += found.tokens - own_tokens
            self._arrive(key, found.tokens - own_tokens, *source.to(self.pool))
            prefixes.commit(key, arrival, there.whole(found.tokens))
        there.release(key)

    def _arrive(self, key: RequestKey, tokens: int, *links: Link) -> None:
        """That much of the prompt's cached prefix comes over these links, after what comes already."""
        begin_s = max(self._cell.clock.now_s, self._arriving_s.get(key, 0.0))
        self._arriving_s[key] = transfer(begin_s, tokens * self._cell.hardware.kv_bytes_per_token, *links)

    def _fetch(self, key: RequestKey) -> None:
        """Copy the first part of a prompt, which the pool has or will have in a moment."""
        arriving_s = self._arriving_s.pop(key, 0.0)
        if arriving_s > self._cell.clock.now_s:
            self._cell.clock.at(arriving_s, self._fetch, key)
            return
        cell = self._cell
        blocks = cell.blocks_for(self.chunks.start_of(key))
        pool = cell.pools.get(cell.request(key).pool, self.pool)  # KV that an earlier epoch left may be elsewhere
        done_s = transfer(cell.clock.now_s, blocks * cell.block_bytes, self.from_pool, *pool.to(self.pool))
        cell.clock.at(done_s, self._fetched, key)

    def _fetched(self, key: RequestKey) -> None:
        self.chunks.fetched(key)
        self._compute()

    def _compute(self) -> None:
        config, clock = self._cell.config.prefill, self._cell.clock
        busy = self._under_way == len(self._free_s) or self._free_s[0] > clock.now_s
        plan = [] if busy else self.chunks.plan(config.pass_tokens, config.max_requests)
        for key in self.chunks.take_fetches():
            self._fetch(key)
        if not plan:
            return
        self._under_way += 1
        neighbour = self._cell.neighbour(self.name)
        beside = neighbour is not None and neighbour.computing
        if neighbour is not None:
            neighbour.set_beside(True)
        cost = self._cost_beside if beside else self._cost
        stages_s = cost.stages_s([ChunkShape(chunk.count, chunk.start) for chunk in plan])
        start_s = clock.now_s + self.gap_s
        tokens = cached = 0
        for chunk in plan:
            tokens += chunk.count
            cached += chunk.start
            request = self._cell.request(chunk.key)
            if request.stage is Stage.QUEUE:
                request.enter(Stage.PREFILL, clock.now_s)
        self.steps.add_prefill(start_s, sum(stages_s), tokens)
        before_s, end_s = self._free_s[-1], start_s
        for stage, seconds in enumerate(stages_s):
            end_s = self._free_s[stage] = max(end_s, self._free_s[stage]) + seconds
        measured = self._unmeasured
        measured[0] += 1
        measured[1] += tokens
        measured[2] += cached
        measured[3] += end_s - max(clock.now_s, before_s)
        clock.at(end_s, self._computed, plan)
        if len(self._free_s) > 1:
            clock.at(self._free_s[0], self._compute)

    def _computed(self, plan: Iterable[Chunk]) -> None:
        self._under_way -= 1
        for chunk in plan:
            if self.chunks.done(chunk):
                self._offload(chunk.key)
        self.report()
        self._compute()
        neighbour = self._cell.neighbour(self.name)
        if neighbour is not None and not self._under_way:
            neighbour.set_beside(False)

    def _offload(self, key: RequestKey) -> None:
        """The prompt's first token is generated; its KV is copied to the pool."""
        request, now_s = self._cell.request(key), self._cell.clock.now_s
        kv_tokens = request.prefix_tokens
        if request.generate([now_s]):
            self.chunks.release(key)
            self.pool.keep(request.arrival, kv_tokens, self.to_pool)
            self._cell.end(request)
            self._cell.send_core(Finished((key,)))
            return
        request.enter(Stage.POOL, now_s)
        request.wait(now_s)
        self.pool.write(Write(self, key, kv_tokens, self.to_pool, partial(self._offloaded, key, kv_tokens)))

    def _offloaded(self, key: RequestKey, kv_tokens: int, new_blocks: int | None) -> None:
        self.chunks.release(key)
        if new_blocks is not None:
            self._cell.send_core(Prefilled(key, kv_tokens, new_blocks, new_blocks, self.pool.name))
        self._compute()

    # candidate buffers

    def prefetch(self, action: Prefetch) -> None:
        cell = self._cell
        for key in action.keys:
            pool = cell.pools.get(cell.request(key).pool, self.pool)
            kv_tokens = pool.copies.get(key)
            if kv_tokens is None:
                continue  # it has ended; the message about it has not arrived yet
            blocks = cell.blocks_for(kv_tokens)
            if not self.buffers.take(action.buffer, key, blocks, action.decode_id):
                cell.counters["bounced"] += 1
                cell.send_returned(key, kv_tokens, pool.name)
                continue
            cell.counters["prefetched"] += 1
            cell.request(key).enter(Stage.PREFETCH, cell.clock.now_s)
            done_s = transfer(cell.clock.now_s, blocks * cell.block_bytes, self.from_pool, *pool.to(self.pool))
            cell.clock.at(done_s, self._announce, action, key, kv_tokens)
        self.report()

    def _announce(self, action: Prefetch, key: RequestKey, kv_tokens: int) -> None:
        decode = self._cell.decodes[action.decode_id]
        self._cell.send(decode.offer, key, kv_tokens, action.buffer, action.batch_id, self.name)

    def top_up_lease(self, decode_id: str) -> None:
        if self.buffers.top_up_lease(decode_id, self.lease_blocks):
            self.report()

    def consumed(self, key: RequestKey) -> None:
        """Free a candidate that its decode instance has copied or does not want."""
        if key in self.buffers and key not in self._giving_back:
            self._free(key)

    def give_back(self, key: RequestKey, kv_tokens: int) -> None:
        """Write back to the pool the KV that it lacks of a candidate that did not join, then free the candidate."""
        if key in self.buffers:
            self._giving_back.add(key)
            then = partial(self._given_back, key, kv_tokens)
            self.pool.write(Write(self, key, kv_tokens, self.to_pool, then))

    def _given_back(self, key: RequestKey, kv_tokens: int, new_blocks: int | None) -> None:
        self._giving_back.discard(key)
        self._free(key)
        if new_blocks is not None:
            self._cell.send_returned(key, kv_tokens, self.pool.name)

    def _free(self, key: RequestKey) -> None:
        decode_id = self.buffers.free(key)
        self.report()
        self._cell.send(self._cell.decodes[decode_id].refresh_lease)
