"""The quad-tree: counters, ranges, ages and time stamps, against a plain list."""

import sys
from bisect import bisect_right

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.quad_tree import Entry, QuadTree


def entry(name, tokens, since_s=0.0, block_size=4):
    return Entry(RequestKey(str(name)), tokens, -(-tokens // block_size), since_s)


def test_every_node_counts_the_requests_and_blocks_below_it():
    tree = QuadTree(64, 4)
    assert tree.depth == 2
    for name, tokens in ("a", 1), ("b", 4), ("c", 5), ("d", 64):
        tree.insert(entry(name, tokens))
    assert tree.requests == [[4], [3, 0, 0, 1], [2, 1, 0, 0] + [0] * 8 + [0, 0, 0, 1]]
    assert tree.blocks[1] == [1 + 1 + 2, 0, 0, 16]
    tree.remove(RequestKey("b"))
    assert tree.requests[2][0] == 1
    tree.check_integrity()


def test_lengths_beyond_the_range_count_as_its_end():
    tree = QuadTree(65536, 16)
    assert tree.depth == 6
    assert tree.leaf_of(1) == 0
    assert tree.leaf_of(0) == 0
    assert tree.leaf_of(65536) == tree.leaf_of(10**6) == 4095


def test_a_range_that_is_no_power_of_four_is_covered():
    tree = QuadTree(100, 3)
    tree.insert(entry("a", 100))
    tree.insert(entry("b", 1))
    assert list(tree.leaves_between(0, tree.leaf_of(100))) == [0, 33]
    tree.check_integrity()


def test_within_a_leaf_the_oldest_comes_first_also_after_a_late_return():
    tree = QuadTree(64, 16)
    for name, since_s in ("a", 1.0), ("b", 2.0), ("c", 3.0):
        tree.insert(entry(name, 10, since_s))
    tree.remove(RequestKey("a"))
    tree.insert(entry("late", 10, 1.5))
    tree.insert(entry("later", 10, 0.5))
    assert [e.key.request_id for e in tree.oldest(0)] == ["later", "late", "b", "c"]
    tree.remove(RequestKey("late"))
    tree.check_integrity()


def test_a_request_that_grew_moves_and_keeps_its_age():
    tree = QuadTree(64, 4)
    tree.insert(entry("a", 4, since_s=7.0))
    tree.move(RequestKey("a"), 40, 10)
    assert tree.entry(RequestKey("a")) == Entry(RequestKey("a"), 40, 10, 7.0)
    assert list(tree.leaves_between(0, 15)) == [9]


def test_a_batch_stamps_its_leaves_and_all_nodes_above():
    tree = QuadTree(64, 4)
    tree.stamp([tree.leaf_of(1), tree.leaf_of(20)], 5.0)
    assert tree.last_batch_s[0] == [5.0]
    assert tree.last_batch_s[1] == [5.0, 5.0, 0.0, 0.0]
    assert [i for i, stamp in enumerate(tree.last_batch_s[2]) if stamp] == [0, 4]


def test_misuse_raises():
    tree = QuadTree(64, 4)
    tree.insert(entry("a", 4))
    with pytest.raises(AccountingError):
        tree.insert(entry("a", 5))
    with pytest.raises(AccountingError):
        tree.remove(RequestKey("b"))


class TreeAgainstList(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tree = QuadTree(64, 2)
        self.entries = {}
        self.count = 0

    @rule(tokens=st.integers(1, 80), since_s=st.integers(0, 20))
    def insert(self, tokens, since_s):
        self.count += 1
        new = entry(self.count, tokens, float(since_s))
        self.tree.insert(new)
        self.entries[new.key] = new

    @rule(data=st.data())
    def remove(self, data):
        if self.entries:
            key = data.draw(st.sampled_from(sorted(self.entries)))
            assert self.tree.remove(key) == self.entries.pop(key)

    @rule(data=st.data(), tokens=st.integers(1, 80))
    def move(self, data, tokens):
        if self.entries:
            key = data.draw(st.sampled_from(sorted(self.entries)))
            self.tree.move(key, tokens, -(-tokens // 4))
            self.entries[key] = self.tree.entry(key)

    @rule(first=st.integers(0, 31), last=st.integers(0, 31))
    def leaves_between_are_those_with_entries(self, first, last):
        found = {self.tree.leaf_of(e.tokens) for e in self.entries.values()}
        assert list(self.tree.leaves_between(first, last)) == sorted(i for i in found if first <= i <= last)

    @rule(leaf=st.integers(0, 31), most=st.integers(0, 5), until_s=st.integers(0, 20))
    def a_part_of_a_leaf_is_its_oldest_entries(self, leaf, most, until_s):
        ages = sorted(e.since_s for e in self.entries.values() if self.tree.leaf_of(e.tokens) == leaf)
        assert [e.since_s for e in self.tree.oldest(leaf)] == ages
        assert [e.since_s for e in self.tree.take(leaf, most)] == ages[:most]
        old_enough = ages[: bisect_right(ages, until_s)]
        assert [e.since_s for e in self.tree.take(leaf, most, float(until_s))] == old_enough[:most]
        assert all(self.entries[e.key] is e for e in self.tree.oldest(leaf))

    @invariant()
    def it_counts_right(self):
        self.tree.check_integrity()
        assert len(self.tree) == len(self.entries)


TestTreeAgainstList = TreeAgainstList.TestCase
TestTreeAgainstList.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def bytes_of_leaf(tree):
    """Of the orders in a tree of one leaf, without the entries."""
    leaf = tree._leaves[0]
    assert leaf is not None
    return sum(map(sys.getsizeof, (*leaf._ages, *leaf._items)))


def tree_of_one_leaf(requests):
    tree = QuadTree(64, 64)
    for number in range(requests):
        tree.insert(Entry(RequestKey(str(number)), 5, 2, float(number)))
    return tree


def test_a_leaf_that_was_long_keeps_its_order_and_not_its_length():
    """Slots of removed entries are freed, so that reading the oldest skips only a few."""
    tree = tree_of_one_leaf(2000)
    for number in range(1990):
        tree.remove(RequestKey(str(number)))
        assert next(tree.oldest(0)).since_s == number + 1.0
    tree.insert(Entry(RequestKey("late"), 5, 2, 1994.5))
    assert [entry.since_s for entry in tree.oldest(0)] == [1990, 1991, 1992, 1993, 1994, 1994.5, *range(1995, 2000)]
    tree.check_integrity()
    assert bytes_of_leaf(tree) < sys.getsizeof(dict.fromkeys(range(200)))


def test_a_long_leaf_does_not_pass_over_all_that_has_left():
    tree = tree_of_one_leaf(40_000)
    full = bytes_of_leaf(tree)
    for number in range(19_500):
        tree.remove(RequestKey(str(number)))
    assert bytes_of_leaf(tree) < 0.55 * full
    assert next(tree.oldest(0)).since_s == 19_500.0
    tree.check_integrity()
