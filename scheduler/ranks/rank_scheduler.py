"""The iteration scheduler of one rank: a request joins in the plan in which it is placed, and may leave for another."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from alignedserve.config import Config
from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.iteration import IterationScheduler
from alignedserve.scheduler.instance.plan import Evict
from alignedserve.scheduler.instance.running_batch import RunningRequest
from alignedserve.scheduler.ranks.base import Rank


@dataclass(slots=True)
class Holdings:
    """`next_block[i]`: how many running requests take their next block with the i-th iteration from here."""

    running: int
    size: int  # with those that are being copied in
    available_blocks: int
    block_size: int
    tokens: int = 0
    longest: int = 0
    shortest: int = 0
    next_block: Counter[int] = field(default_factory=Counter)

    def taken_blocks(self, iterations: int) -> int:
        """Blocks that running requests take within `iterations`."""
        size = self.block_size
        return sum(count * (1 + (iterations - at) // size) for at, count in self.next_block.items() if at <= iterations)


class RankScheduler(IterationScheduler):
    """Candidates are offered only when they fit, so none waits here and none becomes overdue.

    A preempted request always goes to the pool.
    """

    def __init__(self, config: Config, allocator: BlockAllocator, block_size: int) -> None:
        window = config.scheduler.join_window
        super().__init__(config.decode, allocator, block_size, starvation_after_s=math.inf, join_window=window)

    def holdings(self) -> Holdings:
        """What the rank holds now, from which its counters after further iterations follow."""
        batch, size = self._batch, self._batch.block_size
        found = Holdings(len(batch.running), batch.size, self._allocator.available_blocks, size)
        if lengths := [member.kv_tokens for member in batch.present()]:
            found.tokens, found.longest, found.shortest = sum(lengths), max(lengths), min(lengths)
        running = batch.running.values()
        found.next_block = Counter([len(member.block_ids) * size - member.kv_tokens for member in running])
        return found

    def count(self, rank: Rank, held: Holdings, iterations: int) -> None:
        """Set the rank's counters as they are `iterations` quiet iterations after `held`.

        `room_blocks` is at most what a plan accepts: each request may take `growth_blocks` before the next join. An
        empty rank keeps nothing: its first request may be as large as the cache.
        """
        kept = (held.size + 1) * self.growth_blocks + self._config.watermark_blocks if held.size else 0
        rank.requests = held.size
        rank.slots = self._max_running - held.size
        rank.room_blocks = held.available_blocks - held.taken_blocks(iterations) - kept
        rank.tokens = held.tokens + iterations * held.running
        rank.longest = held.longest + iterations
        rank.shortest = held.shortest + iterations

    @property
    def growth_blocks(self) -> int:
        """The most that a request can take within `join_iterations`, and one for the watermark."""
        return -(-self._config.join_iterations // self._batch.block_size) + 1

    def running(self) -> list[RunningRequest]:
        return list(self._batch.running.values())

    def move_out(self, key: RequestKey, now_s: float) -> Evict:
        """The running request leaves for another rank. Its blocks stay owned until `copied_out` or `copy_failed`."""
        member = self._batch.running[key]
        leaving = self._evict(member, now_s)
        self._evictions -= 1
        return leaving
