"""The core and the iteration schedulers in a small world with delays: nothing is lost, stuck, leaked or starved.

Everything that is not a decision is faked here: messages are in order on each link, copies and computing take time,
every store counts its blocks. Tokens are not computed, only counted.
"""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import pytest

from alignedserve.config import ClusterConfig, Config, DecodeConfig, KvPoolConfig, PrefillConfig, SchedulerConfig
from alignedserve.errors import CancelledError
from alignedserve.request import RequestKey
from alignedserve.scheduler import actions, events
from alignedserve.scheduler.block_allocator import BlockAllocator
from alignedserve.scheduler.core import SchedulerCore
from alignedserve.scheduler.events import BufferKind
from alignedserve.scheduler.iteration import CancelOutcome, IterationScheduler
from alignedserve.scheduler.plan import Candidate
from alignedserve.scheduler.prefill_chunks import ChunkScheduler


@dataclass
class Request:
    """What the gateway knows: how long the prompt is, how long the answer will be, what has come of it so far."""

    request_id: str
    prompt: int
    answer: int
    most: int  # max_tokens
    group_id: str
    group_size: int
    epoch: int = 0
    tokens: int = 0
    ended: str = ""
    waiting_since_s: float | None = None
    longest_wait_s: float = 0.0

    @property
    def key(self):
        return RequestKey(self.request_id, self.epoch)

    @property
    def kv_tokens(self):
        return self.prompt + self.tokens - 1  # the last token's KV is computed with the next one

    def token(self, now_s):
        self.tokens += 1
        if self.waiting_since_s is not None:
            self.longest_wait_s = max(self.longest_wait_s, now_s - self.waiting_since_s)
            self.waiting_since_s = None


class Pool:
    """Counts blocks by request; writers that find no room wait in line."""

    def __init__(self, world, capacity):
        self.world = world
        self.blocks = BlockAllocator(capacity, "pool")
        self.lengths = {}
        self.waiting = deque()
        self.report()

    def report(self):
        self.world.tell_core(
            "pool", events.PoolReported("pool", self.blocks.capacity, self.blocks.free_blocks), link="pool"
        )

    def write(self, key, kv_tokens, share_with, then):
        """Commit the request's KV as soon as there is room, at once where it is here already; `then()` follows."""
        if self.lengths.get(key) == kv_tokens:
            then(len(self.blocks.blocks_of(key)), 0)
            return
        self.waiting.append((key, kv_tokens, share_with, then))
        self.serve()

    def serve(self):
        while self.waiting:
            key, kv_tokens, share_with, then = self.waiting[0]
            have = len(self.blocks.blocks_of(key))
            shared = self.blocks.blocks_of(share_with)[: self.world.full_blocks(key)]
            need = self.world.blocks_for(kv_tokens) - max(have, len(shared))
            if self.blocks.allocate(need, key) is None:
                return
            if not have:
                self.blocks.retain(shared, key)
            self.lengths[key] = kv_tokens
            self.waiting.popleft()
            self.report()
            then(len(self.blocks.blocks_of(key)), need)

    def discard(self, key):
        """The writer has given up."""
        self.waiting = deque(entry for entry in self.waiting if entry[0] != key)

    def release(self, action):
        for index, key in enumerate(action.keys):
            if action.dropped and self.lengths.get(key) != action.kv_tokens[index]:
                continue
            self.blocks.release_all(key)
            self.lengths.pop(key, None)
        self.report()
        self.serve()


class Prefill:
    def __init__(self, world, name, config, cache, batch, requests):
        self.world, self.name, self.config = world, name, config
        self.cache = BlockAllocator(cache, f"{name}/cache")
        self.chunks = ChunkScheduler(self.cache, world.block_size)
        self.buffers = {
            BufferKind.BATCH: BlockAllocator(batch, f"{name}/batch"),
            BufferKind.REQUESTS: BlockAllocator(requests, f"{name}/requests"),
        }
        self.groups = {}
        self.lead = {}
        self.candidates = {}  # key -> buffer kind
        self.busy = False
        self.report()

    def report(self):
        batch, requests = self.buffers.values()
        self.world.tell_core(
            self.name,
            events.PrefillReported(
                self.name,
                self.chunks.pending_tokens,
                self.cache.capacity,
                batch.capacity,
                batch.available_blocks,
                requests.capacity,
                requests.available_blocks,
            ),
        )

    def start(self, keys):
        self.groups[keys[0]] = list(keys)
        self.lead.update(dict.fromkeys(keys, keys[0]))
        self.chunks.add(keys[0], self.world.of(keys[0]).prompt + self.world.of(keys[0]).tokens)
        self.compute()

    def compute(self):
        if self.busy:
            return
        plan = self.chunks.plan(self.config.token_budget, self.config.max_requests)
        if plan:
            self.busy = True
            self.world.after(0.001 + 1e-4 * sum(chunk.count for chunk in plan), self.computed, plan)

    def computed(self, plan):
        self.busy = False
        for chunk in plan:
            if self.chunks.done(chunk):
                self.offload(chunk.key)
        self.compute()

    def offload(self, lead):
        keys = self.groups[lead]
        for key in list(keys):
            request = self.world.of(key)
            request.token(self.world.now_s)
            if request.tokens >= request.answer:
                self.forget(key)
                self.world.finish(key, self.name)
        left = list(keys)
        if not left:
            self.chunks.release(lead)
            self.compute()
        for key in left:
            share = left[0] if key != left[0] else None
            kv_tokens = self.world.of(key).kv_tokens
            self.world.pool.write(key, kv_tokens, share, partial(self.offloaded, lead, key, kv_tokens))

    def offloaded(self, lead, key, kv_tokens, blocks, new_blocks):
        self.forget(key)
        if lead not in self.groups:
            self.chunks.release(lead)
            self.world.after(0, self.compute)
        self.world.of(key).waiting_since_s = self.world.now_s
        self.world.tell_core(self.name, events.Prefilled(key, kv_tokens, blocks, new_blocks))
        self.report()

    def forget(self, key):
        lead = self.lead.pop(key)
        self.groups[lead].remove(key)
        if not self.groups[lead]:
            del self.groups[lead]

    def cancel(self, keys):
        for key in keys:
            if key in self.lead:
                lead = self.lead[key]
                self.forget(key)
                self.world.pool.discard(key)
                if lead not in self.groups and not self.chunks.cancel(lead):
                    self.chunks.release(lead)
                self.world.stopped(key, self.name)
            elif key in self.candidates:
                self.free(key)
                self.world.stopped(key, self.name)
                self.world.to_all_decodes(lambda decode, key=key: decode.withdrawn(key), self.name)
        self.compute()
        self.world.pool.serve()

    def prefetch(self, action):
        for key in action.keys:
            kv_tokens = self.world.pool.lengths.get(key)
            if kv_tokens is None:
                continue  # it has ended; the word is on its way here
            if self.buffers[action.buffer].allocate(self.world.blocks_for(kv_tokens), key) is None:
                self.world.bounces += 1
                self.world.tell_core(self.name, events.Returned(key, kv_tokens, self.world.blocks_for(kv_tokens)))
                continue
            self.candidates[key] = action.buffer
            self.world.after(self.world.delay(0.005), self.announce, action, key, kv_tokens)
        self.report()

    def announce(self, action, key, kv_tokens):
        if key in self.candidates:
            decode = self.world.decodes[action.decode_id]
            self.world.send(
                self.name, action.decode_id, decode.offer, key, kv_tokens, action.buffer, action.batch_id, self.name
            )

    def free(self, key):
        self.buffers[self.candidates.pop(key)].release_all(key)
        self.report()
        self.world.to_all_decodes(lambda decode: decode.lease(self), self.name)

    def consumed(self, key):
        if key in self.candidates:
            self.free(key)

    def give_back(self, key, kv_tokens):
        """Write back what the pool lacks, and report it returned."""
        if key not in self.candidates:
            return
        self.free(key)
        self.world.give_back(self.name, key, kv_tokens)


class Decode:
    def __init__(self, world, name, config, cache, starvation_after_s):
        self.world, self.name = world, name
        self.cache = BlockAllocator(cache, f"{name}/cache")
        self.scheduler = IterationScheduler(config, self.cache, world.block_size, starvation_after_s=starvation_after_s)
        self.source = {}  # candidate -> prefill instance, None: the pool
        self.length = {}
        self.leased = {}
        self.busy = False
        self.kicked = False
        self.last = None
        self.cancelled = set()
        self.report()

    def report(self):
        status = self.scheduler.status()
        waits = sum(
            max(0, self.world.blocks_for(tokens) - len(self.world.pool.blocks.blocks_of(key)))
            for key, tokens, _, _ in self.world.pool.waiting
            if self.world.unwritten.get(key) is self
        )
        now = (self.cache.free_blocks, status, waits)
        if now == self.last:
            return
        self.last = now
        self.world.tell_core(
            self.name,
            events.DecodeReported(
                self.name,
                self.cache.capacity,
                self.cache.free_blocks,
                status.running,
                status.shortest_tokens,
                status.longest_tokens,
                status.batch_id,
                status.switching,
                status.batch_buffer_requests,
                status.requests_buffer_requests,
                waits,
            ),
        )

    def lease(self, prefill):
        """Keep a standing lease in the candidate requests buffer of a paired prefill instance."""
        if prefill.name not in self.world.pairs.get(self.name, ()):
            return
        buffer = prefill.buffers[BufferKind.REQUESTS]
        missing = buffer.capacity // 4 - len(buffer.leased_to(self.name))
        if missing > 0:
            buffer.lease(missing, self.name)
        most = max(len(p.buffers[BufferKind.REQUESTS].leased_to(self.name)) for p in self.world.prefills.values())
        self.scheduler.set_requests_buffer_lease(most)

    def offer(self, key, kv_tokens, kind, batch_id, source):
        if key in self.cancelled:
            self.cancelled.discard(key)
            self.release_source(key, source)
            self.world.stopped(key, self.name)
            return
        request = self.world.of(key)
        shared = request.prompt if request.group_size > 1 else 0
        self.source[key] = source
        self.length[key] = kv_tokens
        most = request.prompt + request.most
        self.scheduler.offer(
            Candidate(key, kv_tokens, most, request.group_id, shared, kind, batch_id), self.world.now_s
        )
        self.kick()

    def offer_all(self, action):
        for key in action.keys:
            if key in self.world.pool.lengths:
                self.offer(key, self.world.pool.lengths[key], action.buffer, action.batch_id, None)

    def release_source(self, key, source):
        if source is not None:
            self.world.send(self.name, source, self.world.prefills[source].consumed, key)

    def withdrawn(self, key):
        if self.scheduler.withdraw(key):
            del self.source[key]
        self.kick()

    def recall(self, keys):
        self.scheduler.recall(keys)
        self.kick()

    def urgent(self, keys):
        self.scheduler.mark_urgent(keys)
        self.kick()

    def cancel(self, keys):
        for key in keys:
            outcome = self.scheduler.cancel(key)
            if outcome is CancelOutcome.NOT_HERE:
                self.cancelled.add(key)
            elif outcome is not CancelOutcome.COPYING:
                self.drop(key)
        self.kick()

    def drop(self, key):
        self.release_source(key, self.source.pop(key, None))
        self.length.pop(key)
        self.world.stopped(key, self.name)

    def kick(self):
        if not self.kicked and not self.busy:
            self.kicked = True
            self.world.after(0, self.iterate)

    def iterate(self):
        self.kicked = False
        if self.busy:
            return
        plan = self.scheduler.plan(self.world.now_s)
        self.scheduler.check_integrity()
        self.world.stalled += plan.stalled
        for join in plan.joins:
            copied = len(join.block_ids) - join.resident_blocks
            self.world.after(self.world.delay(0.001 * (1 + copied)), self.copied_in, join.key)
        for evict in plan.evictions:
            self.evict(evict)
        for key in plan.give_back.keys:
            self.give_back(key)
        if plan.run:
            self.busy = True
            longest = max(item.kv_tokens for item in plan.run)
            self.world.after(0.002 + 1e-5 * longest, self.iterated, plan.run)
        self.report()

    def iterated(self, run):
        self.busy = False
        tokens = []
        for item in run:
            request = self.world.of(item.key)
            if request.key != item.key or item.key not in self.length:
                tokens.append((item.key, False))
                continue
            assert item.kv_tokens == request.kv_tokens == self.length[item.key]
            request.token(self.world.now_s)
            self.length[item.key] += 1
            tokens.append((item.key, request.tokens >= request.answer))
        self.scheduler.advance(tokens)
        for key, finished in tokens:
            if finished:
                del self.length[key]
                self.source.pop(key, None)
                self.world.finish(key, self.name)
        self.iterate()

    def copied_in(self, key):
        if not self.scheduler.copied_in(key):
            self.drop(key)
        else:
            self.release_source(key, self.source.pop(key))
            self.world.tell_core(self.name, events.Joined(self.name, (key,)))
        self.kick()

    def evict(self, evict):
        self.world.evictions += 1
        request = self.world.of(evict.key)
        if request.key == evict.key:
            request.waiting_since_s = self.world.now_s
        if not evict.to_pool:
            for name in self.world.pairs[self.name]:
                buffer = self.world.prefills[name].buffers[BufferKind.REQUESTS]
                leased = buffer.leased_to(self.name)
                if len(leased) >= len(evict.block_ids):
                    buffer.assign_leased(leased[: len(evict.block_ids)], self.name, evict.key)
                    self.world.prefills[name].candidates[evict.key] = BufferKind.REQUESTS
                    self.world.after(self.world.delay(0.004), self.evicted, evict.key, name)
                    return
            raise AssertionError("the scheduler evicted to a lease that was not there")
        self.world.unwritten[evict.key] = self
        self.world.pool.write(
            evict.key,
            evict.kv_tokens,
            None,
            lambda blocks, new: self.world.after(self.world.delay(0.004), self.returned, evict, blocks),
        )

    def evicted(self, key, prefill):
        if self.scheduler.copied_out(key):
            self.source[key] = prefill
        else:
            self.source[key] = prefill
            self.drop(key)
        self.lease(self.world.prefills[prefill])
        self.kick()

    def returned(self, evict, blocks):
        self.world.unwritten.pop(evict.key, None)
        if self.scheduler.copied_out(evict.key):
            del self.length[evict.key]
            self.world.tell_core(self.name, events.Returned(evict.key, evict.kv_tokens, blocks))
        else:
            self.drop(evict.key)
        self.kick()

    def give_back(self, key):
        self.world.given_back += 1
        kv_tokens = self.length.pop(key)
        source = self.source.pop(key)
        if source is not None:
            self.world.send(self.name, source, self.world.prefills[source].give_back, key, kv_tokens)
        else:
            self.world.give_back(self.name, key, kv_tokens)


@dataclass
class Shape:
    """Sizes of a world: deliberately too small for its load."""

    seed: int = 0
    block_size: int = 4
    prefills: int = 1
    decodes: int = 1
    prefetch: bool = True
    policy: str = "aligned"
    pool_blocks: int = 120
    prefill_cache: int = 40
    decode_cache: int = 40
    batch_buffer: int = 16
    requests_buffer: int = 12
    max_prompt: int = 60
    max_answer: int = 40
    groups: int = 75
    rate: float = 60.0
    cancel_share: float = 0.0
    config: dict = field(default_factory=dict)


class World:
    def __init__(self, shape):
        self.shape = shape
        self.rng = random.Random(shape.seed)
        self.block_size = shape.block_size
        self.now_s = 0.0
        self.queue = []
        self.count = 0
        self.links = {}
        self.requests = {}
        self.unwritten = {}
        self.arrivals = shape.groups
        self.stalled = self.evictions = self.given_back = self.bounces = self.resubmitted = 0
        self.log = []
        self.config = Config(
            cluster=ClusterConfig(prefetch=shape.prefetch),
            kv_pool=KvPoolConfig(block_size=shape.block_size),
            prefill=PrefillConfig(token_budget=32, max_requests=4, queue_tokens=128),
            decode=DecodeConfig(max_running=shape.config.pop("max_running", 16), join_iterations=4),
            scheduler=SchedulerConfig(
                policy=shape.policy,
                min_batch_requests=shape.config.pop("min_batch_requests", 4),
                max_prefix_tokens=256,
                leaf_tokens=4,
                starvation_after_s=shape.config.pop("starvation_after_s", 0.5),
                **shape.config,
            ),
        )
        self.core = SchedulerCore(self.config, shape.block_size)
        names = [f"prefill-{i}" for i in range(shape.prefills)], [f"decode-{i}" for i in range(shape.decodes)]
        self.pairs = {name: tuple(names[0]) if shape.prefetch else () for name in names[1]}
        self.prefills, self.decodes = {}, {}
        for role, ids in zip(("prefill", "decode"), names, strict=True):
            for name in ids:
                self.event(events.InstanceJoined(role, name))
        self.event(events.InstanceJoined("kv_pool", "pool"))
        self.event(events.PairsChanged(tuple(self.pairs.items())))
        self.pool = Pool(self, shape.pool_blocks)
        for name in names[0]:
            self.prefills[name] = Prefill(
                self, name, self.config.prefill, shape.prefill_cache, shape.batch_buffer, shape.requests_buffer
            )
        for name in names[1]:
            self.decodes[name] = Decode(
                self, name, self.config.decode, shape.decode_cache, self.config.scheduler.starvation_after_s
            )
        for prefill in self.prefills.values():
            self.to_all_decodes(lambda decode, prefill=prefill: decode.lease(prefill), prefill.name)

    # time and messages

    def after(self, seconds, call, *arguments):
        self.count += 1
        heapq.heappush(self.queue, (self.now_s + seconds, self.count, call, arguments))

    def delay(self, mean_s):
        return mean_s * self.rng.uniform(0.5, 2.0)

    def send(self, source, target, call, *arguments):
        """Messages of one link arrive in order."""
        arrival = max(self.links.get((source, target), 0.0), self.now_s + self.delay(0.0005))
        self.links[source, target] = arrival
        self.after(arrival - self.now_s, call, *arguments)

    def tell_core(self, source, event, link=None):
        self.send(link or source, "core", self.event, event)

    def to_all_decodes(self, call, source):
        for name, decode in self.decodes.items():
            self.send(source, name, call, decode)

    # the core

    def event(self, event):
        for action in self.core.handle(event, self.now_s):
            self.log.append((self.now_s, action))
            self.carry_out(action)
        if self.rng.random() < 0.05:
            self.core.check_integrity()

    def carry_out(self, action):
        match action:
            case actions.StartPrefill():
                self.send("core", action.prefill_id, self.prefills[action.prefill_id].start, action.keys)
            case actions.Prefetch(prefill_id=None):
                self.send("core", action.decode_id, self.decodes[action.decode_id].offer_all, action)
            case actions.Prefetch():
                self.send("core", action.prefill_id, self.prefills[action.prefill_id].prefetch, action)
            case actions.Recall():
                self.send("core", action.decode_id, self.decodes[action.decode_id].recall, action.keys)
            case actions.MarkUrgent():
                self.send("core", action.decode_id, self.decodes[action.decode_id].urgent, action.keys)
            case actions.CancelAt():
                holder = (self.prefills if action.role == "prefill" else self.decodes)[action.instance_id]
                self.send("core", action.instance_id, holder.cancel, action.keys)
            case actions.ReleasePool():
                self.send("core", "pool", self.pool.release, action)
            case actions.Reject():
                for key in action.keys:
                    assert isinstance(action.error, CancelledError)
                    assert self.of(key).ended == "cancelled"
            case actions.ReportLost():
                for key in action.keys:
                    self.send("core", "gateway", self.resubmit, key)

    # the gateway

    def of(self, key):
        return self.requests[key.request_id]

    def full_blocks(self, key):
        return self.of(key).prompt // self.block_size

    def blocks_for(self, tokens):
        return -(-tokens // self.block_size)

    def submit(self, requests):
        metas = tuple(
            events.RequestMeta(
                request.key, request.prompt + request.tokens, request.prompt + request.most, request.group_id, "gw"
            )
            for request in requests
        )
        self.tell_core("gateway", events.Submitted(metas))

    def resubmit(self, key):
        request = self.of(key)
        if request.ended:
            return  # its last tokens overtook the news of its loss
        self.resubmitted += 1
        request.epoch += 1
        request.waiting_since_s = None
        self.submit([request])

    def finish(self, key, source):
        request = self.of(key)
        assert request.tokens == request.answer
        request.ended = request.ended or "finished"
        self.tell_core(source, events.Finished((key,)))

    def stopped(self, key, source):
        """A worker has let go of a cancelled (or lost) request."""
        self.tell_core(source, events.Finished((key,)))

    def give_back(self, source, key, kv_tokens):
        def committed(blocks, new):
            self.tell_core(source, events.Returned(key, kv_tokens, blocks))

        self.pool.write(key, kv_tokens, None, committed)

    def arrive(self):
        self.arrivals -= 1
        size = self.rng.choice([1, 1, 1, 1, 3])
        number = len(self.requests)
        prompt = self.rng.randint(1, self.shape.max_prompt) if self.rng.random() < 0.3 else self.rng.randint(8, 16)
        group = []
        for i in range(size):
            answer = self.rng.randint(1, self.shape.max_answer)
            most = self.rng.choice([answer, self.shape.max_answer])
            group.append(Request(f"r{number + i}", prompt, answer, most, f"g{number}", size))
        self.requests.update({request.request_id: request for request in group})
        self.submit(group)
        for request in group:
            if self.rng.random() < self.shape.cancel_share:
                self.after(self.rng.uniform(0, 1.0), self.cancel, request)

    def cancel(self, request):
        if not request.ended:
            request.ended = "cancelled"
            self.tell_core("gateway", events.CancelRequested((request.key,)))

    def tick(self):
        if self.core.needs_ticks:
            self.event(events.Tick())
        for decode in self.decodes.values():
            decode.kick()
        if self.arrivals or any(not request.ended for request in self.requests.values()):
            self.after(0.05, self.tick)

    # a run

    def run(self, seconds=600.0):
        arrival_s = 0.0
        for _ in range(self.shape.groups):
            arrival_s += self.rng.expovariate(self.shape.rate)
            self.after(arrival_s, self.arrive)
        self.tick()
        while self.queue:
            self.now_s, _, call, arguments = heapq.heappop(self.queue)
            assert self.now_s < seconds, f"still running: {self.core.describe()}"
            call(*arguments)
        self.check_nothing_is_left()

    def check_nothing_is_left(self):
        self.core.check_integrity()
        unended = [request for request in self.requests.values() if not request.ended]
        assert not unended
        assert set(self.core.describe().values()) == {0}
        assert self.pool.blocks.owned_blocks == 0
        for decode in self.decodes.values():
            assert decode.scheduler.holds_nothing()
            assert decode.cache.owned_blocks == 0
        for prefill in self.prefills.values():
            assert prefill.cache.owned_blocks == 0
            assert [buffer.owned_blocks for buffer in prefill.buffers.values()] == [0, 0]
            prefill.chunks.check_integrity()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("prefetch", [True, False])
def test_every_request_ends_with_its_tokens_and_nothing_is_left(seed, prefetch):
    world = World(Shape(seed=seed, prefetch=prefetch))
    world.run()
    assert all(request.tokens == request.answer for request in world.requests.values())
    assert world.resubmitted == 0
