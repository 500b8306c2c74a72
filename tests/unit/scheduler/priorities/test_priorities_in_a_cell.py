"""Whole small cells with priorities: nothing is lost or stuck, the least goes first, and no request is starved."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from alignedserve.config import SchedulerConfig
from alignedserve.request import BATCH_PRIORITY
from support.machines import FACTOR
from support.small_cell import Request, Shape, SmallCell

MIXED = (-5, 0, 0, 1, BATCH_PRIORITY)


def cell_of(seed: int) -> SmallCell:
    rng = random.Random(seed)
    shape = Shape(
        seed=seed,
        prefills=rng.choice([1, 2]),
        decodes=rng.choice([1, 2, 3]),
        nodes=rng.choice([1, 1, 2]),
        prefetch=rng.random() < 0.7,
        pool_blocks=rng.choice([60, 240]),
        requests_buffer=rng.choice([0, 12]),
        max_running=rng.choice([3, 16]),
        groups=40,
        cancel_share=rng.choice([0.0, 0.3]),
        priorities=MIXED,
        scheduler=SchedulerConfig(
            policy=rng.choice(["aligned", "aligned-cost", "fcfs"]),
            waiting_rule=rng.choice(["rounds", "overdue", "paper"]),
            min_batch_requests=rng.choice([1, 4]),
            leaf_tokens=4,
            starvation_after_s=0.5,
        ),
    )
    return SmallCell(shape)


@pytest.mark.parametrize("seed", range(round(8 * FACTOR)))
def test_every_request_ends_with_its_tokens_although_instances_are_lost(seed: int) -> None:
    cell = cell_of(seed)
    cell.arrive_at_random()
    rng = random.Random(seed)
    for _ in range(3):
        lose, names = rng.choice([(cell.lose_prefill, cell.prefills), (cell.lose_decode, cell.decodes)])
        cell.at(rng.uniform(0.0, 1.5), lambda lose=lose, names=names: lose(rng.choice([*names])) if names else None)
    cell.run()
    cell.check_nothing_is_left()
    for request in cell.requests.values():
        assert request.ended == "cancelled" or request.tokens == request.answer


@pytest.mark.parametrize(("policy", "decodes"), [("aligned", 1), ("fcfs", 2)])
def test_a_stream_of_requests_with_hurry_neither_waits_for_a_backlog_nor_starves_it(policy: str, decodes: int) -> None:
    longest = []
    for backlog in (0, 30):
        scheduler = SchedulerConfig(policy=policy, min_batch_requests=4, leaf_tokens=4)
        shape = Shape(seed=5, decodes=decodes, pool_blocks=400, priorities=(0,), scheduler=scheduler)
        cell = SmallCell(replace(shape, decode_cache=80))
        behind = [Request(f"b{n}", 12, 30, 30, f"g{n}", priority=BATCH_PRIORITY) for n in range(backlog)]
        for request in behind:
            cell.submit([request])
        hurried = [Request(f"p{n}", 12, 8, 8, f"h{n}") for n in range(80)]
        for number, request in enumerate(hurried):
            cell.at(0.5 + number * 0.02, partial(cell.submit, [request]))
        cell.run()
        cell.check_nothing_is_left()
        longest.append(max(request.longest_wait_s for request in hurried))
        assert all(request.tokens == request.answer for request in (*behind, *hurried))
    assert longest[1] <= longest[0] + 0.1
