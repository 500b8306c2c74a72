"""The promises of Algorithm 2 (paper, section 3.4), checked in every plan of random runs of a cell in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import IterationPlan
from support.small_cell import Request, Shape, SmallCell
from support.small_cell.decode import Decode

SEEDS = range(6)


class Watch:
    """Every plan of a decode instance, and what ran before it."""

    def __init__(self, decode: Decode, look: Callable[[Watch, IterationPlan], None]) -> None:
        self.decode, self.look = decode, look
        self.iteration = 0
        self.batch_id = 0  # of the plan before
        self.joined: dict[RequestKey, int] = {}  # iteration at which it joined last
        self.evicted: dict[RequestKey, tuple[int, bool]] = {}  # (iteration of its last eviction, whether in a switch)
        self.running: dict[RequestKey, tuple[int, int, int]] = {}  # (KV tokens, batch, iterations) before the plan
        self._plan = decode.scheduler.plan
        decode.scheduler.plan = self.plan  # type: ignore[method-assign]

    def plan(self, now_s: float) -> IterationPlan:
        batch = self.decode.scheduler._batch
        self.running = {key: (m.kv_tokens, m.batch_id, m.iterations) for key, m in batch.running.items()}
        plan = self._plan(now_s)
        self.look(self, plan)
        self.joined |= {join.key: self.iteration for join in plan.joins}
        self.evicted |= {e.key: (self.iteration, self.running[e.key][1] != self.batch_id) for e in plan.evictions}
        self.iteration += bool(plan.run)
        self.batch_id = plan.batch_id
        return plan


def watched_run(seed: int, look: Callable[[Watch, IterationPlan], None], *, after_s: float = 1e6) -> SmallCell:
    """Twenty long requests among many short ones: small caches cause evictions, and whole batches switch."""
    rng = random.Random(seed)
    scheduler = SchedulerConfig(
        max_prefix_tokens=256, min_batch_requests=4, leaf_tokens=4, starvation_after_s=after_s, join_window=0.25
    )
    cell = SmallCell(
        Shape(
            seed=seed,
            decodes=rng.choice([1, 2]),
            prefetch=seed % 3 != 0,
            pool_blocks=4000,
            decode_cache=rng.choice([50, 80]),
            batch_buffer=60,
            requests_buffer=rng.choice([12, 40]),
            max_running=rng.choice([6, 16]),
            scheduler=scheduler,
        )
    )
    for decode in cell.decodes.values():
        Watch(decode, look)
    for number in range(120):
        prompt = rng.randint(40, 60) if number % 3 == 0 else rng.randint(8, 16)
        answer = rng.randint(10, 60)
        request = Request(f"{number}", prompt, answer, rng.choice([answer, 60]), "")
        cell.at(rng.uniform(0.0, 0.5), partial(cell.submit, [request]))
    cell.run()
    cell.check_nothing_is_left()
    return cell


@pytest.mark.parametrize("after_s", [0.2, 1e6])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_iteration_never_waits_for_room(seed: int, after_s: float) -> None:
    """A request that is being copied in cannot be evicted if its copy ends within the look-ahead of joins."""
    sat_out: list[int] = []
    plans = 0

    def look(watch: Watch, plan: IterationPlan) -> None:
        nonlocal plans
        plans += 1
        ahead = watch.decode.cell.config.decode.join_iterations
        entering = watch.decode.scheduler._batch.entering
        slow = any(watch.iteration - watch.joined.get(key, watch.iteration) > ahead for key in entering)
        sat_out.append(0 if slow else plan.stalled)

    cell = watched_run(seed, look, after_s=after_s)
    assert cell.counts["evicted"] > 5
    assert sum(sat_out) == 0
    assert cell.counts["stalled"] <= plans // 500, "a copy that is slow now and then costs an iteration or two"


@pytest.mark.parametrize("after_s", [0.2, 1e6])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_joined_request_does_not_leave_within_the_iterations_that_it_was_given_room_for(
    seed: int, after_s: float
) -> None:
    """No ping-pong. Counted from the join, which includes the time of its copy."""
    stayed: list[int] = []

    def look(watch: Watch, plan: IterationPlan) -> None:
        stayed.extend(watch.iteration - watch.joined[evict.key] for evict in plan.evictions)

    cell = watched_run(seed, look, after_s=after_s)
    assert len(stayed) > 5
    assert min(stayed) >= cell.config.decode.join_iterations


@pytest.mark.parametrize("seed", SEEDS)
def test_what_leaves_in_a_switch_does_not_come_straight_back(seed: int) -> None:
    away: list[int] = []

    def look(watch: Watch, plan: IterationPlan) -> None:
        for join in plan.joins:
            left = watch.evicted.get(join.key)
            if left is not None and left[1]:
                away.append(watch.iteration - left[0])

    cell = watched_run(seed, look)
    assert min(away) >= cell.config.decode.join_iterations


@pytest.mark.parametrize("seed", SEEDS)
def test_the_longest_leaves_and_in_a_switch_the_longest_of_the_old_batch(seed: int) -> None:
    switches: list[bool] = []

    def look(watch: Watch, plan: IterationPlan) -> None:
        left = {key: state for key, state in watch.running.items() if state[2]}
        for evict in plan.evictions:
            claims = {key: (batch != watch.batch_id, tokens) for key, (tokens, batch, _) in left.items()}
            assert claims[evict.key] == max(claims.values())
            switches.append(claims[evict.key][0])
            del left[evict.key]

    watched_run(seed, look)
    assert switches


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_that_finds_room_joins_at_once(seed: int) -> None:
    """A candidate still waits after a plan only if too little room would be left, recomputed from every member."""
    looked: list[RequestKey] = []

    def look(watch: Watch, plan: IterationPlan) -> None:
        scheduler, cell = watch.decode.scheduler, watch.decode.cell
        iterations, size = cell.config.decode.join_iterations, cell.shape.block_size
        members = list(scheduler._batch.present())
        waiting = list(scheduler._waiting)
        if not waiting or len(members) >= cell.shape.max_running:
            return
        kv_tokens = {key: watch.decode.length[key] for key in waiting}
        smallest = min(waiting, key=lambda key: kv_tokens[key])
        if len(waiting) > 1:  # up to eight that do not fit are passed over: with one request, order does not matter
            return
        request = cell.request(smallest)
        states = [(m.kv_tokens, len(m.block_ids), m.max_total_tokens) for m in members]
        held = -(-(kv_tokens[smallest] + 1) // size)
        states.append((kv_tokens[smallest], held, request.prompt + request.most))
        needed = held
        for tokens, blocks, most in states:
            soon = max(blocks, -(-min(tokens + iterations, most) // size))
            needed += soon - blocks + (soon * size < most)
        looked.append(smallest)
        assert needed > watch.decode.cache.available_blocks

    for more in range(3):
        watched_run(seed + 100 * more, look)
    assert looked
