"""Ranks of priorities, whose turn it is, and any policy with priorities."""

from __future__ import annotations

import math
import random
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.config import SchedulerConfig
from alignedserve.errors import ConfigError
from alignedserve.request import BATCH_PRIORITY, RequestKey
from alignedserve.scheduler import by_priority, cost
from alignedserve.scheduler.by_priority import ByPriority
from alignedserve.scheduler.core.prefill_queue import PrefillQueue
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry
from alignedserve.scheduler.policies.fcfs import FcfsPolicy
from alignedserve.scheduler.priorities import BACKGROUND, EXACT, Turns, objective_s, rank_of
from alignedserve.scheduler.systems import make_policy
from support.machines import machine_settings

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
LIMITS = BatchLimits(max_blocks=1000, min_requests=4, max_requests=16)
POLICIES = ("aligned", "aligned-cost", "fcfs")


@given(INT64, INT64)
def test_a_lower_priority_never_has_a_higher_rank_and_there_are_few_ranks(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert rank_of(low) <= rank_of(high)
    assert abs(rank_of(one)) <= BACKGROUND
    assert rank_of(-one) == -rank_of(one)


def test_small_priorities_have_ranks_of_their_own_and_all_without_hurry_have_one() -> None:
    assert [rank_of(priority) for priority in range(-EXACT, EXACT + 1)] == list(range(-EXACT, EXACT + 1))
    assert rank_of(BATCH_PRIORITY - 1) == BACKGROUND - 1 < rank_of(BATCH_PRIORITY) == rank_of(1 << 62) == BACKGROUND
    assert len({rank_of(priority) for priority in range(BATCH_PRIORITY)}) == BACKGROUND


def test_only_requests_of_rank_0_and_less_are_overdue_by_default() -> None:
    assert [objective_s(0.0, rank, 5.0) for rank in (-1, 0, 1, BACKGROUND)] == [5.0, 5.0, math.inf, math.inf]
    assert objective_s(2.0, BACKGROUND, 5.0) == 2.0


@machine_settings(60)
@given(st.integers(1, 6), st.lists(st.sets(st.integers(-2, 3), min_size=1), min_size=1, max_size=200))
def test_a_rank_that_waits_is_passed_over_a_bounded_number_of_times(most: int, history: list[set[int]]) -> None:
    """Beside it each of the other ranks may be due, and have its turn before."""
    turns, passed = Turns(most), dict.fromkeys(range(-2, 4), 0)
    for waiting in history:
        rank = turns.next(waiting)
        assert rank in waiting
        turns.served(rank, waiting)
        turns.had(rank)
        for other in waiting:
            passed[other] = 0 if other == rank else passed[other] + (rank < other)
            assert passed[other] <= most + len(passed)


def entry(number: int, tokens: int, rank: int = 0, since_s: float | None = None) -> Entry:
    return Entry(
        RequestKey(f"{rank}/{number}"), tokens, -(-tokens // 16), number if since_s is None else since_s, rank=rank
    )


def make(name: str = "fcfs", **settings: object) -> ByPriority:
    config = SchedulerConfig(policy=name, max_prefix_tokens=4096, **settings)  # type: ignore[arg-type]
    return ByPriority(config, lambda: make_policy(config))


def take(policy: ByPriority, limits: BatchLimits = LIMITS, now_s: float = 0.0) -> list[Entry]:
    batch = policy.form(limits, None, now_s)
    for one in batch:
        policy.remove(one.key)
    policy.check_integrity()
    return batch


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("rank", [0, 5, BACKGROUND])
def test_where_all_have_the_same_priority_the_policy_alone_decides(name: str, rank: int) -> None:
    rng = random.Random(name)
    mine, plain = make(name), make_policy(SchedulerConfig(policy=name, max_prefix_tokens=4096))
    waiting: list[RequestKey] = []
    for number in range(400):
        one = entry(number, rng.randint(1, 4000), rank)
        mine.insert(one)
        plain.insert(one)
        waiting.append(one.key)
        low = rng.randint(1, 4000)
        seed = rng.choice(waiting) if rng.random() < 0.2 else None
        assert mine.matching(low, 2 * low, LIMITS) == plain.matching(low, 2 * low, LIMITS)
        assert mine.matches(low, 100, 2000) == plain.matches(low, 100, 2000)
        if rng.random() < 0.3:
            batch = mine.form(LIMITS, seed, number)
            assert batch == plain.form(LIMITS, seed, number)
            for taken in batch:
                mine.remove(taken.key)
                plain.remove(taken.key)
                waiting.remove(taken.key)
        assert (mine.totals(), mine.overtakes()) == (plain.totals(), plain.overtakes())
    mine.check_integrity()


@pytest.mark.parametrize("name", ["aligned", "aligned-cost"])
def test_a_new_priority_does_not_read_the_cost_model_again(name: str, tmp_path: Path) -> None:
    """A folder of tables takes most of a second, and a file may be gone by then."""
    file = tmp_path / "machine.json"
    file.write_bytes((files(cost) / "data" / "a100-opt-13b.json").read_bytes())
    policy = make(name, cost_model=str(file))
    file.unlink()
    for number, rank in enumerate((0, 3, BACKGROUND)):
        policy.insert(entry(number, 100, rank))
    assert [policy.totals_of(rank) for rank in (0, 3, BACKGROUND)] == [(1, 7)] * 3


@pytest.mark.parametrize("name", POLICIES)
@machine_settings(10)
@given(data=st.data())
def test_every_request_is_in_a_batch_once_and_the_first_of_a_batch_is_of_the_least_rank(
    name: str, data: st.DataObject
) -> None:
    policy, waiting = make(name), {}
    ranks = data.draw(st.lists(st.sampled_from((-3, 0, 1, BACKGROUND)), min_size=1, max_size=60))
    for number, rank in enumerate(ranks):
        one = entry(number, data.draw(st.integers(1, 4000)), rank)
        policy.insert(one)
        waiting[one.key] = one
    while waiting:
        least = min(one.rank for one in waiting.values())
        assert policy.first_rank() == least
        batch = take(policy, now_s=1000.0)
        assert batch
        assert batch[0].rank == least
        assert len(batch) == 1 or sum(one.blocks for one in batch) <= LIMITS.max_blocks
        assert len(batch) <= LIMITS.max_requests
        assert [one.rank for one in batch] == sorted(one.rank for one in batch)
        for one in batch:
            assert waiting.pop(one.key) is one
    assert policy.totals() == (0, 0)


def test_the_next_ranks_fill_a_batch_with_neighbours_in_length() -> None:
    policy = make("aligned", waiting_rule="overdue")
    for number, (tokens, rank) in enumerate([(100, 0), (104, 0), (2000, 1), (110, 1), (120, 2), (90, 2)]):
        policy.insert(entry(number, tokens, rank))
    assert [(one.rank, one.tokens) for one in take(policy)] == [(0, 100), (0, 104), (1, 110), (2, 90)]


@pytest.mark.parametrize("name", POLICIES)
def test_a_rank_that_waits_leads_a_batch_after_so_many_of_lower_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_priority, "MOST_OVERTAKES", 40)
    policy, rng = make(name), random.Random(3)
    for number in range(20):
        policy.insert(entry(number, rng.randint(2000, 4000), BACKGROUND))
    taken = []
    for turn in range(60):
        for number in range(16):  # more than a batch: lower ranks never leave anything
            policy.insert(entry(100 * turn + number, rng.randint(1, 200), since_s=100.0 + turn))
        taken.append([one.rank for one in take(policy, now_s=100.0 + turn)])
    led = [number for number, ranks in enumerate(taken) if ranks[0] == BACKGROUND]
    assert sum(taken[number].count(BACKGROUND) for number in led) == 20
    assert led[0] * 16 <= 40 + 16
    assert all(later - earlier <= 5 for earlier, later in pairwise(led))


def test_a_policy_that_cannot_be_made_again_serves_all_ranks() -> None:
    made: list[BatchPolicy] = []

    def new_policy() -> BatchPolicy:
        if made:
            raise ConfigError("only one")
        made.append(FcfsPolicy(SchedulerConfig()))
        return made[0]

    policy = ByPriority(SchedulerConfig(), new_policy)
    for number, rank in enumerate((5, 0, BACKGROUND)):
        policy.insert(entry(number, 10, rank))
    assert [one.rank for one in take(policy)] == [5, 0, BACKGROUND]


def test_the_queue_for_prefill_is_by_rank_and_lost_groups_of_a_rank_go_first() -> None:
    queue = PrefillQueue()
    for name, rank, again in [("a", 2, False), ("b", 0, False), ("c", 2, True), ("d", -1, False), ("e", 0, True)]:
        queue.add([RequestKey(name)], 10, again=again, rank=rank)
    assert queue.ahead() == (5, 50)
    order = [queue.pop().keys[0].request_id for _ in range(5)]
    assert order == ["d", "e", "b", "c", "a"]
    queue.check_integrity()


def test_the_queue_gives_a_rank_a_turn_which_it_may_have_to_give_back() -> None:
    queue = PrefillQueue()
    queue.add([RequestKey("batch")], 10, rank=BACKGROUND)
    for number in range(200):
        queue.add([RequestKey(str(number))], 10)
    served = [queue.pop().rank for _ in range(64)]
    assert served == [0] * 64
    head = queue.head()
    assert head is not None
    assert head.rank == BACKGROUND
    assert queue.give_way()
    head = queue.head()
    assert head is not None
    assert head.rank == 0
    assert not queue.give_way()
    served = [queue.pop().rank for _ in range(65)]
    assert served == [0] * 64 + [BACKGROUND]
    assert queue.ahead() == (72, 720)
