"""Placements on ranks: who gets what, bounds of waiting, and capacities."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.errors import ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.cost.load import load_step_cost
from alignedserve.scheduler.ranks import full_caches
from alignedserve.scheduler.ranks.balance_route import BalanceRoute
from alignedserve.scheduler.ranks.base import Members, Place, Placement, Rank, Ready
from alignedserve.scheduler.ranks.load import Weights, added, freed
from alignedserve.scheduler.ranks.names import PLACEMENTS, placement_class
from alignedserve.scheduler.ranks.shared_pool import SLACK, WINDOW_OF_A_RANK, SharedPool
from alignedserve.scheduler.ranks.window import Window

BLOCK = 16
OPT = load_step_cost("a100-opt-13b")


def ready(number: int, tokens: int) -> Ready:
    return Ready(RequestKey(f"r{number}"), tokens, tokens // BLOCK + 1, number)


def ranks(*tokens: int, requests: int = 10, slots: int = 5, room_blocks: int = 10_000) -> list[Rank]:
    lengths = [(count // requests if requests else 0) for count in tokens]
    return [
        Rank(number, requests, count, length, length, slots=slots, room_blocks=room_blocks)
        for number, (count, length) in enumerate(zip(tokens, lengths, strict=True))
    ]


class Held(Members):
    def __init__(self, *of_ranks: Iterable[Ready]) -> None:
        self._of = of_ranks

    def of(self, rank: int) -> Iterator[Ready]:
        return iter(self._of[rank])


def placed(placement: Placement, state: list[Rank], *requests: Ready) -> list[Place]:
    for request in requests:
        assert placement.add(request, state) is None
    return placement.refill(state)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    assert [placement_class(name) for name in PLACEMENTS] == list(PLACEMENTS.values())
    assert placement_class("balanced") is PLACEMENTS["balance-route"]
    with pytest.raises(ConfigError, match="did you mean least-tokens"):
        placement_class("least-token")
    with pytest.raises(ConfigError, match="round-robin, least-requests"):
        placement_class("x")


def test_sticky_placements_choose_when_a_request_comes() -> None:
    state = ranks(500, 300, 400)
    state[1].requests, state[2].queued, state[2].queued_tokens = 12, 1, 50
    robin = placement_class("round-robin")(3)
    assert [robin.add(ready(n, 9), state) for n in range(4)] == [0, 1, 2, 0]
    assert placement_class("least-requests")(3).add(ready(0, 9), state) == 0
    assert placement_class("least-tokens")(3).add(ready(0, 9), state) == 1
    state[1].queued_tokens = 500  # those that wait count
    assert placement_class("least-tokens")(3).add(ready(0, 9), state) == 2


# BR-0: F = s - G (s - m)+


def test_balance_route_fills_the_margin_with_the_longest_that_fits() -> None:
    state = ranks(1000, 400, slots=8)
    state[1].slots = 9  # more than four free slots a rank: stage 1, the rank with the most of them
    assert placed(BalanceRoute(2), state, ready(0, 700), ready(1, 550), ready(2, 100))[0] == Place(RequestKey("r1"), 1)


def test_balance_route_takes_the_best_subset_where_slots_are_scarce() -> None:
    state = ranks(1000, 400, slots=0)
    state[1].slots = 2
    found = placed(BalanceRoute(2), state, ready(0, 500), ready(1, 350), ready(2, 245), ready(3, 60))
    assert {place.key.request_id for place in found} == {"r1", "r2"}  # 595 of a margin of 600
    assert {place.rank for place in found} == {1}


def test_balance_route_places_something_even_if_it_only_costs() -> None:
    state = ranks(1000, 1000, slots=0)
    state[0].slots = 1
    assert placed(BalanceRoute(2), state, ready(0, 700), ready(1, 500)) == [Place(RequestKey("r1"), 0)]
    full = ranks(1000, 900, room_blocks=2)
    assert placed(BalanceRoute(2), full, ready(0, 700)) == []


# the shared pool


def test_the_longest_request_goes_where_the_gap_is() -> None:
    state = ranks(9000, 4000, 8500, slots=1)
    found = placed(SharedPool(3), state, ready(0, 300), ready(1, 4200), ready(2, 100))
    assert found == [Place(RequestKey("r1"), 1), Place(RequestKey("r2"), 2), Place(RequestKey("r0"), 0)]


def test_where_room_binds_the_longest_that_fits_is_taken() -> None:
    state = ranks(1000, 1000, room_blocks=20, slots=50)
    found = placed(SharedPool(2), state, ready(0, 900), ready(1, 250), ready(2, 200), ready(3, 40))
    assert [(place.key.request_id, place.rank) for place in found] == [("r1", 0), ("r2", 1), ("r3", 1)]


@pytest.mark.parametrize(("request_tokens", "joined"), [(250.0, {0: 1, 1: 3}), (900.0, {0: 1, 1: 1})])
def test_where_room_binds_a_request_that_takes_long_by_itself_counts(
    request_tokens: float, joined: dict[int, int]
) -> None:
    """The second rank has room for many, and is filled up to the load that the first one reaches."""
    state = ranks(4000, 3000, requests=4, slots=50)
    state[0].room_blocks, state[1].room_blocks = 26, 200
    window = Window(16)
    for number in range(6):
        window.add(ready(number, 400))
    loads = [rank.tokens + request_tokens * rank.requests for rank in state]
    places = full_caches.refill(state, loads, window, Weights(1e-6, request_tokens, 0.0))
    assert Counter(place.rank for place in places) == joined


def test_a_running_request_moves_from_the_fullest_rank() -> None:
    pool, state = SharedPool(3), ranks(12_000, 8000, 8000)
    lengths = (100, 1200, 2400, 8100)
    held = Held([ready(n, tokens) for n, tokens in enumerate(lengths)], [], [])
    moves = pool.moves(state, held)
    assert moves[0].key == RequestKey("r1")  # with r2 the other rank would be nearly as full
    assert (moves[0].from_rank, moves[0].to_rank) == (0, 1)
    assert max(rank.tokens for rank in state) < 12_000
    level = ranks(10_000, 10_000, 10_000 + int(SLACK * 10_000))
    assert pool.moves(level, Held([], [], [ready(0, 100)])) == []


def test_nothing_moves_to_a_rank_without_room_or_slots() -> None:
    for state in (ranks(12_000, 8000, slots=0), ranks(12_000, 8000, room_blocks=3)):
        assert SharedPool(2).moves(state, Held([ready(0, 1000)], [])) == []


def test_the_cost_model_tells_what_a_long_request_costs_beside_its_kv() -> None:
    pool = SharedPool(2)
    pool.use_cost(OPT)
    state = ranks(40_000, 40_000, requests=40)
    assert placed(pool, state, ready(0, 500))[0].rank == 0
    state = ranks(40_000, 40_000, requests=40)
    state[0].longest, state[0].shortest = 8000, 500  # the same KV, but the others wait for its longest
    assert placed(pool, state, ready(1, 500))[0].rank == 1


# the shared pool where room binds


def full(*of_ranks: tuple[int, int, int, int], room_blocks: int = 500) -> list[Rank]:
    """`of_ranks`: requests, tokens, longest, shortest."""
    return [Rank(n, *counts, slots=50, room_blocks=room_blocks) for n, counts in enumerate(of_ranks)]


def on_opt(count: int) -> SharedPool:
    pool = SharedPool(count)
    pool.use_cost(OPT)
    return pool


LONG_ONES, SHORT_ONES = (8, 50_000, 7500, 5000), (80, 50_000, 1000, 100)


def test_where_room_binds_requests_join_ranks_of_their_length() -> None:
    waiting = [ready(n, tokens) for n, tokens in enumerate((7000, 400, 6900, 300, 6800))]  # one long one has room
    for first, second in ((LONG_ONES, SHORT_ONES), (SHORT_ONES, LONG_ONES)):
        found = placed(on_opt(2), full(first, second), *waiting)
        longs = 0 if first == LONG_ONES else 1
        assert found[0] == Place(RequestKey("r0"), longs)
        assert {(place.key.request_id, place.rank) for place in found[1:]} == {("r1", 1 - longs), ("r3", 1 - longs)}


def test_no_rank_is_filled_beyond_the_level_of_the_first_full_cache() -> None:
    """Ranks of both lengths take longer at the same KV; their room stays free."""
    state = full(SHORT_ONES, (60, 50_000, 7500, 100), room_blocks=60)
    found = placed(on_opt(2), state, *(ready(n, 500 + n) for n in range(8)))
    assert found
    assert {place.rank for place in found} == {0}


def test_an_empty_rank_takes_any_request() -> None:
    state = full((60, 50_000, 7500, 100), (0, 0, 0, 0), room_blocks=600)
    found = placed(on_opt(2), state, ready(0, 9000), ready(1, 8900), ready(2, 8800))
    assert found == [Place(RequestKey("r0"), 1)]


def test_where_room_binds_a_rank_of_both_lengths_gives_each_to_its_like() -> None:
    # a short one leaves where the long one has no room
    for room_blocks, short_tokens, moved, to in ((500, 47_000, "r9", 0), (100, 42_000, "r1", 2)):
        pool = on_opt(3)
        state = full(LONG_ONES, (60, 50_000, 7000, 100), (80, short_tokens, 1000, 100), room_blocks=room_blocks)
        for n in range(10, 19):
            pool.add(ready(n, 6000), state)
        held = Held([], [ready(0, 100), ready(1, 900), ready(9, 7000)], [])
        moves = pool.moves(state, held)
        assert (moves[0].key.request_id, moves[0].from_rank, moves[0].to_rank) == (moved, 1, to)


def test_the_load_that_a_request_adds_goes_with_it() -> None:
    weights = Weights(1e-6, 30.0, 0.05)
    rank = Rank(0, 10, 8000, 2000, 300)
    more = added(rank, 5000, weights)
    assert more == pytest.approx(5000 + 30 + 0.05 * 10 * 3000)  # the others are 3,000 tokens further from the longest
    rank.slots = 1
    rank.take(ready(0, 5000))
    assert freed(rank, 5000, 2000, weights) == pytest.approx(more)


@settings(max_examples=90, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 6),
    name=st.sampled_from(["shared-pool", "balance-route"]),
    costed=st.booleans(),
)
def test_every_request_is_placed_once_within_capacity_and_bounds(
    seed: int, count: int, name: str, costed: bool
) -> None:
    """Requests come, run for a while and end; ranks have few slots and little room."""
    rng = random.Random(seed)
    pool = placement_class(name)(count)
    if costed:
        pool.use_cost(OPT)
    running: list[dict[RequestKey, Ready]] = [{} for _ in range(count)]
    overtaken: dict[RequestKey, int] = {}
    by_key: dict[RequestKey, Ready] = {}
    number, last, idle = 0, 120, 0
    while number < last or overtaken:
        assert idle < 400
        for _ in range(rng.randint(0, 4) if number < last else 0):
            request = ready(number, rng.choice([rng.randint(1, 90), rng.randint(900, 1500)]))
            by_key[request.key], overtaken[request.key] = request, 0
            pool.add(request, [])
            number += 1
        state = [
            Rank(
                n,
                len(held),
                sum(one.tokens for one in held.values()),
                max((one.tokens for one in held.values()), default=0),
                min((one.tokens for one in held.values()), default=0),
                slots=4 - len(held),
                room_blocks=120 - sum(one.blocks for one in held.values()),
            )
            for n, held in enumerate(running)
        ]
        places = pool.refill(state)
        idle = 0 if places else idle + 1
        for place in places:
            request = by_key.pop(place.key)
            running[place.rank][place.key] = request
            del overtaken[place.key]
            for key in overtaken:
                overtaken[key] += by_key[key].number < request.number
        if name == "shared-pool":
            assert all(times < count * WINDOW_OF_A_RANK for times in overtaken.values())
        assert pool.waiting() == len(overtaken)
        for rank, held in zip(state, running, strict=True):
            assert len(held) <= 4
            assert sum(one.blocks for one in held.values()) <= 120
            assert (rank.requests, rank.tokens) == (len(held), sum(one.tokens for one in held.values()))
            for key in [key for key in held if rng.random() < 0.3]:
                del held[key]
    assert not by_key


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_window_holds_the_oldest_by_length(lengths: list[int], size: int, rng: random.Random) -> None:
    window, left = Window(size), {}
    for number, tokens in enumerate(lengths):
        left[number] = ready(number, tokens)
        window.add(left[number])
    while left:
        oldest = min(left)
        inside = [one for number, one in left.items() if number < oldest + size]
        most = rng.randint(0, 500)
        fitting = [one for one in inside if one.tokens <= most]
        found = window.longest(most, 10_000)
        shortest = min(one.tokens for one in inside)
        assert found is not None
        assert found.tokens == max((one.tokens for one in fitting), default=shortest)
        assert window.mean_tokens * len(inside) == pytest.approx(sum(one.tokens for one in inside))
        gone = rng.choice(inside)
        window.remove(gone)
        del left[gone.number]
    assert len(window) == 0


@pytest.mark.parametrize("with_cost", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    loads=st.lists(st.integers(0, 20_000), min_size=2, max_size=4),
    draw=st.randoms(use_true_random=False),
)
def test_a_request_that_joins_at_once_goes_where_there_is_room(
    name: str, with_cost: bool, requests: list[int], loads: list[int], draw: random.Random
) -> None:
    placement, state = PLACEMENTS[name](len(loads)), ranks(*loads)
    if with_cost:
        placement.use_cost(OPT)
    for number, tokens in enumerate(requests):
        request = ready(number, tokens)
        fitting = draw.sample(range(len(loads)), draw.randint(1, len(loads)))
        for rank in state:
            rank.slots, rank.room_blocks = 3, request.blocks if rank.number in fitting else 0
        before = [rank.requests for rank in state]
        chosen = placement.choose(request, state)
        assert chosen in fitting
        assert [rank.requests for rank in state] == [count + (at == chosen) for at, count in enumerate(before)]
        assert not placement.waiting()
