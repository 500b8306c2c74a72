"""How long a prefill or a decode iteration takes: the interface, and a linear model that learns as it goes.

Measured tables and the two kernel modes of systems.md fit behind the same interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

RIDGE = 1e-4  # how much the prior weighs, in observations of typical size


class CostModel(ABC):
    """Predictions in seconds. Pure: the same question has the same answer until something new was observed."""

    @abstractmethod
    def predict_prefill_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """To compute `tokens` prompt tokens behind `cached_tokens` whose KV is there already."""

    @abstractmethod
    def predict_iteration_s(self, lengths: Sequence[int]) -> float:
        """One decode iteration of requests with these prefix lengths."""


class LinearFit:
    """`y = w x`, fitted online by least squares in which older observations fade.

    `prior`: the weights before the first observation, and in directions that were never observed. `scale`: typical
    values of x. `forget` in (0, 1]: the weight that an observation keeps at each later one.
    """

    def __init__(self, prior: Sequence[float], scale: Sequence[float], forget: float = 0.98) -> None:
        self.weights = list(prior)
        self._prior = [weight * value for weight, value in zip(prior, scale, strict=True)]
        self._scale = list(scale)
        self._forget = forget
        self._a = [[0.0] * len(self.weights) for _ in self.weights]  # sums of u u', where u = x / scale
        self._b = [0.0] * len(self.weights)  # sums of u y

    def predict(self, x: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(self.weights, x, strict=True))

    def observe(self, x: Sequence[float], y: float) -> None:
        u = [value / scale for value, scale in zip(x, self._scale, strict=True)]
        for i, row in enumerate(self._a):
            self._a[i] = [self._forget * a + u[i] * value for a, value in zip(row, u, strict=True)]
            self._b[i] = self._forget * self._b[i] + u[i] * y
        ridge = [[a + (RIDGE if i == j else 0.0) for j, a in enumerate(row)] for i, row in enumerate(self._a)]
        solved = _solve(ridge, [b + RIDGE * prior for b, prior in zip(self._b, self._prior, strict=True)])
        self.weights = [weight / scale for weight, scale in zip(solved, self._scale, strict=True)]


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """The x of `a x = b` for a small, symmetric, positive definite `a`. Gaussian elimination; both are used up."""
    size = len(b)
    for i in range(size):
        for j in range(i + 1, size):
            factor = a[j][i] / a[i][i]
            b[j] -= factor * b[i]
            for k in range(i, size):
                a[j][k] -= factor * a[i][k]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (b[i] - sum(a[i][k] * x[k] for k in range(i + 1, size))) / a[i][i]
    return x


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
