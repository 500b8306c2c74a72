"""The core's view of the pool: ahead of the reports by messages in flight, and corrected by the reports."""

import pytest

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.events import RequestMeta
from alignedserve.scheduler.core.pool_ledger import PoolLedger
from alignedserve.scheduler.core.request_table import LEGAL, RequestState, RequestTable

A, B = RequestKey("a"), RequestKey("b")


def make(capacity=100, free=100):
    ledger = PoolLedger()
    ledger.report("pool", capacity, free)
    return ledger


def test_reserved_blocks_become_committed_ones():
    ledger = make()
    ledger.reserve(A, 10)
    assert (ledger.reserved, ledger.committed, ledger.free) == (10, 0, 100)
    ledger.commit(A, 8)
    assert (ledger.reserved, ledger.committed, ledger.free) == (0, 8, 92)
    assert ledger.release(A)
    assert not ledger.release(A)
    assert ledger.free == 100
    ledger.check_integrity()


def test_a_report_adds_what_was_not_known_and_a_later_one_takes_it_back():
    ledger = make()
    ledger.commit(A, 10)
    ledger.report("pool", 100, 70)  # twenty more are used: shared blocks, or releases in flight
    assert ledger.free == 70
    ledger.report("pool", 100, 90)
    assert ledger.free == 90


@pytest.mark.parametrize("reserved", [True, False])
def test_a_commit_that_the_pool_reported_first_is_not_counted_twice(reserved):
    ledger = make()
    if reserved:
        ledger.reserve(A, 10)
    ledger.report("pool", 100, 90)
    ledger.commit(A, 10)
    assert ledger.free == 90


def test_clean_copies_are_dropped_oldest_first_and_no_more_than_needed():
    ledger = make()
    for name in "abcd":
        ledger.commit(RequestKey(name), 10)
    for name in "cab":
        ledger.mark_droppable(RequestKey(name))
    assert ledger.drop_copies(15) == [RequestKey("c"), A]
    assert ledger.committed_of(A) is None
    assert ledger.drop_copies(100) == [B]
    assert ledger.drop_copies(1) == []
    assert ledger.committed == 10


def test_blocks_of_clean_copies_are_counted_as_copies_become_clean_and_go():
    ledger = make()
    counted = []
    for name, blocks in ("a", 10), ("b", 7):
        ledger.commit(RequestKey(name), blocks)
    for change in (
        lambda: ledger.mark_droppable(A),
        lambda: ledger.mark_droppable(A),
        lambda: ledger.mark_droppable(B),
        lambda: ledger.pin(A),
        lambda: ledger.commit(B, 9),
        lambda: ledger.mark_droppable(B),
        lambda: ledger.leave(B),
        lambda: ledger.mark_droppable(A),
        lambda: ledger.drop_copies(1),
    ):
        change()
        ledger.check_integrity()
        counted.append(ledger.droppable_blocks)
    assert counted == [10, 10, 17, 7, 0, 9, 0, 10, 0]


def test_a_copy_that_was_written_again_is_not_droppable():
    ledger = make()
    ledger.commit(A, 10)
    ledger.mark_droppable(A)
    ledger.commit(A, 12)
    assert ledger.drop_copies(1) == []


def test_shards_add_up_and_a_lost_one_is_gone():
    ledger = make()
    ledger.report("pool-1", 50, 40)
    assert (ledger.capacity, ledger.free) == (150, 140)
    assert list(ledger.pool_ids) == ["pool", "pool-1"]
    ledger.lose("pool")
    assert ledger.capacity == 50


def test_only_legal_transitions_are_made():
    table = RequestTable()
    for state in RequestState:
        for target in RequestState:
            if target in LEGAL[state] or state is RequestState.ENDED:
                continue
            record = table.add(RequestMeta(A, 1, 2, "g", "gw"), 0.0)
            record.state = state
            table.counts[state] += 1
            with pytest.raises(AccountingError):
                table.move(record, target, 1.0)
            table.counts[state] -= 1
            record.state = RequestState.QUEUED
            table.move(record, RequestState.ENDED, 2.0)
    table.check_integrity()
    assert len(table) == 0


def test_a_record_says_when_it_entered_each_state():
    table = RequestTable()
    record = table.add(RequestMeta(A, 1, 2, "g", "gw"), 1.0)
    table.move(record, RequestState.PREFILLING, 2.0)
    table.move(record, RequestState.WAITING, 3.5)
    assert record.entered_s == {RequestState.QUEUED: 1.0, RequestState.PREFILLING: 2.0, RequestState.WAITING: 3.5}
    assert table.latest("a") == A
    with pytest.raises(AccountingError):
        table.add(RequestMeta(RequestKey("a", 1), 1, 2, "g", "gw"), 4.0)
