"""Batches out of a quad-tree that requests enter and leave, against a brute-force oracle: a list sorted by length."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchGenerator, BatchLimits
from alignedserve.scheduler.quad_tree import Entry, QuadTree

RANGE, LEAF, BLOCK = 256, 4, 4  # as in the product, the lengths of a leaf take the same number of blocks


class Oracle:
    """Keeps entries in a list sorted by length, and answers by looking at all of it."""

    def __init__(self):
        self.entries = []

    def sorted(self):
        return sorted(self.entries, key=lambda entry: min(entry.tokens, RANGE))

    def within(self, first, last):
        """Entries whose lengths, counted up to the range's end, are in `first .. last`."""
        return [entry for entry in self.entries if first <= min(entry.tokens, RANGE) <= last]

    def most_in_a_range_that_fits(self, limits):
        """Requests in the largest contiguous run of the sorted list that fits."""
        entries = self.sorted()
        best = 0
        for first in range(len(entries)):
            blocks = 0
            for count, entry in enumerate(entries[first:], 1):
                blocks += entry.blocks
                if blocks > limits.max_blocks or count > limits.max_requests:
                    break
                best = max(best, count)
        return best

    def densest_path_ends(self, limits):
        """(first, last) lengths where the way down through the densest children ends; None where equals are dense."""
        first, last = 1, RANGE
        while last - first + 1 > LEAF:
            inside = self.within(first, last)
            if sum(entry.blocks for entry in inside) <= limits.max_blocks and len(inside) <= limits.max_requests:
                return first, last
            width = (last - first + 1) // 4
            quarters = [(first + i * width, first + (i + 1) * width - 1) for i in range(4)]
            counts = [len(self.within(*quarter)) for quarter in quarters]
            if counts.count(max(counts)) > 1:
                return None
            first, last = quarters[counts.index(max(counts))]
        return first, last


def check_batch(oracle, limits, batch):
    keys = {entry.key for entry in batch}
    assert len(keys) == len(batch) <= limits.max_requests
    assert sum(entry.blocks for entry in batch) <= limits.max_blocks or len(batch) == 1
    leaves = sorted({(min(entry.tokens, RANGE) - 1) // LEAF for entry in batch})
    for before, after in pairwise(leaves):  # one contiguous range of lengths: nobody between is left out
        assert not oracle.within((before + 1) * LEAF + 1, after * LEAF)
    for leaf in leaves[1:-1]:
        assert {entry.key for entry in oracle.within(leaf * LEAF + 1, (leaf + 1) * LEAF)} <= keys
    if len(batch) < limits.min_requests:
        assert len(batch) >= oracle.most_in_a_range_that_fits(limits)
        return
    end = oracle.densest_path_ends(limits)
    if end is None:
        return
    inside = {entry.key for entry in oracle.within(*end)}
    reached = len(inside) >= limits.min_requests and sum(e.blocks for e in oracle.within(*end)) <= limits.max_blocks
    if reached and len(inside) <= limits.max_requests:
        assert keys == inside  # case 1
    elif end[1] - end[0] + 1 == LEAF and len(keys & inside) >= limits.min_requests:
        assert keys <= inside or inside <= keys  # a leaf over the limit is cut


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, RANGE + 40)),
        st.tuples(st.just("many"), st.integers(1, RANGE)),
        st.tuples(st.just("go"), st.integers(0, 200)),
        st.tuples(st.just("grow"), st.integers(0, 200)),
        st.tuples(st.just("batch"), st.integers(0, 0)),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    max_blocks=st.integers(1, 400),
    min_requests=st.integers(1, 20),
    max_requests=st.integers(1, 40),
    cut_sibling=st.booleans(),
)
def test_batches_keep_their_promises_whatever_comes_and_goes(
    steps, max_blocks, min_requests, max_requests, cut_sibling
):
    tree, oracle = QuadTree(RANGE, LEAF), Oracle()
    generator = BatchGenerator(tree, cut_sibling)
    limits = BatchLimits(max_blocks, min(min_requests, max_requests), max_requests)
    count = 0
    for what, value in [*steps, ("batch", 0), ("batch", 0)]:
        if what in ("come", "many"):
            for tokens in [value] if what == "come" else range(value, value + 12, 2):
                count += 1
                entry = Entry(RequestKey(str(count)), tokens, -(-tokens // BLOCK), float(count))
                tree.insert(entry)
                oracle.entries.append(entry)
        elif what == "batch":
            batch = generator.generate(limits)
            assert bool(batch) == bool(oracle.entries)
            check_batch(oracle, limits, batch)
            tree.stamp(batch, float(count))
            for entry in batch:
                tree.remove(entry.key)
                oracle.entries.remove(entry)
        elif oracle.entries:
            entry = oracle.entries.pop(value % len(oracle.entries))
            if what == "go":
                tree.remove(entry.key)
            else:
                tree.move(entry.key, entry.tokens + 9, -(-(entry.tokens + 9) // BLOCK))
                oracle.entries.append(tree.entry(entry.key))
        tree.check_integrity()
