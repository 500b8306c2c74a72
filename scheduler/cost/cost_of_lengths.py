"""What lengths cost a decode instance, and whether it pays to share them out among instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.config import Config
from alignedserve.scheduler.cost.makespan import typical_order
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.cost.worth import TokenWorth

LEAST_GAIN = 0.01  # share of the iterations' time that sharing must save; to go on, half of it
FEW = 8  # requests an instance, below which they tell nothing
SMOOTH = 0.1  # weight of the latest comparison: about the last ten
RELEARN = 10  # uses of a learned cost


class CostOfLengths:
    """With a measured cost if there is one, else with what an instance has learned from its iterations."""

    def __init__(self, config: Config, cost: StepCost | None) -> None:
        self._config = config
        self._cost = cost
        self._worth: TokenWorth | None = None
        self._uses = 0
        self._gain = 0.0  # what sharing gains, as a share of the iterations' time
        self._pays = False

    def use_cost(self, cost: StepCost) -> None:
        self._cost, self._worth, self._pays = cost, None, False

    def learn(self, iteration_s: Callable[[Sequence[int]], float], cache_tokens: int, max_requests: int) -> None:
        """From time to time, take what an instance has learned (if nothing was measured), and how much it holds."""
        self._uses += 1
        if self._worth is not None and self._uses % RELEARN:
            return
        cost = self._cost
        self._worth = TokenWorth(
            iteration_s if cost is None else lambda lengths: cost.step_s((), lengths),
            cache_tokens,
            max_requests,
            self._config.scheduler.max_prefix_tokens,
        )

    def of(self, tokens: int) -> float:
        """Seconds of an instance that a token of a request of this length takes, among its like."""
        return 1.0 if self._worth is None else self._worth.of(tokens)

    def pays(self, groups: Sequence[Sequence[int]], *, waiting: bool) -> bool:
        """Whether to share, judged by iterations of these groups of lengths against those of groups that mix them.

        The gain is the time that they save. While nothing is `waiting`, throughput is not at stake: what the slowest
        group takes longer counts against it. True if there is no measured cost: what is learned of unequal
        lengths is too coarse for a gain of this size.
        """
        count = len(groups)
        lengths = [tokens for group in groups for tokens in group]
        if len(lengths) < FEW * count:
            return self._pays
        if self._cost is None:
            self._pays = True
            return True
        shared_s = [self._cost.step_s((), typical_order(group)) for group in groups]
        mixed_s = [self._cost.step_s((), typical_order(lengths[first::count])) for first in range(count)]
        gain = 1.0 - sum(shared_s) / sum(mixed_s)
        if not waiting:
            gain -= max(0.0, max(shared_s) / max(mixed_s) - 1.0)
        self._gain += SMOOTH * (gain - self._gain)
        self._pays = self._gain >= (LEAST_GAIN / 2 if self._pays else LEAST_GAIN)
        return self._pays
