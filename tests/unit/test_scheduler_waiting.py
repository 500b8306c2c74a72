"""Starvation is counted for each request, in whatever store it waits; late joins have a window."""

import pytest

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.waiting import WaitingClock, join_range

A, B, C = (RequestKey(name) for name in "abc")


def test_requests_become_overdue_oldest_first_and_once():
    clock = WaitingClock(5.0)
    clock.start(B, 2.0)
    clock.start(A, 1.0)
    clock.start(C, 3.0)
    assert clock.newly_overdue(5.9) == []
    assert clock.newly_overdue(7.0) == [A, B]
    assert clock.newly_overdue(7.5) == []
    assert clock.is_overdue(A)
    assert not clock.is_overdue(C)
    clock.check_integrity()


def test_the_oldest_overdue_request_in_the_pool_goes_first():
    clock = WaitingClock(1.0)
    for since_s, key in enumerate((A, B, C)):
        clock.start(key, float(since_s))
    clock.newly_overdue(10.0)
    assert clock.oldest_overdue_in_pool() == A
    clock.leave_pool(A)
    assert clock.oldest_overdue_in_pool() == B
    clock.stop(B)
    assert clock.oldest_overdue_in_pool() == C
    assert clock.is_overdue(A)
    clock.check_integrity()


def test_a_prefetched_request_becomes_overdue_where_it_is():
    clock = WaitingClock(1.0)
    clock.start(A, 0.0)
    clock.leave_pool(A)
    assert clock.newly_overdue(2.0) == [A]
    assert clock.oldest_overdue_in_pool() is None
    clock.check_integrity()


def test_a_request_that_was_given_back_has_waited_all_the_while():
    clock = WaitingClock(5.0)
    clock.start(A, 1.0)
    clock.start(B, 4.0)
    clock.leave_pool(A)
    clock.start(C, 5.0)
    since_s = clock.stop(A)
    clock.start(A, since_s)
    assert clock.newly_overdue(6.0) == [A]
    clock.check_integrity()


def test_nobody_waits_twice():
    clock = WaitingClock(1.0)
    clock.start(A, 0.0)
    with pytest.raises(AccountingError):
        clock.start(A, 0.0)


def test_the_join_window_is_a_share_of_the_running_lengths():
    assert join_range(100, 200, 0.25) == (75, 251)
    assert join_range(100, 200, 0.0) == (100, 201)
