"""Which rank computes a request where ranks share experts: every request has one, and loads are near each other."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from alignedserve.decode_worker.rank_placer import RankPlacer
from alignedserve.ranks.degrees import PLACEMENT_NAMES, PLACEMENTS
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import RunItem
from alignedserve.scheduler.ranks import names


def item(number: int, tokens: int) -> RunItem:
    return RunItem(RequestKey(str(number)), tokens, [])


def loads(run: Sequence[RunItem], ranks: Sequence[int], size: int) -> list[int]:
    return [sum(one.kv_tokens for one, rank in zip(run, ranks, strict=True) if rank == each) for each in range(size)]


def test_the_names_are_those_of_the_simulator() -> None:
    assert set(PLACEMENTS) == set(names.PLACEMENTS)
    assert PLACEMENTS[0] == names.DEFAULT
    assert set(PLACEMENT_NAMES) == {*names.PLACEMENTS, *names.ALIASES}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_request_has_a_rank_while_others_come_and_go(name: str) -> None:
    draw, placer = random.Random(4), RankPlacer(names.placement_class(name)(3))
    running: dict[int, RunItem] = {}
    seen = set()
    for turn in range(120):
        for number in [number for number in running if draw.random() < 0.08]:
            del running[number]
        for _ in range(draw.randrange(3)):
            number = 1000 * turn + len(running)
            running[number] = item(number, draw.choice((20, 30, 2000)))
        run = list(running.values())
        if not run:
            continue
        ranks = placer.place(run)
        assert len(ranks) == len(run)
        assert set(ranks) <= {0, 1, 2}
        seen |= set(ranks)
        for one in run:
            one.kv_tokens += 1
    assert seen == {0, 1, 2}


def test_the_shared_pool_evens_out_what_round_robin_leaves() -> None:
    """Long and short by turns: round robin gives one rank all long ones."""
    run = [item(number, (20, 900)[number % 2]) for number in range(12)]
    found = {}
    for name in ("round-robin", "shared-pool"):
        found[name] = loads(run, RankPlacer(names.placement_class(name)(2)).place(run), 2)
    assert found["round-robin"] == [120, 5400]
    assert max(found["shared-pool"]) < 1.25 * min(found["shared-pool"])


def test_requests_that_grow_apart_are_evened_out_also_if_none_comes_or_goes() -> None:
    placer = RankPlacer(names.placement_class("shared-pool")(2))
    run = [item(number, tokens) for number, tokens in enumerate((2000, 500, 500, 500, 500))]
    first = placer.place(run)
    assert loads(run, first, 2) == [3000, 1000]
    for _ in range(2000):
        for one in run:
            one.kv_tokens += 1
        ranks = placer.place(run)
    assert max(loads(run, first, 2)) == 9000
    assert max(loads(run, ranks, 2)) <= 7500


def test_a_rank_whose_requests_have_ended_gets_some_of_the_others() -> None:
    placer = RankPlacer(names.placement_class("shared-pool")(2))
    run = [item(number, 400) for number in range(8)]
    ranks = placer.place(run)
    left = [one for one, rank in zip(run, ranks, strict=True) if rank == 0]
    for _ in range(4):
        ranks = placer.place(left)
    assert sorted(loads(left, ranks, 2)) == [800, 800]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_request_that_pauses_keeps_its_rank(name: str) -> None:
    placer = RankPlacer(names.placement_class(name)(2))
    run = [item(number, 300) for number in range(6)]
    ranks = placer.place(run)
    placer.place(run[:4])
    again = placer.place(run)
    moved = sum(before != after for before, after in zip(ranks, again, strict=True))
    assert moved <= (2 if name == "shared-pool" else 0)  # which may even out what the pause left
