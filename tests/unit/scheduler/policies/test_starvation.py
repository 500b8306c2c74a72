"""No request waits past the bound, whatever starves it (paper, section 3.5, and the promise of ADR 24).

The bound of a wait: its objective, the time to make room, and the service time of older overdue requests. The test
computes it for each wait of each request from the events of a cell in virtual time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from alignedserve.config import SchedulerConfig
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.actions import MarkUrgent
from alignedserve.scheduler.deadlines import Deadlines
from support.machines import machine_settings
from support.small_cell import Bound, Load, Shape, SmallCell, Stamps, Turns

DEFAULT_S = 0.5


def make_cell(
    seed: int,
    *,
    decodes: int = 1,
    prefetch: bool = True,
    after_s: float = DEFAULT_S,
    late_share: float = 1.0,
    rule: str = "overdue",
    **sizes: int,
) -> SmallCell:
    scheduler = SchedulerConfig(
        max_prefix_tokens=256,
        min_batch_requests=4,
        leaf_tokens=4,
        waiting_rule=rule,
        starvation_after_s=after_s,
        late_share=late_share,
    )
    sizes = {"pool_blocks": 4000, "batch_buffer": 40, "requests_buffer": 40, "max_running": 6, **sizes}
    return SmallCell(Shape(seed=seed, decodes=decodes, prefetch=prefetch, scheduler=scheduler, **sizes))


def dense_short_ones_and_one_long(load: Load) -> None:
    load.stream("short", 200, 0.0055, (10, 14), (14, 18))
    load.one("long", 0.3, 60, 10)


def late_joins_while_a_candidate_batch_waits(load: Load) -> None:
    """A batch of another length is prefetched, while requests that match the running batch never stop coming."""
    load.stream("running", 6, 0.001, (10, 12), (30, 40))
    load.stream("batch", 4, 0.001, (40, 44), (10, 20), at_s=0.1)
    load.stream("matching", 200, 0.0055, (10, 14), (14, 18), at_s=0.1)


def evicted_ones_among_newcomers(load: Load) -> None:
    """They grow until the cache is full and the longest is evicted. Short requests would take its place for ever."""
    load.stream("growing", 6, 0.02, (20, 30), (60, 80))
    load.stream("short", 150, 0.008, (6, 10), (8, 16), at_s=0.1)


def one_in_a_subtree_that_yields_batches(load: Load) -> None:
    """In the same quarter of the lengths as all others, but in leaves that no batch takes."""
    load.stream("dense", 200, 0.0055, (49, 52), (6, 10))
    load.one("old", 0.3, 63, 10)


def long_answers_that_hold_the_room(load: Load) -> None:
    """No request ends for a second, so only an eviction makes room."""
    shape = load.cell.shape
    load.stream("running", shape.decodes * shape.max_running, 0.001, (10, 14), (350, 400))
    load.one("first", 0.2, 60, 10)
    load.one("second", 0.4, 40, 10)


def more_than_can_be_served(load: Load) -> None:
    load.stream("short", 120, 0.003, (10, 14), (14, 40))
    load.stream("long", 10, 0.03, (45, 60), (10, 40), at_s=0.05)


LOADS = [
    long_answers_that_hold_the_room,
    dense_short_ones_and_one_long,
    late_joins_while_a_candidate_batch_waits,
    evicted_ones_among_newcomers,
    one_in_a_subtree_that_yields_batches,
    more_than_can_be_served,
]


@pytest.mark.parametrize("load", LOADS)
@settings(machine_settings(5), phases=[Phase.generate])
@given(
    seed=st.integers(0, 10_000),
    decodes=st.sampled_from((1, 1, 2)),
    prefetch=st.booleans(),
    decode_cache=st.sampled_from((40, 60)),
    requests_buffer=st.sampled_from((0, 12, 40)),
    max_running=st.sampled_from((4, 6, 16)),
)
def test_no_request_waits_past_the_bound(
    load: Callable[[Load], None], seed: int, decodes: int, prefetch: bool, **sizes: int
) -> None:
    if load is long_answers_that_hold_the_room:
        sizes |= {"decode_cache": 10 * sizes["decode_cache"], "prefill_cache": 120, "max_running": 4}
    cell = make_cell(seed, decodes=decodes, prefetch=prefetch, **sizes)
    load(Load(cell, random.Random(seed)))
    cell.run()
    cell.check_nothing_is_left()
    bound = Bound(cell)
    assert {wait.request_id for wait in bound.waits} == set(cell.requests)
    assert not bound.broken()


@pytest.mark.parametrize("rule", ["rounds", "paper"])
@pytest.mark.parametrize("load", LOADS)
@settings(machine_settings(2), phases=[Phase.generate])
@given(seed=st.integers(0, 10_000), decodes=st.sampled_from((1, 2)), prefetch=st.booleans())
def test_the_other_rules_bound_waits_in_turns_and_batches(
    load: Callable[[Load], None], rule: str, seed: int, decodes: int, prefetch: bool
) -> None:
    cell = make_cell(seed, decodes=decodes, prefetch=prefetch, rule=rule, decode_cache=400, prefill_cache=120)
    load(Load(cell, random.Random(seed)))
    observer = Turns(cell) if rule == "rounds" else Stamps(cell)
    cell.run()
    cell.check_nothing_is_left()
    assert not observer.broken
    assert not [action for _, action in cell.log if isinstance(action, MarkUrgent)], "the rule itself bounds waits"


@pytest.mark.parametrize("rule", ["overdue", "rounds", "paper"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_an_overdue_request_does_not_wait_for_the_candidate_batch_of_others(prefetch: bool, rule: str) -> None:
    sizes = {"decode_cache": 800, "pool_blocks": 8000, "prefill_cache": 400, "batch_buffer": 240, "max_running": 4}
    cell = make_cell(1, prefetch=prefetch, after_s=5.0, rule=rule, **sizes)
    load = Load(cell, random.Random(1))
    for number in range(4):
        load.one(f"running-{number}", 0.0, 12, 600)
        load.one(f"next-{number}", 0.1, 200, 20)
    load.one("old", 0.5, 400, 10).wait_objective_s = 0.1
    cell.run()
    assert not Bound(cell).broken()


def test_an_evicted_request_goes_by_its_own_objective() -> None:
    sizes = {"decode_cache": 100, "prefill_cache": 100, "requests_buffer": 400, "batch_buffer": 100, "max_running": 4}
    cell = make_cell(3, after_s=5.0, **sizes)
    load = Load(cell, random.Random(3))
    load.one("evicted", 0.0, 150, 100).wait_objective_s = 0.1
    load.one("other", 0.0, 140, 240)
    cell.run()
    assert not Bound(cell).broken()


def late_share_of(cell: SmallCell, since_s: float) -> float:
    """The share of waits past their objective, among those that began after `since_s`."""
    bound = Bound(cell)
    waits = [wait for wait in bound.waits if wait.since_s > since_s]
    return sum(wait.until_s >= bound.due_s(wait) for wait in waits) / len(waits)


@pytest.mark.parametrize("seed", range(3))
def test_the_late_share_stays_under_late_share_where_capacity_allows(seed: int) -> None:
    """One request in nine has a short objective, and a length that no batch has. All others can wait for long."""
    shares = []
    for late_share in (1.0, 0.05):
        cell = make_cell(seed, after_s=5.0, late_share=late_share)
        load = Load(cell, random.Random(seed))
        load.stream("short", 500, 0.008, (10, 14), (14, 18))
        for number in range(66):
            load.one(f"hurried-{number}", 0.3 + 0.06 * number, 60, 10).wait_objective_s = 0.1
        cell.run()
        assert not [wait for wait in Bound(cell).waits if wait.until_s - wait.since_s >= 5.0]
        shares.append(late_share_of(cell, 1.33))
    fixed, adjusted = shares
    assert fixed > 0.1  # so that only the adjustment keeps the share
    assert adjusted <= 0.05


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, 0.0, 1.0, 2.5, 7.0, math.inf])), max_size=300))
def test_deadlines_come_in_their_order_whatever_was_set_and_discarded(steps: list[tuple[int, float | None]]) -> None:
    deadlines, known = Deadlines(), dict[RequestKey, float]()
    for number, due_s in steps:
        key = RequestKey(str(number))
        if due_s is None:
            deadlines.discard(key)
            known.pop(key, None)
        else:
            deadlines.set(key, due_s)
            known[key] = due_s
        assert deadlines.next_s() == min(known.values(), default=math.inf)
    for now_s in (0.5, 2.5, 100.0):
        late = sorted((due_s, key) for key, due_s in known.items() if due_s <= now_s)
        assert deadlines.pop_due(now_s) == late
        known = {key: due_s for key, due_s in known.items() if due_s > now_s}
        assert set(deadlines) == set(known)
