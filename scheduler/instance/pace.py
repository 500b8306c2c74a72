"""Keeps iterations within a TPOT objective: which members may join without making an iteration too long (ADR 54)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from alignedserve.config import Config
from alignedserve.scheduler.cost.pass_model import EXTRAPOLATION, FEW_REQUESTS, MOST_MARGIN, CostModel, Passes
from alignedserve.scheduler.cost.prior import cost_model_factory

FIRST_STAY = 256.0  # iterations that a member is expected to stay for, until some have ended
STAY_GAIN = 0.05  # about the last twenty that ended
OBSERVED_S = 0.1  # passes are observed together for this long: single ones are noisy


class Pace:
    """`iteration_s`: predicted seconds of an iteration of these prefix lengths; it must not fall while they grow.

    `objective_s`: infinite if there is none.
    """

    def __init__(self, objective_s: float, iteration_s: Callable[[Sequence[int]], float]) -> None:
        self.objective_s = objective_s
        self.iteration_s = iteration_s
        self._stay = FIRST_STAY

    def meets(self, lengths: Sequence[int]) -> bool:
        """Whether an iteration of these lengths is predicted to meet the objective."""
        return self.iteration_s(lengths) <= self.objective_s

    def growth(self, iterations: int) -> int:
        """Half of the tokens that a member after so many iterations is expected to grow by: its mean growth."""
        return max(0, int(self._stay) - iterations) // 2

    def ended(self, iterations: int) -> None:
        """A member has ended after so many iterations."""
        self._stay += STAY_GAIN * (iterations - self._stay)

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        """An iteration of `requests` requests with `tokens` tokens of KV took this long."""
        return


class LearningPace(Pace):
    """Predicts with a model that learns from this instance's iterations: the configured cost model, or a linear one.

    As in admission, the margin of recent iterations is added, and a batch far larger than any measured is taken to
    cost in proportion.
    """

    def __init__(self, objective_s: float, cost: CostModel) -> None:
        super().__init__(objective_s, self._predict_s)
        self._cost = cost
        self._most_requests = 0  # in the largest measured batch
        self._passes, self._requests, self._tokens, self._seconds = 0, 0, 0, 0.0  # since the last observation

    @classmethod
    def configured(cls, config: Config) -> LearningPace:
        """The pace of a decode instance."""
        return cls(config.scheduler.tpot_objective_s or math.inf, cost_model_factory(config)())

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        self._most_requests = max(self._most_requests, requests)
        self._passes += 1
        self._requests += requests
        self._tokens += tokens
        self._seconds += seconds
        if self._seconds >= OBSERVED_S:
            self._cost.observe_iterations(Passes(self._passes, self._requests, self._tokens, self._seconds))
            self._passes, self._requests, self._tokens, self._seconds = 0, 0, 0, 0.0

    def _predict_s(self, lengths: Sequence[int]) -> float:
        margin_s = min(self._cost.iteration_margin_s, MOST_MARGIN * self.objective_s)
        known = FEW_REQUESTS + EXTRAPOLATION * self._most_requests
        return (self._cost.predict_iteration_s(lengths) + margin_s) * max(1.0, len(lengths) / known)
