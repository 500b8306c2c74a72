"""Synthetic mixes of short and long requests, as in the paper's evaluation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from alignedserve.errors import ConfigError
from alignedserve.request import BATCH_PRIORITY
from alignedserve.simulator.traces.generated import MOST_REQUESTS, check_range, described, is_of, parsed
from alignedserve.simulator.traces.load import Load
from alignedserve.simulator.traces.trace import Trace
from alignedserve.simulator.workload import Arrival, Workload

PREFIX = "mix:"
_DEFAULT_REQUESTS = 1000


def is_mix(source: str) -> bool:
    return is_of(PREFIX, source)


@dataclass(frozen=True, slots=True)
class Mix(Trace):
    """`short`: the share of short requests, met exactly (rounded to whole requests).

    Lengths are uniform, both ends included. `batch`: so many more requests, with BATCH_PRIORITY, arrive at time 0.
    """

    short: float = 0.95
    requests: int = _DEFAULT_REQUESTS
    short_min: int = 32
    short_max: int = 999
    long_min: int = 1000
    long_max: int = 8000
    output_min: int = 64
    output_max: int = 512
    batch: int = 0
    timed: bool = field(default=False, init=False)

    @classmethod
    def parse(cls, source: str) -> Mix:
        """Parse `mix:short=0.95,requests=2000`; every key is optional. Raises ConfigError."""
        mix = parsed(cls(), PREFIX, source)
        mix._check(source)
        return mix

    def _check(self, source: str) -> None:
        if not 0 <= self.short <= 1:
            raise ConfigError(f"{source}: short must be a share between 0 and 1")
        if not 1 <= self.requests <= MOST_REQUESTS:
            raise ConfigError(f"{source}: requests must be between 1 and {MOST_REQUESTS}")
        if not 0 <= self.batch <= MOST_REQUESTS:
            raise ConfigError(f"{source}: batch must be between 0 and {MOST_REQUESTS}")
        check_range(source, self, "short", "long", "output")

    def workload(self, load: Load, seed: int) -> Workload:
        if self.batch and load.clients:
            raise ConfigError("batch= of a mix is for arrivals by rate, not for a closed loop (--clients)")
        rng = random.Random(f"alignedserve mix {seed}")
        count = self.requests if load.limit is None else min(load.limit, self.requests)
        rows = zip(load.draw(count, seed), *self._lengths(rng, count), strict=True)
        arrivals = tuple(Arrival(f"r{number}", *row) for number, row in enumerate(rows))
        behind = zip(*self._lengths(random.Random(f"alignedserve mix batch {seed}"), self.batch), strict=True)
        batch = (Arrival(f"b{n}", 0.0, *row, priority=BATCH_PRIORITY) for n, row in enumerate(behind))
        made = {"requests": count, "arrivals": load.process, "seed": seed}
        return Workload((*batch, *arrivals), {**self.describe(), **made}, clients=load.clients)

    def _lengths(self, rng: random.Random, count: int) -> tuple[list[int], list[int]]:
        """Input and output tokens of each request."""
        short = round(self.short * count)
        inputs = [rng.randint(self.short_min, self.short_max) for _ in range(short)]
        inputs += [rng.randint(self.long_min, self.long_max) for _ in range(count - short)]
        rng.shuffle(inputs)
        outputs = [rng.randint(self.output_min, self.output_max) for _ in range(count)]
        return inputs, outputs

    def describe(self) -> dict[str, object]:
        return described(self, PREFIX, () if self.batch else ("batch",))
