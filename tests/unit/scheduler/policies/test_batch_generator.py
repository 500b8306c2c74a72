"""Algorithm 1: its three cases, and our choices where the paper leaves them open."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchGenerator, BatchLimits
from alignedserve.scheduler.quad_tree import Entry, QuadTree


def generate(lengths, max_blocks, min_requests, max_requests=10**6, cut_sibling=True, seed=None, stamp=()):
    """Lengths of the batch from requests 0, 1, ..., whose numbers are their ages; one token is a block."""
    tree = QuadTree(64, 4)  # leaves of four lengths; the root has four children of sixteen lengths
    for i, tokens in enumerate(lengths):
        tree.insert(Entry(RequestKey(str(i)), tokens, tokens, float(i)))
    for index, at_s in stamp:
        tree.last_batch_s[1][index] = at_s
    generator = BatchGenerator(tree, cut_sibling)
    key = None if seed is None else RequestKey(str(seed))
    batch = generator.generate(BatchLimits(max_blocks, min_requests, max_requests), key)
    assert [entry.since_s for entry in batch] == sorted(entry.since_s for entry in batch)
    return [entry.tokens for entry in batch]


def test_an_empty_tree_has_no_batch():
    assert generate([], 10, 1) == []


def test_case_1_a_tree_that_fits_and_is_enough_is_the_batch():
    assert generate([3, 60, 20], max_blocks=100, min_requests=3) == [3, 60, 20]


def test_case_2_the_search_goes_to_the_child_with_the_most_requests():
    lengths = [1, 2, 20, 21, 22, 40, 60]
    assert generate(lengths, max_blocks=100, min_requests=3) == [20, 21, 22]


def test_case_2_of_equal_children_the_one_that_has_waited_longest_for_a_batch_is_taken():
    lengths = [20, 21, 40, 41]
    assert generate(lengths, 90, 2, stamp=[(1, 9.0), (2, 3.0)]) == [40, 41]
    assert generate(lengths, 90, 2, stamp=[(1, 3.0), (2, 9.0)]) == [20, 21]


def test_case_3_left_siblings_come_first_from_right_to_left():
    lengths = [17, 21, 25, 25, 29, 60]  # leaves 4, 5, 6, 7 under one parent; the densest is 6
    assert generate(lengths, max_blocks=100, min_requests=3) == [21, 25, 25]
    assert generate(lengths, max_blocks=100, min_requests=4) == [17, 21, 25, 25]


def test_case_3_then_right_siblings_from_left_to_right():
    lengths = [17, 17, 21, 25, 29, 60]  # the densest leaf is the leftmost
    assert generate(lengths, max_blocks=80, min_requests=4) == [17, 17, 21, 25]


@pytest.mark.parametrize(("cut_sibling", "batch"), [(True, [23, 25, 25, 26]), (False, [25, 25, 26, 29])])
def test_a_sibling_that_does_not_fit_is_taken_in_part_or_not_at_all(cut_sibling, batch):
    lengths = [23, 21, 25, 25, 26, 29, 60]  # 76 blocks leave 29 free, and the leaf with 23 and 21 needs 44
    assert generate(lengths, max_blocks=105, min_requests=4, cut_sibling=cut_sibling) == batch


def test_where_both_cannot_hold_the_block_limit_wins_with_the_largest_range_that_fits():
    lengths = [40, 40, 41, 20, 21]
    assert generate(lengths, max_blocks=85, min_requests=4) == [40, 20, 21]  # more than in the densest leaf
    assert generate([*lengths, 1, 3, 6], max_blocks=60, min_requests=4) == [20, 21, 1, 3, 6]


def test_a_range_elsewhere_that_is_enough_is_found_where_the_densest_is_not():
    lengths = [50, 50, 50, 50, 2, 6, 10]
    assert generate(lengths, max_blocks=120, min_requests=3) == [2, 6, 10]


def test_a_leaf_over_the_limit_is_cut_oldest_first():
    assert generate([20, 17, 18, 19, 20], max_blocks=40, min_requests=1) == [20, 17]


def test_a_request_larger_than_the_limit_is_a_batch_alone():
    assert generate([50, 49], max_blocks=10, min_requests=4) == [50]


def test_at_most_as_many_as_an_instance_can_run():
    assert generate([5, 5, 5, 5, 40], max_blocks=1000, min_requests=1, max_requests=3) == [5, 5, 5]


def test_a_tree_with_fewer_than_enough_is_taken_whole():
    assert generate([3, 60], max_blocks=100, min_requests=36) == [3, 60]


def test_an_overdue_request_takes_its_neighbours_with_it():
    lengths = [60, 20, 20, 20, 20, 61, 58]
    assert generate(lengths, max_blocks=130, min_requests=2, seed=0) == [60, 58]
    assert generate(lengths, max_blocks=60, min_requests=2, seed=0) == [60]
    assert generate(lengths, max_blocks=1000, min_requests=7, seed=0) == lengths


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=40),
    max_blocks=st.integers(1, 300),
    min_requests=st.integers(1, 12),
    max_requests=st.integers(1, 40),
    cut_sibling=st.booleans(),
    seed=st.integers(0, 39) | st.none(),
)
def test_every_batch_keeps_its_promises(lengths, max_blocks, min_requests, max_requests, cut_sibling, seed):
    if seed is not None:
        oldest = {}  # a seed is the oldest overdue request, so the oldest of its leaf
        for i, tokens in enumerate(lengths):
            oldest.setdefault((min(tokens, 64) - 1) // 4, i)
        seed = oldest[(min(lengths[seed % len(lengths)], 64) - 1) // 4]
    batch = generate(lengths, max_blocks, min_requests, max_requests, cut_sibling, seed)
    assert batch
    assert len(batch) <= max_requests
    assert sum(batch) <= max_blocks or len(batch) == 1
    assert seed is None or lengths[seed] in batch
    in_leaf = {}
    for tokens in lengths:
        in_leaf.setdefault((min(tokens, 64) - 1) // 4, []).append(tokens)
    taken = sorted({(min(tokens, 64) - 1) // 4 for tokens in batch})
    for leaf, inside in in_leaf.items():  # contiguous: no leaf between its ends is left out or cut
        if taken[0] < leaf < taken[-1]:
            assert all(tokens in batch for tokens in inside)
    if seed is None and len(batch) < min_requests:
        leaves = sorted(in_leaf)
        for i in range(len(leaves)):
            for j in range(i, len(leaves)):
                inside = [tokens for leaf in leaves[i : j + 1] for tokens in in_leaf[leaf]]
                fits = sum(inside) <= max_blocks and len(inside) <= max_requests
                assert not fits or len(inside) <= len(batch)
