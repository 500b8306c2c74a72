"""The allocator of a store with a prefix cache beside a model of plain sets: any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from alignedserve.errors import AccountingError, StaleError
from alignedserve.scheduler.instance.block_allocator import BlockState
from alignedserve.scheduler.instance.caching_allocator import CachingAllocator
from support.machines import machine_settings

HOLDERS = st.sampled_from("abc")
WRITERS = st.sampled_from("wx")
COUNTS = st.integers(0, 6)
SEEDS = st.integers(0, 11)


class FirstIndexed:
    """Gives up the cached block with the lowest number first."""

    def __init__(self, capacity: int) -> None:
        self.indexed = bytearray(capacity)
        self.evicted: list[int] = []

    def evict(self, count: int, cached: bytearray) -> list[int]:
        found = [block for block, flag in enumerate(cached) if flag][:count]
        for block in found:
            self.indexed[block] = 0
        self.evicted += found
        return found


class CachingMachine(RuleBasedStateMachine):
    """`held`: blocks by holder, `leases` and `lost`: blocks by writer, `cached`: blocks that are kept."""

    @initialize(capacity=st.integers(0, 12))
    def start(self, capacity: int) -> None:
        self.index = FirstIndexed(capacity)
        self.allocator = CachingAllocator(capacity, "store", self.index)
        self.capacity = capacity
        self.held: dict[str, set[int]] = {}
        self.leases: dict[str, set[int]] = {}
        self.lost: dict[str, set[int]] = {}
        self.cached: set[int] = set()

    def owned(self) -> set[int]:
        return set().union(*self.held.values(), *self.lost.values())

    def free(self) -> set[int]:
        return set(range(self.capacity)) - self.owned() - self.cached - set().union(*self.leases.values())

    def given(self, blocks: list[int], free: set[int]) -> None:
        """Blocks were handed out: free ones, and cached ones only if no free one was left."""
        assert len(set(blocks)) == len(blocks)
        taken = set(blocks) - free
        assert taken == set(self.index.evicted)
        assert taken <= self.cached
        assert not taken or free <= set(blocks)
        self.cached -= taken
        self.index.evicted.clear()

    @rule(count=COUNTS, holder=HOLDERS, one=st.booleans())
    def allocate(self, count: int, holder: str, *, one: bool) -> None:
        free = self.free()
        if one:
            block = self.allocator.allocate_one(holder)
            found = None if block is None else [block]
            count = 1
        else:
            found = self.allocator.allocate(count, holder)
        assert (found is None) == (count > len(free) + len(self.cached))
        if found is not None:
            assert len(found) == count
            self.given(found, free)
            self.held.setdefault(holder, set()).update(found)

    @rule(count=COUNTS, writer=WRITERS)
    def lease(self, count: int, writer: str) -> None:
        free = self.free()
        leased = self.allocator.lease(count, writer)
        assert len(leased) == (0 if writer in self.lost else min(count, len(free) + len(self.cached)))
        self.given(leased, free)
        self.leases.setdefault(writer, set()).update(leased)

    @rule(seed=SEEDS)
    def index_a_held_block(self, seed: int) -> None:
        held = sorted(set().union(*self.held.values()))
        if held:
            self.index.indexed[held[seed % len(held)]] = 1

    @rule(count=COUNTS, holder=HOLDERS, wrong=st.none() | SEEDS)
    def retain(self, count: int, holder: str, wrong: int | None) -> None:
        mine = self.held.get(holder, set())
        blocks = [*sorted(self.cached)[:count], *sorted(set().union(*self.held.values()) - mine)[:count]]
        if wrong is not None and wrong < self.capacity:
            blocks.append(wrong)
        sharable = self.cached | (set().union(*self.held.values()) - mine)
        if not sharable.issuperset(blocks) or len(set(blocks)) < len(blocks):
            with pytest.raises(AccountingError):
                self.allocator.retain(blocks, holder)
            return
        self.allocator.retain(blocks, holder)
        self.cached -= set(blocks)
        self.held.setdefault(holder, set()).update(blocks)

    def let_go(self, blocks: set[int]) -> None:
        self.cached |= {block for block in blocks - self.owned() if self.index.indexed[block]}

    @rule(count=COUNTS, holder=HOLDERS)
    def release(self, count: int, holder: str) -> None:
        blocks = set(sorted(self.held.get(holder, ()))[:count])
        self.allocator.release(blocks, holder)
        self.held.setdefault(holder, set()).difference_update(blocks)
        self.let_go(blocks)

    @rule(holder=HOLDERS)
    def release_all(self, holder: str) -> None:
        blocks = self.held.pop(holder, set())
        assert self.allocator.release_all(holder) == len(blocks)
        self.let_go(blocks)

    @rule(count=COUNTS, writer=WRITERS, to=st.sampled_from(("held", "back", "cached")))
    def end_lease(self, count: int, writer: str, to: str) -> None:
        blocks = sorted(self.leases.get(writer, ()))[:count]
        if writer in self.lost:
            with pytest.raises(StaleError):
                self.allocator.cache_leased(blocks, writer)
            return
        if to == "held":
            self.allocator.assign_leased(blocks, writer, "a")
            self.held.setdefault("a", set()).update(blocks)
        elif to == "back":
            self.allocator.return_lease(blocks, writer)
        else:
            self.allocator.cache_leased(blocks, writer)
            self.cached.update(blocks)
            for block in blocks:
                self.index.indexed[block] = 1
        self.leases.setdefault(writer, set()).difference_update(blocks)

    @rule(count=COUNTS)
    def uncache(self, count: int) -> None:
        blocks = sorted(self.cached)[:count]
        for block in blocks:
            self.index.indexed[block] = 0
        self.allocator.uncache(blocks)
        self.cached.difference_update(blocks)
        if blocks:
            with pytest.raises(AccountingError, match="not all cached"):
                self.allocator.uncache(blocks)

    @rule(writer=WRITERS)
    def lose(self, writer: str) -> None:
        self.lost.setdefault(writer, self.leases.pop(writer, set()))
        self.allocator.quarantine(writer)

    @rule(writer=WRITERS)
    def bury(self, writer: str) -> None:
        self.allocator.end_quarantine(writer)
        self.lost.pop(writer, None)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        allocator.check_integrity()
        leased = set().union(*self.leases.values())
        assert (allocator.cached_blocks, allocator.owned_blocks) == (len(self.cached), len(self.owned()))
        assert allocator.free_blocks == len(self.free()) + len(leased)
        assert allocator.free_blocks + allocator.owned_blocks + allocator.cached_blocks == self.capacity
        assert allocator.available_blocks == len(self.free()) + len(self.cached)
        for block in range(self.capacity):
            expected = BlockState.OWNED if block in self.owned() else BlockState.FREE
            assert allocator.state(block) is (BlockState.CACHED if block in self.cached else expected)


TestCachingAllocator = CachingMachine.TestCase
TestCachingAllocator.settings = machine_settings(25, 40)
