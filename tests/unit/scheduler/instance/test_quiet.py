"""Iterations that are counted instead of planned: the state equals, block by block, what plans would have left."""

from __future__ import annotations

import math
import random

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import BufferKind, Candidate, IterationPlan

BLOCK = 4


def scheduler(blocks: int, config: DecodeConfig, objective_s: float | None = None) -> IterationScheduler:
    """With an objective a token takes a second in an iteration."""
    pace = None if objective_s is None else Pace(objective_s, sum)
    cache = BlockAllocator(blocks, "cache")
    made = IterationScheduler(config, cache, BLOCK, starvation_after_s=50.0, join_window=0.25, pace=pace)
    made.set_requests_buffer_lease(6)
    return made


def candidate(number: int, tokens: int, most: int, kind: BufferKind, batch_id: int, due_s: float) -> Candidate:
    return Candidate(RequestKey(f"r{number}"), tokens, most, None, kind, batch_id, due_s)


class Pair:
    """Two schedulers with the same input, one of which leaps."""

    def __init__(self, blocks: int, config: DecodeConfig, objective_s: float | None = None) -> None:
        self.both = [scheduler(blocks, config, objective_s) for _ in range(2)]
        self.now_s = 0.0
        self.leapt = 0

    def offer(self, *offered: Candidate) -> None:
        for one in self.both:
            for waiting in offered:
                one.offer(waiting, self.now_s)

    def plan(self) -> IterationPlan:
        plans = [one.plan(self.now_s) for one in self.both]
        assert plans[0] == plans[1]
        for one in self.both:
            for join in plans[0].joins:
                one.copied_in(join.key)
            for evict in plans[0].evictions:
                one.copied_out(evict.key)
                one.withdraw(evict.key)
        self.check()
        return plans[0]

    def pass_some(self, plan: IterationPlan, most: int) -> None:
        """Pass the quiet iterations: one scheduler counts them, the other plans them without any decision."""
        keys = [item.key for item in plan.run]
        quiet = int(min(self.both[0].quiet_iterations(most), self.both[0].deadline_s() - self.now_s - 1))
        if keys and quiet > 0 and not plan.joins and not plan.evictions:
            self.leapt += quiet
            self.both[0].pass_quietly(quiet)
            for _ in range(quiet):
                self.both[1].advance([(key, False) for key in keys])
                self.now_s += 1.0
                step = self.both[1].plan(self.now_s)
                assert [item.key for item in step.run] == keys
                assert (step.joins, step.evictions, step.give_back.keys, step.stalled) == ((), (), (), 0)
            self.check()

    def advance(self, plan: IterationPlan, finished: set[RequestKey]) -> None:
        self.now_s += 1.0
        for one in self.both:
            one.advance([(item.key, item.key in finished) for item in plan.run])

    def check(self) -> None:
        leaping, stepping = self.both
        leaping.check_integrity()
        assert leaping.status() == stepping.status()
        members = [
            [(m.key, m.kv_tokens, m.block_ids, m.iterations) for m in one._batch.running.values()] for one in self.both
        ]
        assert members[0] == members[1]


@pytest.mark.parametrize("seed", range(60))
def test_counting_iterations_leaves_what_planning_them_does(seed: int) -> None:
    rng = random.Random(seed)
    config = DecodeConfig(
        max_running=rng.choice([3, 8, 32]),
        watermark_blocks=rng.choice([0, 0, 3]),
        join_iterations=rng.choice([1, 4, 8]),
    )
    pair = Pair(rng.choice([24, 60, 200]), config, rng.choice([None, None, 150.0, 400.0]))
    number, batch = 0, 1
    for _ in range(40):
        if rng.random() < 0.5:
            batch += rng.random() < 0.3
            kind = rng.choice(list(BufferKind))
            tokens = [rng.randint(1, 40) for _ in range(rng.randint(1, 4))]
            most = rng.choice([90, 120])
            due_s = rng.choice((1.0, 2.0)) if rng.random() < 0.2 else math.inf
            pair.offer(*(candidate(number + i, t, most, kind, batch, due_s) for i, t in enumerate(tokens)))
            number += len(tokens)
        plan = pair.plan()
        pair.pass_some(plan, rng.choice([1, 5, 30]))
        longest = max((item.kv_tokens for item in plan.run), default=0)
        ending = {item.key for item in plan.run if rng.random() < 0.1 or longest > 55}
        pair.advance(plan, ending)


def test_a_batch_alone_passes_quietly_until_its_cache_runs_short() -> None:
    pair = Pair(40, DecodeConfig(max_running=8, join_iterations=4))
    pair.offer(*(candidate(i, 8, 150, BufferKind.BATCH, 1, False) for i in range(4)))
    pair.plan()
    plan = pair.plan()
    pair.pass_some(plan, 1000)
    # 4 requests of 9 blocks and the watermark of 4 make 40: the plan that needs a tenth block decides.
    assert pair.leapt == 27
    pair.advance(plan, set())
    assert pair.plan().evictions


def test_an_instance_that_drains_or_sweeps_or_has_just_decided_with_some_waiting_is_not_quiet() -> None:
    pair = Pair(24, DecodeConfig(max_running=2, join_iterations=4))
    pair.offer(*(candidate(i, 8, 60, BufferKind.BATCH, 1, False) for i in range(4)))
    assert len(pair.plan().joins) == 2
    assert pair.both[0].quiet_iterations(10) == 0
    pair.plan()
    assert pair.both[0].quiet_iterations(10) > 0
    pair.both[0].drain()
    assert pair.both[0].quiet_iterations(10) == 0
