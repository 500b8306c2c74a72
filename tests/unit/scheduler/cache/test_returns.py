"""How likely conversations go on follows what they do, and how long blocks stay cached."""

from __future__ import annotations

import math
import random

import pytest

from alignedserve.scheduler.cache.returns import (
    HORIZON,
    LEAST_CHANCE,
    LENGTH,
    STOP,
    TOOL_CALLS,
    UNKNOWN,
    ReturnTimes,
)


def lived(residence_s: float = math.inf, *, endings: int = 600) -> ReturnTimes:
    """Tools answer within seconds, people after about a minute if at all; the first answer is most often the last.

    `residence_s`: the mean time that blocks stay cached.
    """
    draw, times = random.Random(1), ReturnTimes()
    for _ in range(endings):
        for kind, turns, share, delay_s in ((TOOL_CALLS, 2, 0.97, 3.0), (STOP, 2, 0.7, 60.0), (STOP, 1, 0.1, 60.0)):
            times.ended(kind, turns)
            if draw.random() < share:
                times.returned(kind, turns, delay_s * draw.lognormvariate(0.0, 0.4))
    times.horizon_s = HORIZON * residence_s
    return times


def test_until_something_is_known_a_tool_call_is_expected_back_within_seconds() -> None:
    times = ReturnTimes()
    assert times.expected_s(TOOL_CALLS, 1) == pytest.approx(4.0, rel=0.5)
    assert times.chance(TOOL_CALLS, 1) > times.chance(STOP, 1) == times.chance(LENGTH, 2) > LEAST_CHANCE


@pytest.mark.parametrize(("residence_s", "person"), [(5.0, LEAST_CHANCE), (1000.0, 0.7)])
def test_what_comes_back_after_blocks_are_gone_does_not_count(residence_s: float, person: float) -> None:
    times = lived(residence_s)
    assert times.chance(TOOL_CALLS, 2) == pytest.approx(0.97, abs=0.05)
    assert times.chance(STOP, 2) == pytest.approx(person, abs=0.05)
    assert times.chance(STOP, 1) < 0.15
    assert times.expected_s(STOP, 2) == pytest.approx(60.0, rel=0.35)


def test_what_people_do_now_replaces_what_they_did() -> None:
    times = lived()
    for _ in range(3000):
        times.ended(STOP, 2)  # no conversation goes on any more
    assert times.chance(STOP, 2) == LEAST_CHANCE
    assert times.chance(TOOL_CALLS, 2) > 0.9


def test_the_time_that_blocks_stay_is_their_number_by_the_evictions_in_a_second() -> None:
    times = ReturnTimes()
    for second in range(1200):
        times.look(float(second), 20 * second, 1000)
        times.look(float(second), 20 * second, 1000)  # several requests end at once
    assert times.horizon_s == pytest.approx(HORIZON * 50.0, rel=0.05)
    for second in range(1200, 2400):
        times.look(float(second), 24_000, 1000)
    assert times.horizon_s > 1e6, "nothing is evicted any more"


def test_an_unknown_ending_counts_as_the_least_because_ranks_are_only_raised() -> None:
    times = lived(1000.0)
    assert times.chance(UNKNOWN, 2) == min(times.chance(kind, 2) for kind in (TOOL_CALLS, STOP, LENGTH))
    assert times.expected_s(UNKNOWN, 2) is None
