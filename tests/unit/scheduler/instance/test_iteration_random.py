"""One iteration scheduler under random offers, cancels, recalls and failing copies: never stuck, all counted."""

import random

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind, CancelOutcome, Candidate
from support.chains import chain_of


class World:
    """Random offers, cancels, recalls, copies and evictions around one IterationScheduler; counts every token."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 4, 16])
        self.capacity = rng.randint(3, 40)
        self.allocator = BlockAllocator(self.capacity, "decode-0")
        config = DecodeConfig(
            max_running=rng.choice([1, 3, 256]),
            watermark_blocks=rng.choice([0, 0, 1, 5]),
            join_iterations=rng.choice([1, 4, 8]),
        )
        self.scheduler = IterationScheduler(
            config, self.allocator, self.block_size, starvation_after_s=rng.choice([5.0, 50.0, float("inf")])
        )
        self.lease = self.lease_most = rng.choice([0, 4, 1000])
        self.copies_in, self.copies_out = [], []
        self.target, self.length, self.ended, self.pool, self.alive = {}, {}, {}, {}, set()
        self.count = self.batch_id = 0
        self.group = {}
        self.now_s = 0.0

    def arrive(self):
        tokens = self.capacity * self.block_size
        prompt = self.rng.randint(1, max(1, tokens // self.rng.choice([1, 2, 4]) - 1))
        group = f"g{self.count}" if self.rng.random() < 0.3 else ""
        for _ in range(self.rng.randint(2, 4) if group else 1):
            name = RequestKey(str(self.count))
            self.count += 1
            self.target[name] = min(tokens, prompt + self.rng.randint(1, 20))
            self.length[name] = prompt
            self.alive.add(name)
            self.pool[name] = (group, prompt)

    def prefetch(self):
        if self.rng.random() < 0.2:
            self.batch_id += 1
        buffer = self.rng.choice(list(BufferKind))
        for name in self.rng.sample(list(self.pool), min(len(self.pool), self.rng.randint(1, 6))):
            group, shared = self.group[name] = self.pool.pop(name)
            chain = chain_of([group] * shared, self.block_size) if group else None
            self.scheduler.offer(
                Candidate(name, self.length[name], self.target[name], chain, buffer, self.batch_id), self.now_s
            )

    def interfere(self):
        if not self.alive:
            return
        name = self.rng.choice(sorted(self.alive))
        match self.rng.randint(0, 3):
            case 0:
                outcome = self.scheduler.cancel(name)
                assert (outcome is CancelOutcome.NOT_HERE) == (name in self.pool)
                self.pool.pop(name, None)
                self.alive.discard(name)
            case 1:
                self.scheduler.recall([name])
            case 2:
                self.scheduler.mark_urgent({name: self.rng.uniform(0.0, self.now_s)})
            case 3:
                if self.scheduler.withdraw(name):
                    self.pool[name] = self.group[name]

    def step(self, busy):
        self.now_s += 1
        if busy and self.rng.random() < 0.3:
            self.arrive()
        if self.pool and self.rng.random() < 0.5:
            self.prefetch()
        if busy and self.rng.random() < 0.1:
            self.interfere()
        for copies in self.copies_in, self.copies_out:
            while copies and self.rng.random() < 0.5:
                self.complete(copies)
        plan = self.scheduler.plan(self.now_s)
        self.carry_out(plan)
        if self.rng.random() < 0.3:
            self.scheduler.check_integrity()
        if not self.scheduler.holds_nothing():
            assert plan.run or self.copies_in or self.copies_out or plan.give_back.keys, "stuck"

    def complete(self, copies):
        event = copies.pop(self.rng.randrange(len(copies)))
        if self.rng.random() < 0.05:
            runs_on = self.scheduler.copy_failed(event.key)
            assert runs_on == (copies is self.copies_out and event.key in self.alive)
            if copies is self.copies_in and event.key in self.alive:
                self.pool[event.key] = self.group[event.key]
        elif copies is self.copies_in:
            assert self.scheduler.copied_in(event.key) == (event.key in self.alive)
        else:
            assert self.scheduler.copied_out(event.key) == (event.key in self.alive)
            if event.to_pool and event.key in self.alive:
                self.pool[event.key] = self.group[event.key]
        self.scheduler.set_requests_buffer_lease(self.lease_most)

    def carry_out(self, plan):
        self.copies_in += plan.joins
        self.copies_out += plan.evictions
        for join in plan.joins:
            assert len(join.block_ids) == -(-self.length[join.key] // self.block_size)
        for evict in plan.evictions:
            assert evict.kv_tokens == self.length[evict.key]
        for name in plan.give_back.keys:
            self.pool[name] = self.group[name]
        busy = {copy.key for copy in self.copies_in + self.copies_out}
        tokens = []
        for item in plan.run:
            assert item.key not in busy
            assert item.kv_tokens == self.length[item.key]
            assert len(item.block_ids) * self.block_size > item.kv_tokens
            self.length[item.key] += 1
            finished = self.length[item.key] >= self.target[item.key]
            tokens.append((item.key, finished))
            if finished:
                self.alive.discard(item.key)
                self.ended[item.key] = self.length[item.key]
        self.scheduler.advance(tokens)


@pytest.mark.parametrize("seed", range(30))
def test_random_use_never_gets_stuck_and_every_request_ends_with_all_its_tokens(seed):
    world = World(seed)
    for _ in range(400):
        world.step(busy=True)
    for _ in range(20000):
        if not world.alive and world.scheduler.holds_nothing():
            break
        world.step(busy=False)
    assert not world.alive
    assert world.scheduler.holds_nothing()
    assert all(world.target[name] == tokens for name, tokens in world.ended.items())
    assert world.allocator.owned_blocks == 0
    world.allocator.check_integrity()
