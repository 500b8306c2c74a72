"""The iteration scheduler of a decode instance, with the books of its cache: of one cache, or of one for each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from alignedserve.config import Config
from alignedserve.decode_worker.rank_placer import Placer, RankOfBlocks, RankPlacer
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.pace import LearningPace
from alignedserve.scheduler.instance.ranged_allocator import RangedAllocator
from alignedserve.scheduler.ranks.base import Placement
from alignedserve.scheduler.ranks.group_scheduler import GroupScheduler
from alignedserve.scheduler.ranks.names import placement_class
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.ranged import RangedStore


def books_of(store: BlockStore) -> BlockAllocator:
    """The books of a decode cache, in which all blocks are free."""
    if isinstance(store, RangedStore):
        return RangedAllocator(len(store.ranges), store.each, store.store_id)
    return BlockAllocator(store.capacity_blocks, store.store_id)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`placer`: gives running requests to ranks that share experts; None: there are none."""

    scheduler: IterationScheduler
    placer: Placer | None

    @classmethod
    def configured(cls, config: Config, books: BlockAllocator, block_size: int, cost: StepCost | None) -> Scheduling:
        """Of a decode instance. `cost`: the configured cost model, if any."""
        pace, ranks = LearningPace.configured(config), config.degrees("decode").experts
        if isinstance(books, RangedAllocator):
            placement = _placement(config, ranks, cost)
            scheduler = GroupScheduler.of_ranks(config, books, block_size, placement, pace)
            return cls(scheduler, RankOfBlocks(books.each))
        # Until the scheduler says after what time requests without a wait objective are overdue, none is.
        one = IterationScheduler.configured(config, books, block_size, math.inf, pace)
        return cls(one, None if ranks == 1 else RankPlacer(_placement(config, ranks, cost)))


def _placement(config: Config, ranks: int, cost: StepCost | None) -> Placement:
    placement = placement_class(config.decode.placement)(ranks)
    if cost is not None:
        placement.use_cost(cost)
    return placement
