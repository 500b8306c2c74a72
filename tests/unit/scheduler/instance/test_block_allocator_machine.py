"""The block allocator beside a model of plain sets: any order of calls, valid and invalid."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from alignedserve.errors import AccountingError, StaleError
from alignedserve.scheduler.instance.block_allocator import BlockAllocator, BlockState
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from support.machines import machine_settings

HOLDERS = st.sampled_from("abc")
WRITERS = st.sampled_from(("w", "x"))
COUNTS = st.integers(0, 6)
BLOCKS = st.lists(st.integers(0, 11), max_size=4)


class AllocatorMachine(RuleBasedStateMachine):
    """`held`: blocks by holder, in order; `leases` and `quarantine`: blocks by writer."""

    @initialize(capacity=st.integers(0, 12))
    def start(self, capacity: int) -> None:
        self.allocator = BlockAllocator(capacity, "store")
        self.capacity = capacity
        self.held: dict[str, list[int]] = {}
        self.leases: dict[str, set[int]] = {}
        self.quarantine: dict[str, set[int]] = {}

    def used(self) -> set[int]:
        places = [*self.held.values(), *self.leases.values(), *self.quarantine.values()]
        return {block for blocks in places for block in blocks}

    def free(self) -> set[int]:
        return set(range(self.capacity)) - self.used()

    @rule(count=COUNTS, holder=HOLDERS)
    def allocate(self, count: int, holder: str) -> None:
        free = self.free()
        found = self.allocator.allocate(count, holder)
        if count > len(free):
            assert found is None
            return
        assert found is not None
        assert len(found) == len(set(found)) == count
        assert free.issuperset(found)
        self.held.setdefault(holder, []).extend(found)

    @rule(blocks=BLOCKS, holder=HOLDERS, source=HOLDERS, right=st.booleans())
    def retain(self, blocks: list[int], holder: str, source: str, *, right: bool) -> None:
        """`right`: only blocks that the holder can share with the source."""
        owned = {block for held in self.held.values() for block in held}
        blocks = [block for block in blocks if block < self.capacity]
        if right:
            theirs = [block for block in self.held.get(source, ()) if block not in self.held.get(holder, ())]
            blocks = theirs[: len(blocks)]
        if (
            not owned.issuperset(blocks)
            or set(blocks) & set(self.held.get(holder, ()))
            or len(set(blocks)) < len(blocks)
        ):
            with pytest.raises(AccountingError):
                self.allocator.retain(blocks, holder)
            return
        self.allocator.retain(blocks, holder)
        self.held.setdefault(holder, []).extend(blocks)

    @rule(blocks=BLOCKS, holder=HOLDERS)
    def release(self, blocks: list[int], holder: str) -> None:
        if not set(self.held.get(holder, ())).issuperset(blocks) or len(set(blocks)) < len(blocks):
            with pytest.raises(AccountingError):
                self.allocator.release(blocks, holder)
            return
        self.allocator.release(blocks, holder)
        for block in blocks:
            self.held[holder].remove(block)

    @rule(holder=HOLDERS)
    def release_all(self, holder: str) -> None:
        assert self.allocator.release_all(holder) == len(self.held.pop(holder, ()))

    @rule(count=COUNTS, writer=WRITERS)
    def lease(self, count: int, writer: str) -> None:
        free = self.free()
        leased = self.allocator.lease(count, writer)
        assert free.issuperset(leased)
        assert len(set(leased)) == len(leased) == (0 if writer in self.quarantine else min(count, len(free)))
        self.leases.setdefault(writer, set()).update(leased)

    @rule(blocks=BLOCKS, writer=WRITERS, holder=HOLDERS, back=st.booleans(), right=st.booleans())
    def end_lease(self, blocks: list[int], writer: str, holder: str, *, back: bool, right: bool) -> None:
        """Assign leased blocks to a holder, or return them; `right`: only leased blocks."""
        leased = self.leases.get(writer, set())
        if right:
            blocks = sorted(leased)[: len(blocks)]
        if writer in self.quarantine or not leased.issuperset(blocks) or len(set(blocks)) < len(blocks):
            with pytest.raises(StaleError if writer in self.quarantine else AccountingError):
                self._end_lease(blocks, writer, holder, back=back)
            return
        self._end_lease(blocks, writer, holder, back=back)
        leased.difference_update(blocks)
        if not back:
            self.held.setdefault(holder, []).extend(blocks)

    def _end_lease(self, blocks: list[int], writer: str, holder: str, *, back: bool) -> None:
        if back:
            self.allocator.return_lease(blocks, writer)
        else:
            self.allocator.assign_leased(blocks, writer, holder)

    @rule(writer=WRITERS)
    def lose(self, writer: str) -> None:
        leased = self.leases.pop(writer, set())
        self.quarantine.setdefault(writer, leased)
        assert self.allocator.quarantine(writer) == len(self.quarantine[writer])

    @rule(writer=WRITERS)
    def bury(self, writer: str) -> None:
        assert self.allocator.end_quarantine(writer) == len(self.quarantine.pop(writer, ()))

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        allocator.check_integrity()
        leased = sum(map(len, self.leases.values()))
        assert allocator.leased_blocks == leased
        assert allocator.available_blocks == len(self.free())
        assert allocator.free_blocks == len(self.free()) + leased
        assert allocator.free_blocks + allocator.owned_blocks + allocator.cached_blocks == self.capacity
        for holder, blocks in self.held.items():
            assert allocator.blocks_of(holder) == blocks
        for writer in "wx":
            assert set(allocator.leased_to(writer)) == self.leases.get(writer, set())
        quarantined = {block for blocks in self.quarantine.values() for block in blocks}
        for block in range(self.capacity):
            holders = {holder for holder, blocks in self.held.items() if block in blocks}
            assert set(allocator.holders(block)) == holders
            assert allocator.holder_count(block) == len(holders)
            owned = bool(holders) or block in quarantined
            assert allocator.state(block) is (BlockState.OWNED if owned else BlockState.FREE)

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for holder in "abc":
            self.allocator.release_all(holder)
        for writer in "wx":
            self.allocator.quarantine(writer)
            self.allocator.end_quarantine(writer)
        self.allocator.check_integrity()
        assert self.allocator.available_blocks == self.capacity


class RangedMachine(AllocatorMachine):
    """An allocator with ranges: what is allocated in one is of it, and a block goes back to its own."""

    @initialize(ranges=st.integers(1, 4), each=st.integers(1, 3))
    def start(self, ranges: int, each: int) -> None:  # type: ignore[override]
        super().start(ranges * each)
        self.allocator = self.ranged = RangedAllocator(ranges, each, "store")
        self.ranges, self.each = ranges, each

    def free_in(self, number: int) -> set[int]:
        return {block for block in self.free() if block // self.each == number}

    @rule(count=COUNTS, holder=HOLDERS)
    def allocate(self, count: int, holder: str) -> None:
        most = max(len(self.free_in(number)) for number in range(self.ranges))
        found = self.allocator.allocate(count, holder)
        assert (found is None) == (count > most)
        self.held.setdefault(holder, []).extend(found or ())

    @rule(number=st.integers(0, 3), count=COUNTS, holder=HOLDERS)
    def allocate_in(self, number: int, count: int, holder: str) -> None:
        number, free = number % self.ranges, self.free_in(number % self.ranges)
        found = self.ranged.allocate_in(number, count, holder)
        assert (found is None) == (count > len(free))
        assert free.issuperset(found or ())
        self.held.setdefault(holder, []).extend(found or ())

    @rule(count=COUNTS, writer=WRITERS)
    def lease(self, count: int, writer: str) -> None:
        with pytest.raises(AccountingError, match="no blocks of a store in ranges are leased"):
            self.allocator.lease(count, writer)

    @invariant()
    def each_block_is_in_its_range(self) -> None:
        if hasattr(self, "ranged"):
            for number in range(self.ranges):
                assert self.ranged.available_in(number) == len(self.free_in(number))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = machine_settings(60, 40)
TestRanged = RangedMachine.TestCase
TestRanged.settings = machine_settings(60, 40)
