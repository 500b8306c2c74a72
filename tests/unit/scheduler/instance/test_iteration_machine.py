"""The iteration scheduler, of one cache or of ranks with a cache each, in any order of events."""

from __future__ import annotations

import pytest

from alignedserve.config import DecodeConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import BufferKind, Candidate
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from alignedserve.scheduler.ranks.group_scheduler import GroupScheduler
from alignedserve.scheduler.ranks.shared_pool import SharedPool
from support.iteration_machine import IterationMachine
from support.machines import machine_settings

TestIteration = IterationMachine.TestCase
TestIteration.settings = machine_settings(80, 50)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_machine_asks_after_each_step_notices_a_block_that_was_lost(ranks: int) -> None:
    books = BlockAllocator(8, "cache") if ranks == 1 else RangedAllocator(ranks, 8, "cache")
    if isinstance(books, RangedAllocator):
        scheduler: IterationScheduler = GroupScheduler(DecodeConfig(), books, 1, SharedPool(ranks))
    else:
        scheduler = IterationScheduler(DecodeConfig(), books, 1)
    key = RequestKey("0")
    scheduler.offer(Candidate(key, 2, 5, None, BufferKind.BATCH, 1), 0.0)
    (join,) = scheduler.plan(1.0).joins
    scheduler.check_integrity()
    books.release(list(join.block_ids)[:1], key)
    with pytest.raises(AccountingError, match="its blocks are not those in the allocator"):
        scheduler.check_integrity()
