"""Lengths in cells and their division into ranges of equal cost."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduler.length_ranges import cell_of, divide, first_tokens

TOKENS = st.integers(0, 1 << 24)
COSTS = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60)


@given(tokens=TOKENS)
def test_a_cell_holds_its_length_and_is_narrow(tokens: int) -> None:
    cell = cell_of(tokens)
    first, after = first_tokens(cell), first_tokens(cell + 1)
    assert first <= tokens < after
    assert after - first <= max(1, first / 32)


@given(tokens=TOKENS, more=st.integers(0, 1000))
def test_a_longer_length_has_no_earlier_cell(tokens: int, more: int) -> None:
    assert cell_of(tokens) <= cell_of(tokens + more)


@given(costs=COSTS, parts=st.integers(1, 9))
def test_ranges_cover_all_cells_and_their_costs_differ_by_no_more_than_a_cell(costs: list[float], parts: int) -> None:
    firsts = divide(costs, parts)
    edges = [0, *firsts, len(costs)]
    assert len(firsts) == parts - 1
    assert edges == sorted(edges)
    sums = list(accumulate(costs, initial=0.0))
    shares = [sums[end] - sums[begin] for begin, end in pairwise(edges)]
    assert sum(shares) == pytest.approx(sums[-1])
    for share in shares:
        assert abs(share - sums[-1] / parts) <= max(costs) * (1 + 1e-9) + 1e-6


def test_ranges_of_unequal_costs() -> None:
    assert divide([1.0] * 12, 3) == [4, 8]
    assert divide([6.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [1]
    assert divide([0.0, 9.0, 0.0], 3) == [1, 2]
