"""The order of age, whose chunks split and merge, against a plain list."""

import math
import time
from bisect import bisect_right

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alignedserve.request import RequestKey
from alignedserve.scheduler import age_order
from alignedserve.scheduler.age_order import AgeOrder

AGES = st.integers(0, 9).map(float)


def key(number):
    return RequestKey(str(number))


class AgesAgainstList(RuleBasedStateMachine):
    """With chunks of four, so that a few items fill several."""

    def __init__(self):
        super().__init__()
        self.full, age_order.CHUNK = age_order.CHUNK, 4
        self.order = AgeOrder()
        self.places = []  # (since_s, key), oldest first; of equals, the one added first
        self.count = 0

    def teardown(self):
        age_order.CHUNK = self.full

    def add_one(self, since_s):
        self.count += 1
        self.places.insert(bisect_right(self.places, since_s, key=lambda place: place[0]), (since_s, key(self.count)))
        self.order.add(key(self.count), since_s)

    @rule(since_s=AGES)
    def add(self, since_s):
        self.add_one(since_s)

    @rule(later_s=st.integers(0, 2), count=st.integers(1, 12))
    def add_in_order(self, later_s, count):
        for _ in range(count):
            self.add_one(self.places[-1][0] + later_s if self.places else 0.0)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def remove(self, data):
        since_s, old = self.places.pop(data.draw(st.integers(0, len(self.places) - 1)))
        self.order.remove(RequestKey(old.request_id), since_s)  # an equal key, not the same

    @precondition(lambda self: self.places)
    @rule(count=st.integers(1, 12), newest=st.booleans())
    def remove_at_an_end(self, count, newest):
        for _ in range(min(count, len(self.places))):
            since_s, old = self.places.pop(-1 if newest else 0)
            self.order.remove(old, since_s)

    @rule(most=st.integers(0, 12), until_s=st.one_of(AGES, st.just(math.inf)))
    def the_oldest_are_the_first_ones(self, most, until_s):
        expected = [old for since_s, old in self.places if since_s <= until_s][:most]
        assert self.order.oldest(most, until_s) == expected

    @invariant()
    def it_is_in_order(self):
        assert list(self.order) == [old for _, old in self.places]
        assert len(self.order) == len(self.places)
        assert bool(self.order) == bool(self.places)
        assert self.order.first() == (self.places[0] if self.places else None)

    @invariant()
    def its_chunks_are_neither_empty_nor_too_long(self):
        sizes = [len(items) for items in self.order._items]
        assert sizes == [0] or 0 < min(sizes) <= max(sizes) <= 2 * age_order.CHUNK


TestAgesAgainstList = AgesAgainstList.TestCase
TestAgesAgainstList.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_one_of_many_equally_old_ones_is_removed_whichever_chunk_holds_it():
    order = AgeOrder()
    for number in range(5000):
        order.add(key(number), 1.0)
    for number in range(4999, 0, -3):
        order.remove(key(number), 1.0)
    assert list(order) == [key(number) for number in range(5000) if number % 3 != 1]


def test_an_item_that_is_not_there_raises():
    order = AgeOrder()
    order.add(key(1), 1.0)
    for since_s in 0.5, 1.0, 1.5:
        with pytest.raises(IndexError):
            order.remove(key(2), since_s)
    assert list(order) == [key(1)]


def seconds_of(order):
    """The time of a hundred reads of the first entry; the fastest of some runs."""
    found = []
    for _ in range(7):
        begun_s = time.thread_time()
        for _ in range(100):
            order.first()
        found.append(time.thread_time() - begun_s)
    return min(found)


def test_the_first_in_an_order_is_found_at_once_whatever_has_left_before_it():
    """The scheduler asks at each event, and the requests that arrive first leave first."""
    order = AgeOrder()
    for number in range(200_000):
        order.add(RequestKey(str(number)), float(number))
    at_first_s = seconds_of(order)
    for number in range(90_000):
        order.remove(RequestKey(str(number)), float(number))
    assert order.first() == (90_000.0, RequestKey("90000"))
    assert seconds_of(order) < 20 * at_first_s
