"""The time of a prefill or a decode iteration: the interface, and a linear model that learns online.

Measured tables and the two kernel modes use the same interface.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from alignedserve.scheduler.cost.learned_skew import LearnedSkew, Share
from alignedserve.scheduler.cost.least_squares import solve_nonnegative

EXTRAPOLATION = 2  # a batch may be this many times as large as the largest measured before the fit is mistrusted
FEW_REQUESTS = 8  # a batch of this size is always within the fit
MOST_MARGIN = 0.3  # of an objective: lateness with other causes than load is not cured by taking fewer
OUTLIER = 4.0  # a pass longer than this multiple of its prediction counts as this multiple: the machine had stalled


@dataclass(frozen=True, slots=True)
class Passes:
    """Sums over forward passes that an instance has measured.

    Prefill: `tokens` prompt tokens were computed, after `cached_tokens` with cached KV. Decode: `tokens` requests with
    `cached_tokens` of prefix in total, and `padded_tokens` if each had the longest prefix of its iteration (0: not
    measured). `seconds`: the time of the passes, from boundary to boundary.
    """

    passes: int
    tokens: int
    cached_tokens: int
    seconds: float
    padded_tokens: int = 0


class CostModel(ABC):
    """Predictions in seconds. Pure: the same arguments give the same result until a new observation."""

    @abstractmethod
    def predict_prefill_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """Time to compute `tokens` prompt tokens after `cached_tokens` with cached KV."""

    @abstractmethod
    def predict_prompt_s(self, tokens: int, cached_tokens: int) -> float:
        """Time to compute the last `tokens` tokens of one prompt, whose first `cached_tokens` have cached KV.

        Each pass reads the KV of those before it, so long prompts take more than in proportion.
        """

    def predict_reading_s(self, tokens: int, cached_tokens: int) -> float:
        """The part of `predict_prompt_s` that is for attention to the KV of earlier passes."""
        return max(0.0, self.predict_prompt_s(tokens, cached_tokens) - self.predict_prefill_s(tokens))

    @abstractmethod
    def predict_iteration_s(self, lengths: Sequence[int]) -> float:
        """Time of one decode iteration of requests with these prefix lengths."""

    @abstractmethod
    def observe_chunks(self, passes: Passes) -> None:
        """Record the measured time of this instance's prefill passes."""

    @abstractmethod
    def observe_iterations(self, passes: Passes) -> None:
        """Record the measured time of this instance's decode iterations."""

    def unequal_lengths_share(self, lengths: Sequence[int] | None = None) -> Share | None:
        """The share of an iteration's time that its unequal lengths cost, as learned; None: not known.

        Of an iteration of these prefix lengths, or of the mean of those that were learned from.
        """
        return None

    @property
    @abstractmethod
    def iteration_margin_s(self) -> float:
        """The margin to add to a predicted iteration time so that two thirds of recent iterations met it."""


class RunningQuantile:
    """Tracks the value that a `share` of the latest observations is below. It moves in steps: an outlier is one step.

    The size of a step is proportional to the mean deviation of observations from the quantile.
    """

    def __init__(self, share: float = 2 / 3, gain: float = 0.1) -> None:
        self.value = 0.0
        self._share = share
        self._gain = gain
        self._deviation = 0.0

    def observe(self, x: float) -> None:
        self._deviation += self._gain * (
            min(abs(x - self.value), OUTLIER * self._deviation or math.inf) - self._deviation
        )
        step = self._gain * self._deviation
        self.value += step * self._share if x > self.value else -step * (1.0 - self._share)


class LinearFit:
    """`y = w x`, fitted online by least squares with exponential forgetting; no weight is below 0.

    `prior`: the weights before the first observation, and in directions that were never observed. `scale`: typical
    values of x. `forget` in (0, 1]: the factor by which each new observation multiplies the weight of older ones.
    `late`: by how much y exceeded the prediction.
    """

    def __init__(self, prior: Sequence[float], scale: Sequence[float], forget: float = 0.95) -> None:
        self.weights = list(prior)
        self._prior = [weight * value for weight, value in zip(prior, scale, strict=True)]
        self._scale = list(scale)
        self._forget = forget
        self._a = [[0.0] * len(self.weights) for _ in self.weights]  # sums of u u', where u = x / scale
        self._b = [0.0] * len(self.weights)  # sums of u y
        self._seen = False
        self.late = RunningQuantile()

    def predict(self, x: Sequence[float]) -> float:
        seconds: float = sum(map(mul, self.weights, x))
        return seconds

    def observe(self, x: Sequence[float], y: float) -> float:
        """Returns the y that was used."""
        predicted = self.predict(x)
        if self._seen and predicted > 0.0:  # the error of the prior is not informative
            y = min(y, OUTLIER * predicted)
            self.late.observe(y - predicted)
        self._seen = True
        u = [value / scale for value, scale in zip(x, self._scale, strict=True)]
        for i, row in enumerate(self._a):
            self._a[i] = [self._forget * a + u[i] * value for a, value in zip(row, u, strict=True)]
            self._b[i] = self._forget * self._b[i] + u[i] * y
        solved = solve_nonnegative(self._a, self._b, self._prior)
        self.weights = [weight / scale for weight, scale in zip(solved, self._scale, strict=True)]
        return y


class LinearCostModel(CostModel):
    """A pass is linear in requests (or prompt tokens) and in the KV tokens that it reads. Learns from measurements.

    `chunk_tokens`: the most that one prefill pass computes; longer prompts take several passes.
    """

    def __init__(self, prefill_token_s: float = 1e-4, iteration_s: float = 1e-2, chunk_tokens: int = 512) -> None:
        self._chunk_tokens = chunk_tokens
        self._chunk = LinearFit((0.0, prefill_token_s, 0.0), (1.0, 512.0, 4096.0))
        self._iteration = LinearFit((iteration_s, 0.0, 0.0), (1.0, 64.0, 65536.0))
        self._skew = LearnedSkew()

    def predict_prefill_s(self, tokens: int, cached_tokens: int = 0) -> float:
        return self._chunk.predict((-(-tokens // self._chunk_tokens), tokens, cached_tokens))

    def predict_prompt_s(self, tokens: int, cached_tokens: int) -> float:
        return self.predict_prefill_s(tokens) + self.predict_reading_s(tokens, cached_tokens)

    def predict_reading_s(self, tokens: int, cached_tokens: int) -> float:
        passes = -(-tokens // self._chunk_tokens)
        read = passes * cached_tokens + self._chunk_tokens * passes * (passes - 1) // 2
        return self._chunk.weights[2] * read

    def predict_iteration_s(self, lengths: Sequence[int]) -> float:
        return self._iteration.predict((1.0, len(lengths), sum(lengths)))

    @property
    def iteration_margin_s(self) -> float:
        return max(0.0, self._iteration.late.value)

    def observe_chunks(self, passes: Passes) -> None:
        _observe(self._chunk, passes)

    def observe_iterations(self, passes: Passes) -> None:
        seconds = _observe(self._iteration, passes)
        if passes.padded_tokens:
            count = passes.passes
            means = passes.tokens / count, passes.cached_tokens / count, passes.padded_tokens / count
            self._skew.observe(*means, seconds)

    def unequal_lengths_share(self, lengths: Sequence[int] | None = None) -> Share | None:
        return self._skew.share(lengths)


def _observe(fit: LinearFit, passes: Passes) -> float:
    """The means of several passes are equivalent to one pass, since the model is linear.

    Returns the seconds of a pass that were used.
    """
    count = passes.passes
    if not count:
        return 0.0
    return fit.observe((1.0, passes.tokens / count, passes.cached_tokens / count), passes.seconds / count)
