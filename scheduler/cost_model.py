"""How long a prefill or a decode iteration takes: the interface, and a linear model that learns as it goes.

Measured tables and the two kernel modes of systems.md fit behind the same interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class CostModel(ABC):
    """Predictions in seconds. Pure: the same question has the same answer until something new was observed."""

    @abstractmethod
    def predict_prefill_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """To compute `tokens` prompt tokens behind `cached_tokens` whose KV is there already."""

    @abstractmethod
    def predict_iteration_s(self, lengths: Sequence[int]) -> float:
        """One decode iteration of requests with these prefix lengths."""


class LinearFit:
    """`y = w x`, fitted online by recursive least squares in which older observations fade.

    `prior` are the weights before the first observation, `forget` in (0, 1] is the weight that an observation keeps
    at each later one.
    """

    def __init__(self, prior: Sequence[float], scale: Sequence[float], forget: float = 0.98) -> None:
        self.weights = list(prior)
        self._scale = list(scale)  # typical values of x, so that the fit is well conditioned
        self._forget = forget
        size = len(self.weights)
        self._p = [[1e3 if i == j else 0.0 for j in range(size)] for i in range(size)]

    def predict(self, x: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(self.weights, x, strict=True))

    def observe(self, x: Sequence[float], y: float) -> None:
        u = [value / scale for value, scale in zip(x, self._scale, strict=True)]
        pu = [sum(p * value for p, value in zip(row, u, strict=True)) for row in self._p]
        gain_scale = self._forget + sum(a * b for a, b in zip(u, pu, strict=True))
        error = y - self.predict(x)
        for i, gain in enumerate(pu):
            self.weights[i] += gain / gain_scale * error / self._scale[i]
        trace = sum(self._p[i][i] for i in range(len(u)))
        forget = self._forget if trace < 1e6 else 1.0  # without excitation the estimate must not blow up
        self._p = [
            [(p - pu[i] * pu[j] / gain_scale) / forget for j, p in enumerate(row)] for i, row in enumerate(self._p)
        ]


class LinearCostModel(CostModel):
    """Prefill linear in its tokens; an iteration linear in requests and KV tokens read. Learns from measurements."""

    def __init__(self, prefill_token_s: float = 1e-4, iteration_s: float = 1e-2) -> None:
        self._prefill = LinearFit((0.0, prefill_token_s), (1.0, 512.0))
        self._iteration = LinearFit((iteration_s, 0.0, 0.0), (1.0, 64.0, 65536.0))

    def predict_prefill_s(self, tokens: int, cached_tokens: int = 0) -> float:
        return max(0.0, self._prefill.predict((1.0, tokens)))

    def predict_iteration_s(self, lengths: Sequence[int]) -> float:
        return max(0.0, self._iteration.predict((1.0, len(lengths), sum(lengths))))

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        self._prefill.observe((1.0, tokens), seconds)

    def observe_iteration(self, lengths: Sequence[int], seconds: float) -> None:
        self._iteration.observe((1.0, len(lengths), sum(lengths)), seconds)
