"""One decode rank: its cache, its requests, and the times of its next iterations."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from alignedserve.request import RequestKey
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.instance.block_allocator import BlockAllocator
from alignedserve.scheduler.instance.plan import IterationPlan
from alignedserve.scheduler.ranks.base import Rank, Ready
from alignedserve.scheduler.ranks.rank_scheduler import Holdings, RankScheduler

if TYPE_CHECKING:
    from alignedserve.simulator.ranks.cell import RankCell

MOST_LEAP = 64  # iterations from one plan to the next


class SimulatedRank:
    """Iterations are counted by the instance; `settled`: those that the scheduler knows of."""

    def __init__(self, cell: RankCell, name: str, number: int, cost: StepCost, leaps: bool) -> None:
        self.name = name
        self.cache = BlockAllocator(cell.sizes.decode_cache, f"{name}/cache")
        self.scheduler = RankScheduler(cell.config, self.cache, cell.block_size)
        self.from_pool, self.to_pool = cell.pool_link(), cell.pool_link()
        self.from_ranks, self.to_ranks = cell.peer_link(), cell.peer_link()
        self.counters = Rank(number)
        self.queue: deque[Ready] = deque()  # placed here, first come, first served
        self.keys: list[RequestKey] = []  # that run from the last plan on
        self.due: dict[RequestKey, int] = {}  # of those: the number of iterations when each ends
        self.wakes = 0  # the number of iterations when it must plan
        self.settled = 0
        self.alarmed = False  # plans at the next boundary
        self.planning = False  # plans at the current boundary
        self.offered: list[Ready] = []  # at the current boundary
        self.seconds: list[float] = []  # of the iterations from `planned` on
        self.balanced_s: list[float] = []
        self.planned = 0
        self.lengths = (0, 0, 0, 0)  # at `planned`: requests; the shortest, longest and sum of their lengths
        self._cost = cost
        self._leaps = leaps
        self._holdings: Holdings | None = None  # as of `settled`; None: not known

    def settle(self, iterations: int) -> None:
        """Let the scheduler know of quiet iterations. To be called before anything is done to it."""
        if iterations > self.settled:
            if self.keys:
                self.scheduler.pass_quietly(iterations - self.settled)
            self.settled = iterations
        self._holdings = None

    def finish(self, iterations: int) -> list[RequestKey]:
        """The iterations before this boundary have ended. Returns the requests that ended with the last of them."""
        ended: list[RequestKey] = []
        if self.keys and iterations > self.settled:
            self.settle(iterations - 1)
            tokens = [(key, self.due.get(key) == iterations) for key in self.keys]
            self.scheduler.advance(tokens)
            ended = [key for key, finished in tokens if finished]
        self.settled = iterations
        self._holdings = None
        return ended

    def count(self, iterations: int) -> Rank:
        """Its counters at this boundary."""
        if self._holdings is None:
            self._holdings = self.scheduler.holdings()
        self.scheduler.count(self.counters, self._holdings, iterations - self.settled)
        return self.counters

    def enqueue(self, request: Ready, *, first: bool = False) -> None:
        (self.queue.appendleft if first else self.queue.append)(request)
        self.counters.queued += 1
        self.counters.queued_tokens += request.tokens

    def dequeue(self) -> Ready:
        request = self.queue.popleft()
        self.counters.queued -= 1
        self.counters.queued_tokens -= request.tokens
        return request

    def begin(self, plan: IterationPlan, iterations: int) -> None:
        """Run the plan's requests from here to the next boundary at which something can be decided."""
        self._holdings = None
        self.planned = iterations
        if not plan.run:
            self.seconds, self.balanced_s, self.lengths = [], [], (0, 0, 0, 0)
            return
        most = 1
        left = min(self.due.values(), default=0) - iterations
        if self._leaps and left > 1:
            most += self.scheduler.quiet_iterations(min(MOST_LEAP, left) - 1)
        lengths = [item.kv_tokens for item in plan.run]
        self.wakes = iterations + most
        self._time(lengths, most)
        self.lengths = len(lengths), min(lengths), max(lengths), sum(lengths)

    def _time(self, lengths: Sequence[int], iterations: int) -> None:
        self.seconds = self._cost.run_s(lengths, iterations)
        self.balanced_s = self._cost.balanced_run_s(lengths, iterations)
