"""The next batch is ready before the running batch needs it; instances share a pool by length (paper, section 3.4)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import mean

import pytest

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import Candidate, IterationPlan
from support.small_cell import Request, Shape, SmallCell
from support.small_cell.decode import Decode

CLUSTERS = ((8, 12), (60, 66), (120, 128))


def full_pool(seed: int, *, decodes: int, policy: str = "aligned", decode_cache: int = 1000) -> SmallCell:
    """All at once, of three lengths."""
    rng = random.Random(seed)
    scheduler = SchedulerConfig(
        policy=policy, max_prefix_tokens=256, min_batch_requests=6, leaf_tokens=4, starvation_after_s=1e6
    )
    cell = SmallCell(
        Shape(
            seed=seed,
            decodes=decodes,
            pool_blocks=20_000,
            prefill_cache=200,
            token_budget=4096,
            decode_cache=decode_cache,
            batch_buffer=400 * decodes,
            requests_buffer=200 * decodes,
            max_running=8,
            scheduler=scheduler,
        )
    )
    for number in range(240):
        answer = rng.randint(20, 60)
        request = Request(f"{number}", rng.randint(*CLUSTERS[number % 3]), answer, 60, "")
        cell.at(0.0, partial(cell.submit, [request]))
    return cell


def watch(cell: SmallCell, look: Callable[[str, IterationPlan, float], None]) -> None:
    """Call `look` with every plan that is made while the pool is not empty."""

    def replace_plan(decode: Decode) -> None:
        plan = decode.scheduler.plan

        def watched(now_s: float) -> IterationPlan:
            made = plan(now_s)
            if cell.core.describe()["waiting_in_pool"]:
                look(decode.name, made, now_s)
            return made

        decode.scheduler.plan = watched  # type: ignore[method-assign]

    for decode in cell.decodes.values():
        replace_plan(decode)


@pytest.mark.parametrize("seed", range(3))
def test_candidates_are_there_before_the_running_batch_has_room_for_them(seed: int) -> None:
    """Of the requests that join while the pool is full, the share that had arrived by the previous iteration."""
    cell = full_pool(seed, decodes=1)
    scheduler = cell.decodes["decode-0"].scheduler
    offer = scheduler.offer
    offered_s: dict[RequestKey, float] = {}
    early: list[bool] = []
    iterated_s = [-1.0]

    def offering(candidate: Candidate, now_s: float) -> None:
        offered_s[candidate.key] = now_s
        offer(candidate, now_s)

    def look(_: str, plan: IterationPlan, now_s: float) -> None:
        early.extend(offered_s[join.key] <= iterated_s[0] for join in plan.joins)
        if plan.run:
            iterated_s[0] = now_s

    scheduler.offer = offering  # type: ignore[method-assign]
    watch(cell, look)
    cell.run()
    cell.check_nothing_is_left()
    assert len(early) > 100
    assert mean(early) > 0.9


def spread_within_instances(seed: int, policy: str) -> float:
    """With two instances: the spread of lengths within one, divided by the spread over both."""
    cell = full_pool(seed, decodes=2, policy=policy)
    running: dict[str, list[int]] = {}
    within: list[int] = []
    overall: list[int] = []

    def look(name: str, plan: IterationPlan, _: float) -> None:
        if plan.run:
            running[name] = [item.kv_tokens for item in plan.run]
            within.append(max(running[name]) - min(running[name]))
            everywhere = [tokens for lengths in running.values() for tokens in lengths]
            overall.append(max(everywhere) - min(everywhere))

    watch(cell, look)
    cell.run()
    cell.check_nothing_is_left()
    assert len(within) > 100
    return sum(within) / sum(overall)


def test_instances_of_one_pool_specialise_by_length() -> None:
    aligned, fcfs = (mean(spread_within_instances(seed, policy) for seed in range(3)) for policy in ("aligned", "fcfs"))
    assert aligned < 0.75 * fcfs


def moves_between_instances(cell: SmallCell) -> int:
    """How often a request continues at another instance. It is never at two instances at once."""
    cell.run()
    cell.check_nothing_is_left()
    served = defaultdict(list)
    for service in sorted(cell.services, key=lambda service: service.begin_s):
        served[service.request_id].append(service)
    assert len(served) == len(cell.requests)
    pairs = [pair for services in served.values() for pair in pairwise(services)]
    assert all(before.end_s <= after.begin_s for before, after in pairs)
    return sum(before.decode_id != after.decode_id for before, after in pairs)


@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_moved_between_instances_that_have_room(seed: int) -> None:
    assert moves_between_instances(full_pool(seed, decodes=2)) == 0


def test_evicted_requests_go_back_to_the_instance_of_their_lengths_rather_than_to_any() -> None:
    """With two instances, half of them would change by chance."""
    cells = [full_pool(seed, decodes=2, decode_cache=120) for seed in range(4)]
    moves = sum(moves_between_instances(cell) for cell in cells)
    evicted = sum(cell.counts["evicted"] for cell in cells)
    assert evicted > 100
    assert moves < evicted / 3
