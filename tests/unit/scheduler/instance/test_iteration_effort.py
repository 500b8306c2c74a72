"""What a decision looks at: nothing twice, even if all lengths are equal and many requests leave at once (ADR 24)."""

from __future__ import annotations

import random

import pytest

from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.cache_room import Shortfall
from alignedserve.scheduler.instance.plan import BufferKind, Candidate
from alignedserve.scheduler.instance.running_batch import Phase, RunningBatch, RunningRequest
from support.chains import chain_of
from support.core_cell import key
from support.iterations import Worker


def of_one_length(count: int, capacity: int, **config: int) -> Worker:
    """All of them run, and grow into their next block together."""
    worker = Worker(capacity, max_running=count, **config)
    for number in range(count):
        worker.offer(number, 20, most=200)
    worker.step()
    return worker


def test_a_plan_that_evicts_many_looks_at_all_that_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = of_one_length(32, 32 * 7)
    looks: list[int] = []
    present = RunningBatch.present
    monkeypatch.setattr(RunningBatch, "present", lambda batch: looks.append(1) or present(batch))
    most = 0
    for _ in range(8):
        looks.clear()
        plan = worker.scheduler.plan(worker.now_s)
        most = max(most, len(plan.evictions))
        assert len(looks) <= 1
        worker.run(plan)
        for evict in plan.evictions:
            worker.scheduler.copied_out(evict.key)
            worker.scheduler.withdraw(evict.key)
    assert most >= 3


def test_an_overdue_candidate_that_no_eviction_makes_room_for_is_not_weighed_against_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = of_one_length(8, 200, join_iterations=1)
    for name in range(4):  # the remaining requests that may be evicted are not enough
        worker.scheduler.cancel(key(name))
        worker.offer(f"spared-{name}", 20, most=200, due_s=-1.0)
    worker.step()
    worker.step()
    worker.offer("large", 780, most=790, due_s=1.0)
    weighed: list[int] = []
    rank = RunningRequest.eviction_rank
    monkeypatch.setattr(RunningRequest, "eviction_rank", lambda self, of: weighed.append(1) or rank(self, of))
    assert worker.plan().evictions == ()
    assert not weighed


@pytest.mark.parametrize("seed", range(40))
def test_what_is_missing_is_kept_up_as_members_leave(seed: int) -> None:
    rng = random.Random(seed)
    block_size, watermark = rng.choice([1, 2, 4, 16]), rng.choice([0, 0, 5, 9])
    batch = RunningBatch(BlockAllocator(rng.randint(60, 90), "cache"), block_size)
    for number in range(12):
        tokens = rng.randint(1, 4 * block_size)
        most = tokens + rng.randint(1, 3 * block_size)
        grouped = number and rng.random() < 0.4
        chain = chain_of([f"g{number // 3}"] * tokens, block_size) if grouped else None
        candidate = Candidate(RequestKey(str(number)), tokens, most, chain, BufferKind.BATCH, 1)
        seats = batch.seats(candidate)
        if batch.allocator.free_blocks > 5 and seats:
            batch.join(candidate, 1, seats[0])
            if rng.random() < 0.5:
                batch.entering[candidate.key].fill()
    for member in list(batch.entering.values()):
        if rng.random() < 0.8:
            batch.move(member, Phase.RUNNING)
            member.kv_tokens = min(member.max_total_tokens, len(member.block_ids) * block_size - rng.randint(0, 1))
    batch.allocator.allocate(batch.allocator.free_blocks - rng.randint(0, 3), RequestKey("all others"))
    shortfall = Shortfall(batch, watermark)
    assert shortfall.blocks() > 0
    for member in rng.sample(list(batch.running.values()), len(batch.running)):
        anew = Shortfall(batch, watermark).blocks()
        assert shortfall.blocks() == anew or max(shortfall.blocks(), anew) <= 0  # enough: none is examined
        shortfall.leave(member)
        batch.move(member, Phase.LEAVING)


def test_a_single_block_is_the_one_that_allocate_would_have_given() -> None:
    rng = random.Random(1)
    one, other = BlockAllocator(20, "one"), BlockAllocator(20, "other")
    for _ in range(500):
        holder = key(rng.randrange(6))
        if rng.random() < 0.2:
            assert one.release_all(holder) == other.release_all(holder)
            continue
        block = one.allocate_one(holder)
        assert ([block] if block is not None else None) == other.allocate(1, holder)
        assert one.blocks_of(holder) == other.blocks_of(holder)
        assert one.free_blocks == other.free_blocks
        one.check_integrity()
