"""Ranks that have a cache each: where candidates join, who moves when a cache is full, and who is evicted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import BufferKind, CancelOutcome, Candidate, IterationPlan
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from alignedserve.scheduler.ranks.base import Members, Move, Place, Rank, Ready
from alignedserve.scheduler.ranks.group_scheduler import GroupScheduler
from alignedserve.scheduler.ranks.names import PLACEMENTS
from alignedserve.scheduler.ranks.shared_pool import SharedPool
from support.chains import chain_of

EACH = 40


class Told(SharedPool):
    """A request's name ends with its rank. It moves nothing on its own."""

    def choose(self, request: Ready, ranks: Sequence[Rank]) -> int:
        rank = ranks[int(request.key.request_id[-1])]
        assert rank.takes(request)
        rank.take(request)
        return rank.number

    def moves(self, ranks: Sequence[Rank], members: Members) -> list[Move]:
        return []


class Group:
    """Blocks of one token; copies end at once."""

    def __init__(self, placement: str = "", *, ranks: int = 2, most: int = 8) -> None:
        self.books = RangedAllocator(ranks, EACH, "cache")
        chosen = PLACEMENTS[placement](ranks) if placement else Told(ranks)
        config = DecodeConfig(max_running=most, watermark_blocks=1, join_iterations=1)
        self.scheduler = GroupScheduler(config, self.books, 1, chosen)
        self.now_s = 0.0

    def offer(self, name: str, tokens: int, most: int = EACH, words: Sequence[str] | None = None) -> None:
        chain = None if words is None else chain_of(list(words), 1, b"")
        self.scheduler.offer(Candidate(RequestKey(name), tokens, most, chain, BufferKind.REQUESTS, 1), self.now_s)

    def plan(self) -> IterationPlan:
        self.now_s += 1.0
        plan = self.scheduler.plan(self.now_s)
        self.scheduler.check_integrity()
        self.scheduler.advance([(item.key, False) for item in plan.run])
        for join in plan.joins:
            self.scheduler.copied_in(join.key)
        return plan

    def ranks(self) -> dict[str, int]:
        batch = self.scheduler._batch
        return {member.key.request_id: batch.rank_of(member) for member in batch.present()}


def keys(items: Sequence[object]) -> list[str]:
    return [item.key.request_id for item in items]  # type: ignore[attr-defined]


def crowd(group: Group) -> IterationPlan:
    """Run on until something leaves its rank."""
    for _ in range(EACH):
        plan = group.plan()
        if plan.moves or plan.evictions:
            return plan
    raise AssertionError("nothing left its rank")


def test_requests_join_where_there_is_room() -> None:
    group = Group("shared-pool")
    for name, tokens in (("long", 30), ("short", 5), ("next", 8), ("large", 30), ("last", 4)):
        group.offer(name, tokens)
    assert keys(group.plan().joins) == ["long", "short", "next", "last"]
    assert group.ranks() == {"long": 0, "short": 1, "next": 1, "last": 0}  # "large" has room in none


def test_a_request_larger_than_a_rank_s_cache_is_given_back() -> None:
    group = Group()
    group.offer("larger-0", 5, EACH + 1)
    assert group.plan().give_back.keys == (RequestKey("larger-0"),)


def two_against_one() -> Group:
    """Rank 0 fills up while rank 1 has room for the shorter of its requests."""
    group = Group()
    for name, tokens in (("a-0", 20), ("b-0", 12), ("c-1", 18)):
        group.offer(name, tokens)
    group.plan()
    assert group.ranks() == {"a-0": 0, "b-0": 0, "c-1": 1}
    return group


def test_when_a_cache_is_full_the_longest_that_fits_elsewhere_moves() -> None:
    group = two_against_one()
    plan = crowd(group)
    assert keys(plan.moves) == ["b-0"]
    assert not plan.evictions
    assert keys(plan.run) == ["a-0", "c-1"]  # the one that moves pauses
    (move,) = plan.moves
    assert {block // EACH for block in move.source_ids} == {0}
    assert {block // EACH for block in move.block_ids} == {1}
    group.plan()
    assert group.scheduler.copied_in(move.key)
    assert group.ranks() == {"a-0": 0, "b-0": 1, "c-1": 1}
    assert "b-0" in keys(group.plan().run)


def test_a_request_that_is_cancelled_while_it_moves_is_gone_with_the_copy() -> None:
    group = two_against_one()
    (move,) = crowd(group).moves
    assert group.scheduler.cancel(move.key) is CancelOutcome.COPYING
    assert not group.scheduler.copied_in(move.key)
    assert group.ranks() == {"a-0": 0, "c-1": 1}
    group.scheduler.check_integrity()


def test_a_move_that_fails_leaves_the_request_where_it_was() -> None:
    group = two_against_one()
    before = group.ranks()
    (move,) = crowd(group).moves
    assert group.scheduler.copy_failed(move.key)
    assert group.ranks() == before
    group.scheduler.check_integrity()
    assert group.scheduler.status().moves == 1


def test_if_all_moves_fail_requests_are_evicted_in_time_and_the_others_run() -> None:
    group, ran, evicted = two_against_one(), 0, 0
    for _ in range(4 * EACH):
        plan = group.plan()
        for move in plan.moves:
            assert group.scheduler.copy_failed(move.key)
        for eviction in plan.evictions:
            evicted += 1
            group.scheduler.copied_out(eviction.key)
        ran += len(plan.run)
        if not group.ranks():
            break
    assert evicted
    assert ran >= EACH
    group.scheduler.check_integrity()


def test_room_that_an_overdue_candidate_waits_for_is_not_taken_by_moves() -> None:
    group = two_against_one()
    group.plan()
    group.offer("late-1", 30)
    group.scheduler.mark_urgent({RequestKey("late-1"): 0.0})
    evicted: list[str] = []
    for _ in range(EACH):
        plan = group.plan()
        assert not plan.moves
        evicted += keys(plan.evictions)
        for eviction in plan.evictions:
            group.scheduler.copied_out(eviction.key)
        if "late-1" in group.ranks():
            break
    assert "late-1" in group.ranks()
    assert evicted == ["c-1"]


@pytest.mark.parametrize("placement", ["least-tokens", "least-requests", "round-robin", "balance-route"])
def test_placements_that_choose_once_move_nothing(placement: str) -> None:
    group = Group(placement)
    for name in ("a", "b", "c"):
        group.offer(name, 12)
    group.plan()
    plan = crowd(group)
    assert not plan.moves
    assert len(plan.evictions) == 1


def test_if_no_rank_has_room_the_longest_is_evicted() -> None:
    group = Group()
    for name, tokens in (("a-0", 15), ("b-0", 14), ("c-1", 15), ("d-1", 14)):
        group.offer(name, tokens)
    group.plan()
    plan = crowd(group)
    assert not plan.moves
    assert keys(plan.evictions) == ["a-0", "c-1"]


def test_requests_share_a_beginning_within_a_rank_and_where_they_move_to() -> None:
    group, words = Group(), [f"w{number}" for number in range(12)]
    group.offer("a-0", 20)
    group.offer("b-0", 12, words=words)
    group.offer("c-1", 12, words=words)
    assert [join.resident_blocks for join in group.plan().joins] == [0, 0, 0]  # one in each rank
    group.offer("d-1", 12, words=words)
    (join,) = group.plan().joins
    assert join.resident_blocks == 12
    plan = crowd(group)
    assert [(move.key.request_id, move.shared_blocks) for move in plan.moves] == [("b-0", 12)]


def test_for_an_overdue_candidate_the_rank_is_cleared_where_fewest_must_go() -> None:
    group = Group(most=20)
    for name, tokens in (("whole-0", 25), ("a-1", 8), ("b-1", 8), ("c-1", 8)):
        group.offer(name, tokens)
    group.plan()
    group.plan()
    group.offer("late-0", 30)
    group.scheduler.mark_urgent({RequestKey("late-0"): 0.0})
    assert keys(group.plan().evictions) == ["whole-0"]


def test_nothing_is_evicted_for_an_overdue_candidate_where_a_move_makes_room() -> None:
    group = Group()
    for name, tokens in (("a-0", 20), ("b-0", 16), ("c-1", 8)):
        group.offer(name, tokens)
    assert keys(crowd(group).moves) == ["a-0"]
    group.offer("late-0", 12)
    group.scheduler.mark_urgent({RequestKey("late-0"): 0.0})
    plan = group.plan()
    assert (keys(plan.joins), keys(plan.evictions)) == ([], [])
    group.scheduler.copied_in(RequestKey("a-0"))
    plan = group.plan()
    assert (keys(plan.joins), keys(plan.evictions)) == (["late-0"], [])


class Asked(SharedPool):
    """Notes what it is asked."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.asked: list[Ready] = []

    def add(self, request: Ready, ranks: Sequence[Rank]) -> None:
        self.asked.append(request)
        super().add(request, ranks)

    def refill(self, ranks: Sequence[Rank]) -> list[Place]:
        places = super().refill(ranks)
        assert not self.waiting()
        return places


def test_nothing_waits_in_the_placement() -> None:
    books, placement = RangedAllocator(3, EACH, "cache"), Asked(3)
    scheduler = GroupScheduler(DecodeConfig(max_running=30), books, 1, placement)
    for number in range(12):
        scheduler.offer(Candidate(RequestKey(str(number)), 2, 5, None, BufferKind.BATCH, 1), 0.0)
    joins = scheduler.plan(1.0).joins
    assert [one.key for one in placement.asked] == [join.key for join in joins]
    numbers = [one.number for one in placement.asked]
    assert numbers == sorted(set(numbers))
