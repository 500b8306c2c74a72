"""A measured step cost, corrected by what the instances report (`scheduler.cost_model`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.config import Config
from alignedserve.scheduler.cost.pass_model import OUTLIER, CostModel, LinearCostModel, Passes, RunningQuantile
from alignedserve.scheduler.cost.step import ChunkShape, StepCost

FORGET = 0.95  # the factor by which each new observation multiplies the weight of older ones
PRIOR = 1.0  # the weight of the step cost itself, in observations


class Factor:
    """The ratio of measured to predicted time: a mean in which older passes fade."""

    def __init__(self) -> None:
        self.value = 1.0
        self.late = RunningQuantile()
        self._measured = self._predicted = 0.0

    def observe(self, predicted_s: float, measured_s: float) -> None:
        if predicted_s <= 0.0:
            return
        expected_s = self.value * predicted_s
        if self._predicted:  # the error of the prior is not informative
            measured_s = min(measured_s, OUTLIER * expected_s)
            self.late.observe(measured_s - expected_s)
        # Relative to the prediction, so that a long pass weighs no more than a short one.
        self._measured = FORGET * self._measured + measured_s / predicted_s
        self._predicted = FORGET * self._predicted + 1.0
        self.value = (PRIOR + self._measured) / (PRIOR + self._predicted)


class PriorCostModel(CostModel):
    """A step cost with one factor for prefill and one for decode, both learned online."""

    def __init__(self, cost: StepCost, chunk_tokens: int) -> None:
        """`chunk_tokens`: the most that one prefill pass computes; longer prompts take several passes."""
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._full_s: dict[int, float] = {}  # of a full prefill pass, by the cached tokens before it: mostly 0
        self._chunk, self._iteration = Factor(), Factor()

    def predict_prefill_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """Full passes and a last one, each after `cached_tokens`: waiting tokens belong to several prompts."""
        full, rest = divmod(tokens, self._chunk_tokens)
        seconds = self._cost.step_s((ChunkShape(rest, cached_tokens),), ()) if rest else 0.0
        if full:
            if cached_tokens not in self._full_s:
                self._full_s = {cached_tokens: self._cost.step_s((ChunkShape(self._chunk_tokens, cached_tokens),), ())}
            seconds += full * self._full_s[cached_tokens]
        return self._chunk.value * seconds

    def predict_prompt_s(self, tokens: int, cached_tokens: int) -> float:
        """Full passes as of the mean number of tokens before them, and a last one."""
        full, rest = divmod(tokens, self._chunk_tokens)
        seconds = 0.0
        if full:
            before = cached_tokens + self._chunk_tokens * (full - 1) // 2
            seconds += full * self._cost.step_s((ChunkShape(self._chunk_tokens, before),), ())
        if rest:
            seconds += self._cost.step_s((ChunkShape(rest, cached_tokens + tokens - rest),), ())
        return self._chunk.value * seconds

    def predict_reading_s(self, tokens: int, cached_tokens: int) -> float:
        if not cached_tokens and tokens <= self._chunk_tokens:  # most prompts: saves the predictions
            return 0.0
        return super().predict_reading_s(tokens, cached_tokens)

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
        """Only sums are reported, so all lengths count as the mean; the factor absorbs the cost of unequal lengths."""
        if passes.passes and passes.tokens:
            requests = max(1, round(passes.tokens / passes.passes))
            lengths = [max(1, passes.cached_tokens // passes.tokens)] * requests
            self._iteration.observe(self._cost.step_s((), lengths), passes.seconds / passes.passes)


def cost_model_factory(config: Config) -> Callable[[], CostModel]:
    """Returns a factory for the cost model of a new instance.

    Raises ConfigError for an unusable `scheduler.cost_model`.
    """
    if config.scheduler.cost_model:
        from alignedserve.scheduler.cost.load import (
            configured_cost,
        )  # imports numpy: not for a scheduler with the linear model

        cost = configured_cost(config.scheduler)
        if cost is not None:
            return lambda: PriorCostModel(cost, config.prefill.pass_tokens)
    return LinearCostModel
