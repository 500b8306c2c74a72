"""Blocks are free, owned or cached; holders are counted; leases and quarantine keep the books balanced."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.errors import AccountingError, StaleError
from alignedserve.request import RequestKey
from alignedserve.scheduler.block_allocator import BlockAllocator, BlockState

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


class Books(RuleBasedStateMachine):
    """Random use against a model: which holder holds which blocks, which writer has which lease."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(12, "store")
        self.held: dict[str, set[int]] = {}
        self.leases: dict[str, set[int]] = {}
        self.quarantined: dict[str, set[int]] = {}

    holder = st.sampled_from("abcd")
    writer = st.sampled_from("wx")

    @rule(count=st.integers(0, 6), holder=holder)
    def allocate(self, count, holder):
        blocks = self.allocator.allocate(count, holder)
        if blocks is not None:
            self.held.setdefault(holder, set()).update(blocks)

    @rule(source=holder, holder=holder, count=st.integers(0, 4))
    def retain(self, source, holder, count):
        blocks = sorted(self.held.get(source, set()) - self.held.get(holder, set()))[:count]
        self.allocator.retain(blocks, holder)
        self.held.setdefault(holder, set()).update(blocks)

    @rule(holder=holder, count=st.integers(0, 4))
    def release(self, holder, count):
        blocks = sorted(self.held.get(holder, set()))[:count]
        if blocks:
            self.allocator.release(blocks, holder)
            self.held[holder] -= set(blocks)

    @rule(holder=holder)
    def release_all(self, holder):
        assert self.allocator.release_all(holder) == len(self.held.pop(holder, set()))

    @rule(writer=writer, count=st.integers(0, 4))
    def lease(self, writer, count):
        self.leases.setdefault(writer, set()).update(self.allocator.lease(count, writer))

    @rule(writer=writer, holder=holder, count=st.integers(0, 4))
    def assign(self, writer, holder, count):
        blocks = sorted(self.leases.get(writer, set()))[:count]
        if writer in self.quarantined:
            return
        self.allocator.assign_leased(blocks, writer, holder)
        self.leases.setdefault(writer, set()).difference_update(blocks)
        self.held.setdefault(holder, set()).update(blocks)

    @rule(writer=writer)
    def quarantine(self, writer):
        self.allocator.quarantine(writer)
        self.quarantined.setdefault(writer, self.leases.pop(writer, set()))

    @rule(writer=writer)
    def end_quarantine(self, writer):
        assert self.allocator.end_quarantine(writer) == len(self.quarantined.pop(writer, set()))

    @invariant()
    def it_adds_up(self):
        self.allocator.check_integrity()
        owned = set().union(*self.held.values(), *self.quarantined.values())
        assert self.allocator.owned_blocks == len(owned)
        assert self.allocator.free_blocks == 12 - len(owned)
        for holder, blocks in self.held.items():
            assert set(self.allocator.blocks_of(holder)) == blocks


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
