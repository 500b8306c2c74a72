"""Iterations over the stages of a pipeline: disjoint requests, shares of like cost, copies that wait for what flies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.lanes import Lanes, by_tokens, share_of
from alignedserve.scheduler.instance.plan import RunItem
from support.scripted_cell import ScriptedCell
from support.scripted_decode import Script


def items(lengths: Sequence[int]) -> list[RunItem]:
    return [RunItem(RequestKey(str(number)), length, []) for number, length in enumerate(lengths)]


def lengths_of(lane: Sequence[RunItem]) -> list[int]:
    return [item.kv_tokens for item in lane]


def test_the_first_lane_has_its_share_and_the_second_has_the_rest() -> None:
    free = items([100, 900, 200, 800, 300, 700])
    first = share_of(free, [], 2)
    assert lengths_of(first) == [100, 200, 300, 700]
    rest = [item for item in free if item not in first]
    assert share_of(rest, [lengths_of(first)], 2) == rest


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_lanes_differ_by_one_request_at_most(depth: int) -> None:
    free: list[RunItem] = items(range(100, 160))
    lanes: list[list[int]] = []
    while free:
        lanes.append(lengths_of(share_of(free, lanes, depth)))
        free = [item for item in free if item.kv_tokens not in lanes[-1]]
    assert len(lanes) == depth
    costs = [by_tokens(lane) for lane in lanes]
    assert max(costs) - min(costs) <= by_tokens([160]) * depth / 2


def test_what_is_more_than_the_share_waits_for_the_lane_that_is_nearest_in_length() -> None:
    free = items([10, 20, 30, 400, 500])
    assert lengths_of(share_of(free, [[200, 200]], 2)) == [10, 20, 30, 400]
    assert lengths_of(share_of(free, [[5, 5]], 2)) == [500]
    waited = {free[0].key}
    assert lengths_of(share_of(free, [[5, 5]], 2, late=waited)) == [10, 500]


def test_two_requests_fly_in_two_lanes() -> None:
    assert lengths_of(share_of(items([50, 50]), [], 2)) == [50]
    assert len(share_of(items([50] * 6), [], 3)) == 2


def test_nothing_waits_for_more_than_one_lane() -> None:
    free, lanes = items([10, 10, 10, 2]), Lanes(2, by_tokens)
    turns = [{item.key for item in lanes.next(free, [[10, 10]])} for _ in range(4)]
    for before, after in pairwise(turns):
        assert before | after == {item.key for item in free}


def test_a_little_more_than_the_share_is_not_cut() -> None:
    free = items([500, 540])
    assert share_of(free, [[500, 500]], 2) == free
    assert share_of(items([7]), [[5]], 2) == items([7])


def test_a_round_of_lanes_is_one_iteration_of_all() -> None:
    lanes = Lanes(2, by_tokens)
    assert lanes.took([100, 200], 0.5, 1) is None
    assert lanes.took([400], 0.25, 1) == ([[100, 200], [400]], 0.75)
    assert lanes.took([100], 0.5, 1) is None
    lanes.pause()
    assert lanes.took([7], 0.5, 0) == ([[7]], 0.5)


def cell_of(*scripts: Script, blocks: int = 64, lanes: int = 2, **config: int) -> ScriptedCell:
    cell = ScriptedCell(
        blocks,
        4,
        None,
        DecodeConfig(**{"join_iterations": 1, **config}),  # type: ignore[arg-type]
        engine_overlaps=False,
        lanes=lanes,
    )
    for script in scripts:
        cell.offer(cell.add(script))
    cell.turn()
    while cell.pulls:
        cell.end_pull()
    return cell


@pytest.mark.parametrize("lanes", [2, 3])
def test_requests_fly_in_as_many_lanes_as_there_are_stages(lanes: int) -> None:
    scripts = [Script(number, [number] * 4, 12) for number in range(6)]
    cell = cell_of(*scripts, lanes=lanes)
    for _ in range(2 * lanes):
        cell.turn()
    assert cell.engine.most_ahead == lanes
    sizes = [len(step.numbers) for step in cell.engine.steps if not step.taken]
    assert sizes == [6 // lanes] * (lanes - 1)
    cell.settle()
    cell.check_ended()


def test_one_request_alone_has_a_token_in_each_turn() -> None:
    cell = cell_of(Script(0, [5] * 4, 12))
    for turn in range(1, 12):
        while len(cell.clients[RequestKey("0")].tokens) == turn:
            cell.turn()
    cell.settle()
    cell.check_ended()
    assert cell.engine.most_ahead == 1


def test_what_comes_in_waits_until_nothing_flies_that_uses_its_blocks() -> None:
    """The cancelled request's blocks are free at once, while its row is still being computed by a later stage."""
    cell = cell_of(Script(0, [5] * 11, 20), Script(1, [6] * 4, 20), blocks=8)
    turns = 0
    while not any(0 in step.numbers for step in cell.engine.steps if not step.taken):
        cell.turn()
        turns += 1
        assert turns < 5
    cell.cancel(cell.clients[RequestKey("0")])
    cell.offer(cell.add(Script(2, [7] * 15, 4)))
    cell.turn()
    cell.settle()
    cell.check_ended()
