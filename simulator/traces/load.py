"""Arrival rates: arrivals drawn from a renewal process, or a trace's own arrivals, stretched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from alignedserve.errors import ConfigError

LONGEST_S = 366 * 86_400.0  # of a workload's arrivals: far beyond this, a tick is too short to advance virtual time
_LEAST_CV, _MOST_CV = 1e-6, 1e3
_INSTANT_S = 1e-9  # a trace no longer than this cannot be stretched


@dataclass(frozen=True, slots=True)
class Load:
    """`rate_per_s`: mean arrivals a second; None: a trace's own times, or all at time zero if it has none.

    `cv`: coefficient of variation of the time between two generated arrivals: 1 (None) is Poisson, 0 is even spacing,
    other values are Gamma. `limit`: only the first `limit` requests. `clients`: above 0, a closed loop of as many
    clients, each of which sends the next request of the trace when its previous one has ended.
    """

    rate_per_s: float | None = None
    cv: float | None = None
    limit: int | None = None
    clients: int = 0

    def __post_init__(self) -> None:
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise ConfigError(f"a rate must be more than 0 requests a second, not {self.rate_per_s:g}")
        if self.clients < 0:
            raise ConfigError(f"--clients must be at least 1, not {self.clients}")
        if self.clients and self.rate_per_s is not None:
            raise ConfigError(f"--clients {self.clients} excludes --rate: the clients decide when requests arrive")
        if self.cv is not None and self.cv != 0 and not _LEAST_CV <= self.cv <= _MOST_CV:
            raise ConfigError(f"--cv must be 0, or between {_LEAST_CV:g} and {_MOST_CV:g}, not {self.cv:g}")
        if self.cv is not None and self.rate_per_s is None:
            raise ConfigError("--cv needs --rate: without a rate all requests arrive at once")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit must be at least 1, not {self.limit}")

    @property
    def process(self) -> str:
        if self.clients:
            return f"closed loop of {self.clients} clients"
        if self.rate_per_s is None:
            return "all at time zero"
        return "poisson" if self.cv in (None, 1.0) else f"gamma, cv {self.cv:g}"

    def draw(self, count: int, seed: int) -> list[float]:
        """`count` arrival times in seconds, the first at 0.

        A seed draws the same arrivals at every rate, only scaled, so that two rates differ in nothing else.
        """
        if self.rate_per_s is None or count == 0:
            return [0.0] * count
        rng = random.Random(f"alignedserve arrivals {seed}")
        cv = 1.0 if self.cv is None else self.cv
        shape = 1.0 / (cv * cv) if cv else 0.0
        gaps = (rng.gammavariate(shape, 1.0 / shape) if cv else 1.0 for _ in range(count - 1))
        rate = self.rate_per_s
        return self._checked([time / rate for time in accumulate(gaps, initial=0.0)])

    def stretch(self, arrivals_s: Sequence[float]) -> list[float]:
        """A trace's own arrivals, scaled so that their mean rate is `rate_per_s`."""
        span_s = arrivals_s[-1] if arrivals_s else 0.0
        if self.rate_per_s is None or span_s < _INSTANT_S:
            return list(arrivals_s)
        if (len(arrivals_s) - 1) / self.rate_per_s > LONGEST_S:
            self._too_slow()
        factor = (len(arrivals_s) - 1) / (self.rate_per_s * span_s)
        return [time * factor for time in arrivals_s]

    def _checked(self, arrivals_s: list[float]) -> list[float]:
        if not arrivals_s[-1] <= LONGEST_S:
            self._too_slow()
        return arrivals_s

    def _too_slow(self) -> NoReturn:
        raise ConfigError(f"at {self.rate_per_s:g} requests a second the last one would arrive after more than a year")
