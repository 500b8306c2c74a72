"""Blocks are free, owned or cached; holders are counted; leases and quarantine keep the accounting balanced."""

import pytest

from alignedserve.errors import AccountingError, StaleError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator, BlockState

A, B = RequestKey("a"), RequestKey("b")


def test_allocation_takes_the_lowest_free_blocks_and_all_or_nothing():
    allocator = BlockAllocator(4, "store")
    assert allocator.allocate(3, A) == [0, 1, 2]
    assert allocator.allocate(2, B) is None
    assert allocator.allocate(0, B) == []
    assert (allocator.free_blocks, allocator.owned_blocks, allocator.cached_blocks) == (1, 3, 0)
    allocator.check_integrity()


def test_a_block_is_free_only_after_its_last_holder_released_it():
    allocator = BlockAllocator(4, "store")
    blocks = allocator.allocate(2, A)
    allocator.retain(blocks, B)
    assert allocator.holders(0) == (A, B)
    allocator.release(blocks, A)
    assert allocator.state(0) is BlockState.OWNED
    assert allocator.holders(0) == (B,)
    assert allocator.owned_blocks == 2
    assert allocator.release_all(B) == 2
    assert allocator.free_blocks == 4
    assert allocator.holders(0) == ()
    allocator.check_integrity()


def test_blocks_of_a_holder_come_in_the_order_in_which_they_were_taken():
    allocator = BlockAllocator(6, "store")
    allocator.allocate(1, B)
    allocator.allocate(1, A)
    allocator.release_all(B)
    allocator.allocate(2, A)
    assert allocator.blocks_of(A) == [1, 0, 2]


def test_misuse_raises_and_changes_nothing():
    allocator = BlockAllocator(4, "store")
    allocator.allocate(2, A)
    for misuse in (
        lambda: allocator.release([0], B),
        lambda: allocator.release([0, 3], A),
        lambda: allocator.retain([0], A),
        lambda: allocator.retain([0, 3], B),
        lambda: allocator.assign_leased([3], "writer", B),
        lambda: allocator.return_lease([3], "writer"),
    ):
        with pytest.raises(AccountingError):
            misuse()
        assert allocator.blocks_of(A) == [0, 1]
        assert allocator.blocks_of(B) == []
        allocator.check_integrity()


def test_leased_blocks_count_as_free_but_cannot_be_allocated():
    allocator = BlockAllocator(4, "store")
    leased = allocator.lease(3, "writer")
    assert allocator.free_blocks == 4
    assert allocator.available_blocks == 1
    assert allocator.allocate(2, A) is None
    assert allocator.lease(3, "other") == [3]
    allocator.assign_leased(leased[:2], "writer", A)
    assert allocator.owned_blocks == 2
    assert allocator.leased_to("writer") == leased[2:]
    allocator.return_lease(leased[2:], "writer")
    assert allocator.available_blocks == 1
    allocator.check_integrity()


def test_quarantined_leases_count_as_owned_until_the_writer_is_dead():
    allocator = BlockAllocator(4, "store")
    leased = allocator.lease(2, "writer")
    assert allocator.quarantine("writer") == 2
    assert allocator.owned_blocks == 2
    assert allocator.free_blocks == 2
    assert allocator.quarantine("writer") == 2  # idempotent
    with pytest.raises(StaleError):
        allocator.assign_leased(leased, "writer", A)
    assert allocator.lease(1, "writer") == []
    allocator.check_integrity()
    assert allocator.end_quarantine("writer") == 2
    assert allocator.end_quarantine("writer") == 0
    assert allocator.free_blocks == 4
    allocator.check_integrity()
