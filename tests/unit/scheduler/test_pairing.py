"""Which prefill instances prefetch for which decode instance, compared with trying every way."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduler.core.pairing import pair_up

RANKS = 4


def by_index(prefill: int, decode: int) -> list[tuple[str, str]]:
    return [(f"decode-{i % decode}", f"prefill-{i % prefill}") for i in range(max(prefill, decode))]


def balanced_ways(many: int, few: int) -> list[tuple[int, ...]]:
    """Every way to assign one of `few` to each of `many` such that the counts differ by at most one."""
    most, least = -(-many // few), many // few
    ways = product(range(few), repeat=many)
    return [way for way in ways if all(least <= way.count(j) <= most for j in range(few))]


Ranks = dict[tuple[str, str], int]


@st.composite
def cells(draw: st.DrawFn) -> tuple[int, int, Ranks]:
    prefill, decode = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    pairs = [(f"decode-{d}", f"prefill-{p}") for d in range(decode) for p in range(prefill)]
    return prefill, decode, {pair: draw(st.integers(0, RANKS - 1)) for pair in pairs}


@given(cells())
def test_no_balanced_way_to_pair_has_fewer_of_the_worst_links(
    cell: tuple[int, int, dict[tuple[str, str], int]],
) -> None:
    prefill, decode, ranks = cell
    pairs = pair_up(prefill, decode, lambda decode_id, prefill_id: ranks[decode_id, prefill_id])
    many, few = max(prefill, decode), min(prefill, decode)
    assert len(set(pairs)) == len(pairs) == many
    for side, count in (0, decode), (1, prefill):
        shares = Counter(pair[side] for pair in pairs)
        assert len(shares) == count
        assert max(shares.values()) - min(shares.values()) <= 1

    def worst_first(ranks_of_pairs: list[int]) -> list[int]:
        return [ranks_of_pairs.count(rank) for rank in reversed(range(RANKS))]

    def tried(way: tuple[int, ...]) -> list[int]:
        numbered = [(j, i) if prefill >= decode else (i, j) for i, j in enumerate(way)]
        return worst_first([ranks[f"decode-{d}", f"prefill-{p}"] for d, p in numbered])

    best = min(tried(way) for way in balanced_ways(many, few))
    assert worst_first([ranks[pair] for pair in pairs]) == best
    if worst_first([ranks[pair] for pair in by_index(prefill, decode)]) == best:
        assert pairs == by_index(prefill, decode)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, RANKS - 1))
def test_where_all_links_are_alike_pairs_go_by_index(prefill: int, decode: int, rank: int) -> None:
    assert pair_up(prefill, decode, lambda decode_id, prefill_id: rank) == by_index(prefill, decode)


def test_two_instances_on_two_nodes_are_paired_on_their_own() -> None:
    far = {("decode-0", "prefill-0"), ("decode-1", "prefill-1")}
    pairs = pair_up(2, 2, lambda *pair: 3 if pair in far else 0)
    assert pairs == [("decode-1", "prefill-0"), ("decode-0", "prefill-1")]


def test_a_cell_of_hundreds_of_instances_on_two_nodes_is_paired_within_its_nodes() -> None:
    def rank(decode_id: str, prefill_id: str) -> int:
        return 3 * ((int(decode_id.partition("-")[2]) < 50) != (int(prefill_id.partition("-")[2]) % 2 == 0))

    pairs = pair_up(200, 100, rank)
    assert not any(rank(*pair) for pair in pairs)
