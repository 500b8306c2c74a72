"""A standing lease: blocks at hand without a call, and how a broken link affects them."""

from __future__ import annotations

from alignedserve.kv_pool.lease import StandingLease


def lease_of(count: int) -> StandingLease:
    lease = StandingLease(count)
    assert lease.ask() == count
    lease.granted(range(count))
    return lease


def test_it_asks_for_its_standing_blocks_once() -> None:
    lease = StandingLease(10)
    assert lease.ask() == 10
    assert lease.ask() == 0
    lease.granted(range(4))
    assert lease.ask() == 0
    assert lease.free_blocks == 4


def test_it_asks_for_more_below_the_watermark_only() -> None:
    lease = lease_of(10)
    lease.take(5)
    assert lease.ask() == 0
    lease.take(1)
    assert lease.ask() == 6


def test_blocks_for_a_waiting_caller_are_requested_at_once() -> None:
    lease = lease_of(10)
    assert lease.take(12) is None
    assert lease.ask(demand=12) == 12
    lease.granted(range(10, 22))
    assert lease.take(12) == list(range(12))


def test_given_blocks_are_at_hand_again_and_committed_ones_are_not() -> None:
    lease = lease_of(4)
    taken = lease.take(3)
    assert taken == [0, 1, 2]
    lease.committed([0, 1])
    lease.give([0, 1, 2])
    assert lease.free_blocks == 2
    assert lease.taken_blocks == 0
    lease.give([2])  # a second time
    assert lease.free_blocks == 2


def test_everything_at_hand_can_be_given_up_for_others() -> None:
    lease = lease_of(4)
    taken = lease.take(1)
    lease.granted([7, 8])

    given = lease.give_up()

    assert taken is not None
    assert taken[0] not in given
    assert {7, 8} <= set(given)
    assert lease.free_blocks == 0


def test_a_broken_link_voids_what_is_at_hand() -> None:
    lease = lease_of(4)
    lease.broke()
    assert lease.take(1) is None
    assert lease.ask() == 4


def test_a_block_taken_before_the_link_broke_returns_only_after_both_its_copy_and_its_grant() -> None:
    lease = lease_of(4)
    lease.take(2)
    lease.broke()
    lease.ask()
    lease.granted([0, 1, 2, 3])  # the lender confirms what it had leased
    assert lease.free_blocks == 2  # a copy may still be writing to 0 and 1
    lease.give([0])
    assert sorted(lease.take(3) or []) == [0, 2, 3]

    lease = lease_of(4)
    lease.take(2)
    lease.broke()
    lease.give([0])  # its copy ended while the link was down
    assert lease.free_blocks == 0
    lease.ask()
    lease.granted([0, 1, 2, 3])
    assert lease.free_blocks == 3
