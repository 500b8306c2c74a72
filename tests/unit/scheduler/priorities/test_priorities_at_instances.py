"""Priorities at the instances: the order of joins, evictions and chunks, and what runs beside others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.beside import Beside
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.plan import BufferKind
from alignedserve.scheduler.instance.prefill_chunks import ChunkScheduler
from alignedserve.scheduler.priorities import BACKGROUND
from support.iterations import Worker, names
from support.machines import machine_settings

REQUESTS = BufferKind.REQUESTS


def iteration_s(lengths: Sequence[int]) -> float:
    return 1.0 + sum(lengths) / 1000


def test_of_the_candidates_the_least_rank_joins_first() -> None:
    cell = Worker(1000, max_running=2)
    for name, rank in (("batch", BACKGROUND), ("late", 2), ("plain", 0), ("urgent", -1)):
        cell.offer(name, 10, rank=rank)
    assert names(cell.step().joins) == ["urgent", "plain"]
    assert names(cell.step(finished=["urgent", "plain"]).joins) == []
    assert names(cell.step().joins) == ["late", "batch"]


def test_a_higher_rank_joins_after_so_many_of_lower_ones() -> None:
    cell = Worker(1000, max_running=1)
    cell.offer("late", 10, rank=1)
    joined = []
    for number in range(80):
        cell.offer(number, 10)
        plan = cell.plan()
        joined += names(plan.joins)
        cell.run(cell.plan(), finished=joined[-1:])
    assert 63 <= joined.index("late") <= 66


def test_when_blocks_are_short_the_highest_rank_leaves_first() -> None:
    cell = Worker(12)
    cell.offer("long", 12, 40, rank=-1)
    cell.offer("batch", 4, 40, rank=BACKGROUND)
    cell.offer("plain", 8, 40)
    evicted: list[str] = []
    for _ in range(20):
        evicted += names(cell.step().evictions)
        if len(evicted) >= 2:
            break
    assert evicted[0] == "batch"
    assert "long" not in evicted


def test_members_without_hurry_leave_for_a_candidate_that_lacks_room_and_only_for_it() -> None:
    cell = Worker(16, instant=False, lease=0)
    for name in ("b1", "b2", "b3"):
        cell.offer(name, 15, 16, rank=BACKGROUND)
    for join in cell.plan().joins:
        cell.scheduler.copied_in(join.key)
    cell.run(cell.plan())
    cell.offer("b4", 7, 8, batch_id=1, rank=BACKGROUND)
    cell.offer("plain", 20, 24, REQUESTS)
    plan = cell.plan()
    assert names(plan.evictions) == ["b1"]
    assert plan.joins == ()  # the room is for "plain" once it is free: "b4" does not take it
    again = cell.plan()
    assert (again.joins, again.evictions) == ((), ())
    for evict in plan.evictions:
        cell.scheduler.copied_out(evict.key)
    assert names(cell.plan().joins)[0] == "plain"


def test_a_candidate_makes_no_room_at_the_cost_of_members_with_hurry() -> None:
    cell = Worker(12)
    cell.offer("plain", 30, 40, rank=1)
    cell.step()
    cell.step()
    cell.offer("urgent", 30, 40, REQUESTS, rank=-1)
    plan = cell.step()
    assert (plan.joins, plan.evictions) == ((), ())


Run = dict[str, int]  # the members of an iteration, and their tokens


def iterate(cell: Worker, finished: Sequence[str] = ()) -> Run:
    plan = cell.plan()
    run = {item.key.request_id: item.kv_tokens for item in plan.run}
    cell.run(plan, finished)
    return run


def beside(slowdown: float, plain: int, batch: int, tokens: int = 100) -> Worker:
    """Members without hurry run, and then others join."""
    cell = Worker(300, 1024, pace=Pace(math.inf, iteration_s), background_slowdown=slowdown)
    for name in range(batch):
        cell.offer(f"b{name}", tokens, 100_000, rank=BACKGROUND)
    assert len(iterate(cell)) == 0
    for name in range(plain):
        cell.offer(f"p{name}", tokens, 100_000, REQUESTS)
    assert len(iterate(cell)) == batch
    return cell


@machine_settings(15)
@given(st.floats(0.01, 0.5), st.integers(1, 8), st.integers(1, 12), st.integers(10, 3000))
def test_members_without_hurry_lengthen_iterations_by_the_share_and_take_turns(
    slowdown: float, plain: int, batch: int, tokens: int
) -> None:
    cell = beside(slowdown, plain, batch, tokens)
    runs = [iterate(cell) for _ in range(200)]
    assert all(sum(name[0] == "p" for name in run) == plain for run in runs)
    alone = [iteration_s([length for name, length in run.items() if name[0] == "p"]) for run in runs]
    took = [iteration_s([*run.values()]) for run in runs]
    one = max(max(run.values()) for run in runs) / 1000  # a single member may take more than was saved for it
    assert sum(took) <= (1 + slowdown) * sum(alone) + max(alone) + one
    assert all(now <= (2 + slowdown) * before + one for now, before in zip(took, alone, strict=True))
    counts = [sum(f"b{name}" in run for run in runs) for name in range(batch)]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) > 0


def test_without_others_all_members_without_hurry_run_and_a_pause_costs_them_nothing() -> None:
    cell = beside(0.02, 1, 12)
    runs = [iterate(cell) for _ in range(30)]
    assert max(map(len, runs)) < 13
    held = cell.allocator.owned_blocks
    iterate(cell, finished=["p0"])
    assert len(iterate(cell)) == 12
    assert cell.allocator.owned_blocks == held - 1


def test_none_without_hurry_joins_beside_others_while_one_pauses() -> None:
    cell = beside(0.1, 4, 0)
    for name in range(40):
        cell.offer(f"b{name}", 100, 100_000, rank=BACKGROUND)
    members = []
    for _ in range(40):
        iterate(cell)
        members.append(cell.scheduler.status().running - 4)
    assert members[0] == 1
    assert 2 <= members[-1] <= 6, "a tenth of 1.4 s is 1.4 members of 100 tokens"


def test_members_without_hurry_keep_the_tpot_objective_of_others() -> None:
    pace = Pace(1.35, iteration_s)
    cell = Worker(300, 1024, pace=pace, background_slowdown=0.3)
    for name in range(2):
        cell.offer(f"b{name}", 100, 110, rank=BACKGROUND)
    iterate(cell)
    for name in range(3):
        cell.offer(f"p{name}", 100, 110, REQUESTS)
    iterate(cell)
    runs = [set(iterate(cell)) for _ in range(8)]  # the share alone would let three more run
    assert runs[:3] == [{"p0", "p1", "p2"}] * 3
    assert max(map(len, runs)) == 4  # now and then a single one


def test_a_single_member_that_takes_far_longer_runs_now_and_then() -> None:
    chosen = Beside(0.1, Pace(math.inf, lambda lengths: 1.0 + 100.0 * (len(lengths) - 1)))
    cell = Worker(1000)
    cell.offer("p", 10, 500)
    cell.offer("b", 10, 500, rank=BACKGROUND)
    cell.step()
    members = list(cell.scheduler._batch.running.values())
    ran = [len(chosen.choose(members)) == 2 for _ in range(50)]
    assert 3 <= sum(ran) <= 6


A, B, C = (RequestKey(name) for name in "abc")


def chunks(capacity: int = 1000) -> ChunkScheduler:
    return ChunkScheduler(BlockAllocator(capacity, "prefill-0"), 4)


def pass_of(scheduler: ChunkScheduler, budget: int = 8) -> list[str]:
    plan = scheduler.plan(budget, 8)
    for chunk in plan:
        if scheduler.done(chunk):
            scheduler.release(chunk.key)
    scheduler.check_integrity()
    return [chunk.key.request_id for chunk in plan]


def test_a_prompt_of_a_lower_rank_is_computed_before_the_rest_of_another() -> None:
    scheduler = chunks()
    scheduler.add(A, 30, rank=BACKGROUND)
    assert pass_of(scheduler) == ["a"]
    scheduler.add(B, 10)
    scheduler.add(C, 6, rank=-1)
    assert [pass_of(scheduler) for _ in range(3)] == [["c", "b"], ["b"], ["a"]]


def test_a_started_prompt_goes_on_where_one_of_a_lower_rank_finds_no_room() -> None:
    scheduler = chunks(capacity=8)
    scheduler.add(A, 24, rank=1)
    assert pass_of(scheduler) == ["a"]
    scheduler.add(B, 20)
    assert [pass_of(scheduler) for _ in range(3)] == [["a"], ["a"], ["b"]]


def test_a_prompt_of_a_higher_rank_has_a_pass_after_so_many_without() -> None:
    scheduler = chunks()
    scheduler.add(A, 16, rank=BACKGROUND)
    seen = []
    for number in range(40):
        scheduler.add(RequestKey(str(number)), 8)
        seen.append(pass_of(scheduler)[0])
    assert [number for number, name in enumerate(seen) if name == "a"] == [16, 33]


def test_prompts_without_hurry_have_short_passes_of_their_own_unless_others_find_no_room() -> None:
    scheduler = chunks(capacity=20)
    scheduler.add(A, 60, rank=BACKGROUND)
    assert [(chunk.key, chunk.count) for chunk in scheduler.plan(64, 8)] == [(A, 8)]
    scheduler.add(B, 10)
    assert [(chunk.key, chunk.count) for chunk in scheduler.plan(64, 8)] == [(B, 10)]  # no room is left for more
    scheduler.add(C, 20)
    assert [(chunk.key, chunk.count) for chunk in scheduler.plan(64, 8)] == [(A, 8)]
