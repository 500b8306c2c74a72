"""Joins within a TPOT objective: what holds one back, what does not, and what is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from alignedserve.config import Config, SchedulerConfig
from alignedserve.scheduler.cost.pass_model import LinearCostModel
from alignedserve.scheduler.instance.pace import LearningPace, Pace
from alignedserve.scheduler.instance.plan import BufferKind
from support.core_cell import key
from support.iterations import Worker, names


def by_count(lengths: Sequence[int]) -> float:
    return float(len(lengths))


def worker(objective_s: float, iteration_s=sum, capacity: int = 1000, **options: object) -> Worker:  # type: ignore[no-untyped-def]
    return Worker(capacity, pace=Pace(objective_s, iteration_s), **options)


def running(cell: Worker) -> list[str]:
    return names(cell.scheduler._batch.running.values())


def test_members_join_as_long_as_the_objective_is_met_and_when_others_have_ended() -> None:
    cell = worker(3.0, by_count)
    for name in range(6):
        cell.offer(name, 10, 100)
    assert names(cell.step().joins) == ["0", "1", "2"]
    assert cell.step().joins == ()
    assert cell.scheduler.status().max_running == 3
    assert names(cell.step(finished=["0", "1"]).run) == ["0", "1", "2"]
    assert names(cell.step().joins) == ["3", "4"]


def test_a_join_leaves_room_for_growth_up_to_what_a_request_may_grow_to() -> None:
    assert len(worker_of(150.0, most=12).step().joins) == 12  # 12 tokens each at most
    assert len(worker_of(276.0, most=1000).step().joins) == 2  # 10 and half of 256 more
    assert len(worker_of(275.0, most=1000).step().joins) == 1


def worker_of(objective_s: float, most: int) -> Worker:
    cell = worker(objective_s)
    for name in range(20):
        cell.offer(name, 10, most)
    return cell


def test_a_request_that_misses_the_objective_alone_runs_alone() -> None:
    cell = worker(50.0)
    cell.offer("long", 200, 210)
    cell.offer("short", 10, 12)
    assert names(cell.step().joins) == ["long"]
    assert cell.step().joins == ()
    cell.step(finished=["long"])
    assert names(cell.step().joins) == ["short"]


def test_growing_past_the_objective_evicts_nobody() -> None:
    cell = worker(280.0)
    cell.offer("a", 10, 400)
    cell.offer("b", 10, 400)
    cell.step()
    for _ in range(200):
        assert cell.step().evictions == ()
    assert running(cell) == ["a", "b"]
    assert sum(member.kv_tokens for member in cell.scheduler._batch.running.values()) > 280


def test_members_that_have_run_for_long_are_expected_to_grow_less() -> None:
    pace = Pace(1.0, sum)
    assert [pace.growth(iterations) for iterations in (0, 56, 256, 1000)] == [128, 100, 0, 0]
    for _ in range(200):
        pace.ended(40)
    assert pace.growth(0) in (19, 20)


def test_what_does_not_fit_is_passed_by_a_smaller_one_until_it_is_overdue() -> None:
    cell = worker(300.0, starvation_after_s=5.0)
    cell.offer("first", 100, 110)
    cell.offer("large", 250, 260)
    cell.offer("small", 50, 60)
    assert names(cell.step().joins) == ["first", "small"]
    while not (plan := cell.step()).evictions:
        assert cell.now_s < 10
    assert set(names(plan.evictions)) == {"first", "small"}  # it takes their place
    assert names(cell.step().joins) == ["large"]
    assert running(cell) == ["large"]


def test_an_overdue_request_replaces_no_more_than_the_objective_asks_for() -> None:
    cell = worker(4.0, by_count)
    for name in range(4):
        cell.offer(name, 10 + name, 100)
    for _ in range(3):
        cell.step()
    cell.offer("late", 50, 100, due_s=0.0)
    assert names(cell.step().evictions) == ["3"]  # the longest
    assert names(cell.step().joins) == ["late"]
    cell.offer("later", 50, 100, due_s=1.0)
    cell.step()
    assert "late" in running(cell)  # it was due before


def test_iterations_at_which_a_candidate_was_held_back_are_counted() -> None:
    cell = worker(1.0, by_count)
    cell.offer("a", 10, 100)
    cell.step()
    cell.step()
    assert cell.scheduler.status().held_iterations == 0
    cell.offer("b", 10, 100, BufferKind.REQUESTS)
    cell.step()
    cell.step()
    assert cell.scheduler.status().held_iterations == 2
    cell.scheduler.withdraw(key("b"))
    cell.step()
    assert cell.scheduler.status().held_iterations == 2


def test_the_most_follows_what_the_objective_lets_join() -> None:
    cell = worker(1000.0)
    for name in range(4):
        cell.offer(name, 400, 410)
    assert cell.scheduler.status().max_running == 256
    cell.step()
    assert cell.scheduler.status().max_running == 2
    cell.scheduler.recall(list(cell.scheduler._waiting))
    cell.step(finished=["0", "1"])
    for name in range(10, 15):
        cell.offer(name, 50, 60)
    cell.step()
    assert cell.scheduler.status().max_running == 256  # the instance was empty: what it had room for is forgotten


def test_without_a_pace_observations_change_nothing() -> None:
    cell = Worker(1000)
    cell.offer("a", 10, 100)
    cell.scheduler.observe(1, 10, 99.0)
    assert names(cell.step().joins) == ["a"]
    assert math.isinf(LearningPace.configured(Config()).objective_s)


def learning(objective_s: float) -> LearningPace:
    return LearningPace.configured(Config(scheduler=SchedulerConfig(tpot_objective_s=objective_s)))


def test_it_learns_how_many_requests_meet_the_objective() -> None:
    """An iteration takes 5 ms, and 1 ms for each request: 45 meet 50 ms."""
    pace, requests = learning(0.05), 1
    assert not pace.meets([100] * 60)  # far beyond any measured
    for _ in range(3000):
        requests += pace.meets([100] * (requests + 1)) or -1
        pace.observe(requests, 100 * requests, 0.005 + 0.001 * requests)
    assert 40 <= requests <= 46


def test_single_passes_are_observed_together() -> None:
    class Counting(LinearCostModel):
        passes: list[int]

        def observe_iterations(self, passes) -> None:  # type: ignore[no-untyped-def]
            self.passes.append(passes.passes)

    cost = Counting()
    cost.passes = []
    pace = LearningPace(1.0, cost)
    for _ in range(25):
        pace.observe(4, 100, 0.0101)
    assert cost.passes == [10, 10]


def test_a_measured_cost_model_is_corrected() -> None:
    config = Config(scheduler=SchedulerConfig(cost_model="a100-opt-13b", tpot_objective_s=0.05))
    pace = LearningPace.configured(config)
    assert pace is not None
    assert pace.meets([500] * 8)
    for _ in range(200):
        pace.observe(8, 4000, 0.2)  # this machine is slower
    assert not pace.meets([500] * 8)
