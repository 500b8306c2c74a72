"""What instances take: a measured step cost, corrected by what they report (`scheduler.cost_model`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.config import Config
from alignedserve.scheduler.cost.pass_model import OUTLIER, CostModel, LinearCostModel, Passes, RunningQuantile
from alignedserve.scheduler.cost.step import ChunkShape, StepCost

FORGET = 0.95  # the weight that an observation keeps at each later one
PRIOR = 1.0  # the weight of the step cost itself, in observations


class Factor:
    """By how much passes take longer than predicted: a mean weighted by time, in which older passes fade."""

    def __init__(self) -> None:
        self.value = 1.0
        self.late = RunningQuantile()
        self._measured = self._predicted = 0.0

    def observe(self, predicted_s: float, measured_s: float) -> None:
        if predicted_s <= 0.0:
            return
        expected_s = self.value * predicted_s
        if self._predicted:  # the prior's own error says nothing
            measured_s = min(measured_s, OUTLIER * expected_s)
            self.late.observe(measured_s - expected_s)
        # Relative to the prediction, so that a long pass weighs no more than a short one.
        self._measured = FORGET * self._measured + measured_s / predicted_s
        self._predicted = FORGET * self._predicted + 1.0
        self.value = (PRIOR + self._measured) / (PRIOR + self._predicted)


class PriorCostModel(CostModel):
    """A step cost, each of prefill and decode times a factor that is learnt online."""

    def __init__(self, cost: StepCost, chunk_tokens: int) -> None:
        """`chunk_tokens`: the most that one prefill pass computes; longer prompts take several."""
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._full_s: dict[int, float] = {}  # of a full prefill pass, by the cached tokens before it: mostly 0
        self._chunk, self._iteration = Factor(), Factor()

    def predict_prefill_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """As full passes and a last one, each behind `cached_tokens`: tokens that wait are of several prompts."""
        full, rest = divmod(tokens, self._chunk_tokens)
        seconds = self._cost.step_s((ChunkShape(rest, cached_tokens),), ()) if rest else 0.0
        if full:
            if cached_tokens not in self._full_s:
                self._full_s = {cached_tokens: self._cost.step_s((ChunkShape(self._chunk_tokens, cached_tokens),), ())}
            seconds += full * self._full_s[cached_tokens]
        return self._chunk.value * seconds

    def predict_iteration_s(self, lengths: Sequence[int]) -> float:
        return self._iteration.value * self._cost.step_s((), lengths)

    @property
    def iteration_margin_s(self) -> float:
        return max(0.0, self._iteration.late.value)

    def observe_chunks(self, passes: Passes) -> None:
        if passes.passes and passes.tokens:
            mean = ChunkShape(max(1, passes.tokens // passes.passes), passes.cached_tokens // passes.passes)
            self._chunk.observe(self._cost.step_s((mean,), ()), passes.seconds / passes.passes)

    def observe_iterations(self, passes: Passes) -> None:
        """Only sums are reported: as if all had the mean length, so what unequal lengths cost is in the factor."""
        if passes.passes and passes.tokens:
            requests = max(1, round(passes.tokens / passes.passes))
            lengths = [max(1, passes.cached_tokens // passes.tokens)] * requests
            self._iteration.observe(self._cost.step_s((), lengths), passes.seconds / passes.passes)


def cost_model_factory(config: Config) -> Callable[[], CostModel]:
    """Makes the cost model of an instance that joins. Raises ConfigError for a `scheduler.cost_model` of no use."""
    if config.scheduler.cost_model:
        from alignedserve.scheduler.cost.load import (
            configured_cost,
        )  # numpy: not for a scheduler that learns as it goes

        cost = configured_cost(config.scheduler)
        if cost is not None:
            return lambda: PriorCostModel(cost, config.prefill.pass_tokens)
    return LinearCostModel
