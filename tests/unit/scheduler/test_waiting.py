"""Waits are counted for each request, in whatever store it waits; late joins have a window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.waiting import WaitingClock
from alignedserve.scheduler.length_ranges import join_range

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


def test_no_request_waits_twice():
    clock = WaitingClock(1.0)
    clock.start(A, 0.0)
    with pytest.raises(AccountingError):
        clock.start(A, 0.0)


def test_the_join_window_is_a_share_of_the_running_lengths():
    assert join_range(100, 200, 0.25) == (75, 251)
    assert join_range(100, 200, 0.0) == (100, 201)


def test_a_request_with_an_objective_of_its_own_is_overdue_by_that_and_the_first_due_goes_first():
    clock = WaitingClock(10.0)
    clock.start(A, 0.0)
    clock.start(B, 6.0, objective_s=2.0)
    assert clock.newly_overdue(8.0) == [B]
    assert clock.newly_overdue(10.0) == [A]
    assert clock.oldest_overdue_in_pool() == B
    clock.start(C, 1.0, objective_s=2.0)
    clock.newly_overdue(10.0)
    assert clock.oldest_overdue_in_pool() == C  # due at 3 s, long ago
    clock.check_integrity()


def serve_when_overdue(late_share, service_s, requests=2000):
    """Each request is served `service_s` seconds after it was found overdue. Others are never overdue."""
    clock = WaitingClock(5.0, late_share)
    late = 0
    for number in range(requests):
        key, other = RequestKey(f"lonely-{number}"), RequestKey(f"other-{number}")
        clock.start(key, 100.0 * number)
        clock.start(other, 100.0 * number)
        clock.decode(other, 100.0 * number)
        after_s = 5.0 * clock.threshold_share
        assert clock.newly_overdue(100.0 * number + after_s) == [key]
        clock.start(other, 100.0 * number + after_s)  # not all that waits is overdue
        clock.decode(key, 100.0 * number + after_s + service_s)
        clock.stop(other)
        late += number >= requests // 2 and after_s + service_s >= 5.0
    clock.check_integrity()
    return late / requests, clock


def test_the_threshold_comes_forward_until_no_more_are_late_than_may_be():
    """Half of the requests are served only when overdue: at the full threshold, each of those is late."""
    share, clock = serve_when_overdue(late_share=0.05, service_s=1.0)
    assert share <= 0.05
    assert 0.25 <= clock.threshold_share <= 0.85
    assert serve_when_overdue(late_share=1.0, service_s=1.0)[0] == 0.5


def test_the_threshold_is_shortened_by_no_more_than_what_late_requests_still_waited():
    """Late requests lacked one second of five, so priority from four fifths of the objective is enough."""
    clock = serve_when_overdue(late_share=0.0, service_s=1.0)[1]
    assert clock.delay_share == pytest.approx(0.2, abs=0.01)
    assert 0.97 * 0.8 <= clock.threshold_share <= 0.81


def test_the_threshold_is_not_shortened_where_priority_would_save_no_request():
    """They wait four more seconds once they are overdue: even a quarter of the objective would be too long."""
    share, clock = serve_when_overdue(late_share=0.05, service_s=4.0)
    assert share == 0.5
    assert clock.threshold_share == 1.0


def test_the_threshold_is_not_shortened_while_most_of_what_waits_is_overdue():
    clock = WaitingClock(1.0, late_share=0.05)
    for number in range(200):
        clock.start(RequestKey(str(number)), 0.0)
    clock.newly_overdue(100.0)
    for number in range(200):
        clock.decode(RequestKey(str(number)), 100.0 + number)
    assert clock.late > 0.9
    assert clock.threshold_share == 1.0


@given(st.floats(0.01, 86_400.0))
def test_an_objective_counts_to_two_digits_and_never_as_more_than_it_is(objective_s):
    clock = WaitingClock(1e9)
    clock.start(A, 0.0, objective_s)
    assert clock.newly_overdue(0.9 * objective_s) == []
    assert clock.newly_overdue(objective_s) == [A]


def test_many_objectives_are_looked_through_a_hundred_times_a_second_not_in_each_event():
    clock = WaitingClock(5.0)
    keys = {objective: RequestKey(f"{objective}") for objective in range(1, 100)}
    for objective, key in keys.items():
        clock.start(key, 0.0, float(objective))
    assert clock.newly_overdue(1.5) == [keys[1]]
    assert clock.newly_overdue(1.505) == []
    clock.start(A, 0.0, 1.2)  # overdue as soon as it comes
    assert clock.newly_overdue(1.509) == []
    assert clock.newly_overdue(1.511) == [A]
    assert clock.newly_overdue(50.0) == [keys[objective] for objective in range(2, 51)]
    assert clock.oldest_overdue_in_pool() == keys[1]
    clock.check_integrity()
