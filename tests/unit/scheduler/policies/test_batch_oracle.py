"""Batches from a quad-tree that requests enter and leave, against a brute-force oracle: a list sorted by length."""

import random
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.request import RequestKey
from alignedserve.scheduler.batch_generator import BatchGenerator, BatchLimits
from alignedserve.scheduler.quad_tree import Entry, QuadTree

RANGE, LEAF, BLOCK = 256, 4, 4  # as in the product, all lengths of a leaf take the same number of blocks


class Oracle:
    """Keeps entries in a list sorted by length, and scans all of it for each answer."""

    def __init__(self):
        self.entries = []
        self.yielded = []  # (number of the batch, length)

    def sorted(self):
        return sorted(self.entries, key=lambda entry: min(entry.tokens, RANGE))

    def within(self, first, last):
        """Entries with lengths in `first .. last`; longer ones count as the range's end."""
        return [entry for entry in self.entries if first <= min(entry.tokens, RANGE) <= last]

    def most_in_a_range_that_fits(self, limits):
        """The number of requests in the largest contiguous run of the sorted list that fits."""
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
        """(first, last) lengths where the descent to the densest children ends; None if two are equally dense."""
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
    for before, after in pairwise(leaves):  # one contiguous range of prefix lengths without gaps
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
            tree.stamp({tree.leaf_of(entry.tokens) for entry in batch}, float(count))
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


class Search:
    """Algorithm 1 exactly as in the paper, on ranges of a list; records the case in which it ended.

    Of equally dense ranges, the one that has not yielded a batch for the longest time is taken, then the shorter one.
    """

    def __init__(self, oracle, limits, cut_sibling, width, leaf):
        self.oracle, self.limits, self.cut_sibling, self.leaf = oracle, limits, cut_sibling, leaf
        self.width = width  # lengths that the root stands for
        self.cases = []

    def inside(self, first, last):
        """Oldest first."""
        found = [e for e in self.oracle.entries if first <= min(e.tokens, self.width) <= last]
        return sorted(found, key=lambda entry: entry.since_s)

    def fits(self, entries):
        blocks = sum(entry.blocks for entry in entries)
        return blocks <= self.limits.max_blocks and len(entries) <= self.limits.max_requests

    def cut(self, batch, entries):
        """Add `entries` to the batch up to the first that does not fit. A single entry may be larger."""
        for entry in entries:
            if batch and not self.fits([*batch, entry]):
                break
            batch = [*batch, entry]
        return batch

    def parts(self, first, last):
        """Leaves of a range, from left to right."""
        return [(at, at + self.leaf - 1) for at in range(first, last + 1, self.leaf)]

    def add_leaves(self, batch, leaves):
        for leaf in leaves:
            inside = self.inside(*leaf)
            if len(batch) >= self.limits.min_requests:
                break
            if not self.fits(batch + inside):
                return self.cut(batch, inside)
            batch = batch + inside
        return batch

    def batch(self):
        first, last = 1, self.width
        while not self.fits(self.inside(first, last)):
            self.cases.append(2)
            if last - first + 1 == self.leaf:
                self.cases.append("leaf")
                return self.or_shortest(self.cut([], self.inside(first, last)))
            quarter = (last - first + 1) // 4
            children = [(first + i * quarter, first + (i + 1) * quarter - 1) for i in range(4)]
            first, last = max(children, key=lambda child: (len(self.inside(*child)), -self.stamp(*child), -child[0]))
        batch, quarter = self.inside(first, last), last - first + 1
        if len(batch) >= self.limits.min_requests or quarter == self.width:
            self.cases.append(1)
            return self.or_shortest(batch)
        number = (first - 1) // quarter
        begin = number - number % 4
        for name, siblings in ("left", range(number - 1, begin - 1, -1)), ("right", range(number + 1, begin + 4)):
            for sibling in siblings:
                if len(batch) >= self.limits.min_requests:
                    break
                ends = sibling * quarter + 1, (sibling + 1) * quarter
                inside = self.inside(*ends)
                if inside:
                    self.cases.append(name)
                if not self.fits(batch + inside):
                    leaves = self.parts(*ends)
                    if self.cut_sibling:
                        self.cases.append(f"{name}, cut")
                        batch = self.add_leaves(batch, reversed(leaves) if name == "left" else leaves)
                    break
                batch = batch + inside
        return self.or_shortest(batch)

    def or_shortest(self, batch):
        """If N is not reached: the shortest requests, if they are more."""
        if len(batch) >= self.limits.min_requests or len(batch) == len(self.oracle.entries):
            return batch
        shortest = self.add_leaves([], self.parts(1, self.width))
        if len(shortest) < self.limits.min_requests:  # the shortest of the cut leaf, if they are more
            of_age = {entry.key: at for at, entry in enumerate(sorted(self.oracle.entries, key=lambda e: e.since_s))}
            by_length = self.cut([], sorted(self.oracle.entries, key=lambda e: (e.tokens, of_age[e.key])))
            shortest = max(shortest, by_length, key=len)
        if len(shortest) > len(batch):
            self.cases.append("shortest")
            return shortest
        return batch

    def stamp(self, first, last):
        return max((number for number, tokens in self.oracle.yielded if first <= tokens <= last), default=0)


def come_and_go(lengths, limits, cut_sibling, width, leaf, block, leave):
    """Compare each batch with the search in the list until nothing is left. Returns the cases that occurred."""
    tree, oracle, cases = QuadTree(width, leaf), Oracle(), set()
    generator = BatchGenerator(tree, cut_sibling)
    for number, tokens in enumerate(lengths):
        entry = Entry(RequestKey(str(number)), tokens, -(-tokens // block), float(number))
        tree.insert(entry)
        oracle.entries.append(entry)
    for number in range(1, 2 * len(lengths) + 2):
        search = Search(oracle, limits, cut_sibling, width, leaf)
        expected = search.batch()
        batch = generator.generate(limits)
        assert {entry.key for entry in batch} == {entry.key for entry in expected}
        assert [entry.since_s for entry in batch] == sorted(entry.since_s for entry in batch)
        cases.update(search.cases)
        tree.stamp({tree.leaf_of(entry.tokens) for entry in batch}, float(number))
        oracle.yielded += [(number, min(entry.tokens, width)) for entry in batch]
        for entry in batch[:: 1 if leave else 2]:  # the others stay, as if there were no room for them
            tree.remove(entry.key)
            oracle.entries.remove(entry)
        tree.check_integrity()
    assert not oracle.entries
    return cases


LIMITS = {
    "max_blocks": st.integers(1, 300),
    "min_requests": st.integers(1, 12),
    "max_requests": st.integers(1, 40),
    "cut_sibling": st.booleans(),
    "leave": st.booleans(),
}
LENGTHS = st.lists(st.one_of(st.integers(1, 300), st.integers(60, 90), st.sampled_from((1, 255, 256, 257, 10**6))))


@settings(max_examples=300, deadline=None)
@given(lengths=LENGTHS, **LIMITS)
def test_every_batch_is_that_of_the_search_in_a_sorted_list(
    lengths, max_blocks, min_requests, max_requests, cut_sibling, leave
):
    limits = BatchLimits(max_blocks, min(min_requests, max_requests), max_requests)
    come_and_go(lengths, limits, cut_sibling, RANGE, LEAF, BLOCK, leave)


@settings(max_examples=300, deadline=None)
@given(lengths=LENGTHS, leaf=st.sampled_from((4, 16, 64)), block=st.sampled_from((1, 2, 4, 16)), **LIMITS)
def test_blocks_smaller_than_leaves_lose_no_batch(
    lengths, leaf, block, max_blocks, min_requests, max_requests, cut_sibling, leave
):
    """Requests of one leaf then differ in size: more of the shortest fit than of the oldest."""
    limits = BatchLimits(max_blocks, min(min_requests, max_requests), max_requests)
    come_and_go(lengths, limits, cut_sibling, 256, leaf, block, leave)


def test_ten_short_requests_are_found_behind_older_long_ones():
    tree = QuadTree(64, 16)
    for number, tokens in enumerate([16, 16, 16, *[2] * 10]):
        tree.insert(Entry(RequestKey(str(number)), tokens, -(-tokens // 4), float(number)))
    batch = BatchGenerator(tree, cut_sibling=True).generate(BatchLimits(13, 10, 40))
    assert [entry.tokens for entry in batch] == [2] * 10


def test_all_cases_of_the_search_and_both_sweeps_are_met():
    """In similar random lists, so that the comparison covers each case."""
    rng, met = random.Random(1), Counter()
    for _ in range(150):
        lengths = [rng.choice((rng.randint(1, 300), rng.randint(60, 90), 256, 257)) for _ in range(rng.randint(1, 30))]
        enough = rng.randint(1, 12)
        limits = BatchLimits(rng.randint(1, 300), enough, rng.randint(enough, 40))
        met.update(come_and_go(lengths, limits, rng.random() < 0.5, RANGE, LEAF, BLOCK, leave=True))
    assert set(met) == {1, 2, "left", "right", "left, cut", "right, cut", "leaf", "shortest"}
    assert min(met.values()) >= 5


EDGES = st.lists(st.one_of(st.sampled_from((1, 2, 16, 17, 65520, 65521, 65535, 65536, 65537, 200_000))), max_size=12)


@settings(max_examples=40, deadline=None)
@given(lengths=EDGES, max_blocks=st.sampled_from((1, 2, 4096, 5000, 20_000)), min_requests=st.integers(1, 6))
def test_lengths_at_the_ends_of_the_range_and_beyond_it(lengths, max_blocks, min_requests):
    """With the product's range, leaves and blocks. Lengths beyond the range count as its end."""
    limits = BatchLimits(max_blocks, min_requests, 40)
    come_and_go(lengths, limits, cut_sibling=True, width=65536, leaf=16, block=16, leave=True)
