"""The bound of a wait if requests have different objectives and the threshold is adjusted, in stores of any size.

Random loads combine streams that starve others: requests that always match the running batch, bursts, answers that
hold the room, requests that fit only alone, and requests that grow until they are evicted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from alignedserve.config import SchedulerConfig
from alignedserve.scheduler.core.actions import Prefetch
from alignedserve.scheduler.cost.step import ChunkShape
from support.machines import machine_settings
from support.small_cell import Bound, Load, Shape, SmallCell, Stamps, Turns, Wait

NONE, SHORT, LONG = 0.0, 0.08, 2.0
MIXED, MANY = (NONE, SHORT, 0.25, LONG), (0.3, 0.7, 1.1)
OBJECTIVES = st.sampled_from([(NONE,), (SHORT,), (LONG,), (NONE, SHORT), MIXED, MANY])


@dataclass(frozen=True)
class World:
    seed: int
    decodes: int
    prefetch: bool
    decode_cache: int
    max_running: int
    batch_buffer: int
    requests_buffer: int
    late_share: float
    streams: tuple[tuple[str, tuple[float, ...]], ...]
    policy: str = "aligned"
    tpot_objective_s: float = 0.0
    waiting_rule: str = "overdue"

    def cell(self) -> SmallCell:
        scheduler = SchedulerConfig(
            max_prefix_tokens=256,
            min_batch_requests=4,
            leaf_tokens=4,
            starvation_after_s=0.5,
            late_share=self.late_share,
            policy=self.policy,
            waiting_rule=self.waiting_rule,
            tpot_objective_s=self.tpot_objective_s,
            refuse_for_load=not self.tpot_objective_s,  # a refused request would not wait
        )
        shape = Shape(
            seed=self.seed,
            decodes=self.decodes,
            prefetch=self.prefetch,
            pool_blocks=8000,
            prefill_cache=500,
            token_budget=512,
            decode_cache=self.decode_cache,
            batch_buffer=self.batch_buffer,
            requests_buffer=self.requests_buffer,
            max_running=self.max_running,
            scheduler=scheduler,
        )
        return SmallCell(shape)

    def fill(self, load: Load) -> None:
        rng, tokens = load.rng, 4 * self.decode_cache
        for number, (kind, objectives_s) in enumerate(self.streams):
            name, at_s = f"{kind}-{number}", rng.choice([0.0, 0.1, 0.3])
            if kind == "matching":
                load.stream(name, 80 * self.decodes, 0.0055 / self.decodes, (10, 14), (14, 18), at_s, objectives_s)
            elif kind == "other":
                load.stream(name, 12, 0.02, (40, 60), (10, 30), at_s, objectives_s)
            elif kind == "burst":
                load.stream(name, 12 * self.decodes, 1e-4, (6, 60), (4, 30), at_s, objectives_s)
            elif kind == "holding":
                longest = min(300, tokens - 20)
                count = self.max_running * self.decodes
                load.stream(name, count, 0.001, (10, 14), (longest // 2, longest), at_s, objectives_s)
            elif kind == "alone":
                load.stream(name, 2, 0.15, (tokens - 20, tokens - 12), (4, 10), at_s, objectives_s)
            elif kind == "growing":
                load.stream(name, 6 * self.decodes, 0.02, (20, 30), (60, 80), at_s, objectives_s)


KINDS = ("matching", "other", "burst", "holding", "alone", "growing")
WORLDS = st.builds(
    World,
    seed=st.integers(0, 10_000),
    decodes=st.sampled_from((1, 2, 3)),
    prefetch=st.sampled_from((True, True, False)),
    decode_cache=st.sampled_from((32, 60, 300)),
    max_running=st.sampled_from((3, 6, 16)),
    batch_buffer=st.sampled_from((6, 24, 400)),
    requests_buffer=st.sampled_from((0, 6, 24, 400)),
    late_share=st.sampled_from((0.05, 0.05, 1.0)),
    streams=st.lists(st.tuples(st.sampled_from(KINDS), OBJECTIVES), min_size=1, max_size=4).map(tuple),
)


def run(world: World) -> tuple[SmallCell, Bound]:
    return run_in(world.cell(), world)


def run_in(cell: SmallCell, world: World) -> tuple[SmallCell, Bound]:
    world.fill(Load(cell, random.Random(world.seed)))
    cell.run()
    cell.check_nothing_is_left()
    return cell, Bound(cell)


# Each of these once broke the bound: an overdue request stood behind others with later deadlines that had been sent
# before it, or before a buffer that was full of another instance's candidates.
BROKEN = [
    World(23, 2, True, 32, 16, 24, 400, 0.05, (("other", MANY), ("other", (LONG,)), ("holding", (NONE,)))),
    World(153, 2, True, 32, 6, 400, 400, 1.0, (("holding", (SHORT,)), ("alone", MIXED), ("burst", MANY))),
    World(234, 2, True, 32, 16, 24, 400, 0.05, (("burst", (LONG,)), ("holding", MIXED), ("matching", (LONG,)))),
    World(1401, 3, True, 32, 16, 6, 400, 0.05, (("burst", (NONE, SHORT)), ("holding", (LONG,)))),
    World(2192, 2, True, 32, 6, 24, 400, 0.05, (("growing", (NONE,)), ("alone", MANY), ("other", MANY))),
]


@settings(machine_settings(20), phases=[Phase.generate])
@given(world=WORLDS)
def test_no_request_waits_past_the_bound_whatever_the_objectives(world: World) -> None:
    assert not run(world)[1].broken()


@pytest.mark.parametrize("world", BROKEN)
def test_no_request_waits_past_the_bound_where_some_did(world: World) -> None:
    assert not run(world)[1].broken()


@settings(machine_settings(10), phases=[Phase.generate])
@given(world=WORLDS, objectives_s=st.sampled_from(((SHORT,), (LONG,), MANY)))
def test_rounds_keep_objectives_to_the_same_bound(world: World, objectives_s: tuple[float, ...]) -> None:
    streams = tuple((kind, objectives_s) for kind, _ in world.streams)
    assert not run(replace(world, waiting_rule="rounds", streams=streams))[1].broken()


def observed(world: World, in_order_of_age: tuple[bool, ...] = (False,)) -> Turns | Stamps:
    """A run with ranges that move all the time, so that many requests move with them."""
    shares = "alignedserve.scheduler.core.length_shares"
    often, far = patch(f"{shares}.REFRESH_S", 0.02), patch(f"{shares}.GAIN", 0.3)
    with often, far, patch("alignedserve.scheduler.cost.cost_of_lengths.FEW", 1):
        cell = world.cell()
        observer = Stamps(cell) if world.waiting_rule == "paper" else Turns(cell, in_order_of_age)
        run_in(cell, world)
    return observer


ORDERS = ((False,), (True,), (False, True))  # of the rounds


@settings(machine_settings(6), phases=[Phase.generate])
@given(world=WORLDS, in_order_of_age=st.sampled_from(ORDERS))
def test_a_request_sees_one_turn_in_each_range(world: World, in_order_of_age: tuple[bool, ...]) -> None:
    assert not observed(replace(world, waiting_rule="rounds"), in_order_of_age).broken


@settings(machine_settings(4), phases=[Phase.generate])
@given(world=WORLDS)
def test_what_has_been_due_for_longest_is_in_the_next_batch(world: World) -> None:
    assert not observed(replace(world, waiting_rule="paper")).broken


CROWD = World(0, 2, True, 32, 6, 24, 24, 1.0, tuple((kind, (NONE,)) for kind in ("growing", "burst", "other", "burst")))


def test_requests_were_evicted_and_moved_and_saw_a_turn_in_either_range() -> None:
    """So that the bound is checked where it is reached: a request that moves may see a turn in each of its ranges."""
    seen: Counter[str] = Counter()
    for seed in range(4):
        observer = observed(replace(CROWD, waiting_rule="rounds", seed=seed), ORDERS[seed % 3])
        assert not observer.broken
        seen += observer.counts
    assert min(seen["turns"], seen["moves"], seen["evicted"], seen["waits for 1 turns"]) >= 20
    assert seen["waits for 2 turns"] >= 2


class SkewedCost:
    """An iteration takes 1 ms more than if all requests were as long as the longest."""

    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        return 1e-3 + len(lengths) * max(lengths, default=0) * 2e-5


@settings(machine_settings(10), phases=[Phase.generate])
@given(world=WORLDS, measured=st.booleans(), objective_s=st.sampled_from((0.0, 0.01)))
def test_no_request_waits_past_the_bound_where_a_cost_chooses_companions_of_the_overdue(
    world: World, measured: bool, objective_s: float
) -> None:
    cell = replace(world, policy="aligned-cost", tpot_objective_s=objective_s).cell()
    if measured:
        cell.core.policy.use_cost(SkewedCost())
    assert not run_in(cell, world)[1].broken()


def stores(cell: SmallCell, wait: Wait) -> set[str]:
    """Where a request was while it waited."""
    found = {"requests buffer, evicted" if wait.evicted else "pool"}
    for at_s, action in cell.log:
        if not isinstance(action, Prefetch) or not wait.since_s <= at_s <= wait.until_s:
            continue
        if any(key.request_id == wait.request_id for key in action.keys):
            found |= {"pool", "pool, evicted"} if wait.evicted else {"pool"}
            found |= {f"{action.buffer.name.lower()} buffer"} if action.prefill_id else set()
    return found


def test_overdue_requests_were_in_every_store() -> None:
    """So that the bound is checked in every store: counts the late waits by store."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        cell, bound = run(World(seed, 2, True, 60, 6, 24, 24, 0.05, tuple((kind, MIXED) for kind in KINDS)))
        assert not bound.broken()
        late = [wait for wait in bound.waits if wait.until_s >= bound.due_s(wait)]
        for wait in late:
            seen.update(stores(cell, wait))
    assert set(seen) == {"pool", "pool, evicted", "requests buffer, evicted", "batch buffer", "requests buffer"}
    assert min(seen.values()) >= 10
