"""Synthetic mixes of short and long requests, as in the paper's evaluation."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, fields, replace

from alignedserve.errors import ConfigError
from alignedserve.request import BATCH_PRIORITY
from alignedserve.simulator.traces.fields import MAX_TOKENS
from alignedserve.simulator.traces.load import Load
from alignedserve.simulator.traces.trace import Trace
from alignedserve.simulator.workload import Arrival, Workload

PREFIX = "mix:"
_DEFAULT_REQUESTS = 1000
_MOST_REQUESTS = 10_000_000


def is_mix(source: str) -> bool:
    return source.startswith(PREFIX) or source == PREFIX.rstrip(":")


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
        known = {entry.name: entry for entry in fields(cls) if entry.init}
        given: dict[str, float | int] = {}
        for part in filter(None, source.removeprefix(PREFIX).removeprefix("mix").split(",")):
            name, _, text = part.partition("=")
            if name not in known:
                raise ConfigError(f"{source}: unknown key {name!r}; a mix has {', '.join(known)}")
            kind = float if name == "short" else int
            try:
                given[name] = kind(text)
            except ValueError:
                wanted = "a number" if kind is float else "a whole number, such as 1000"
                raise ConfigError(f"{source}: {name}={text!r} is not {wanted}") from None
        mix = replace(cls(), **given)  # type: ignore[arg-type]  # values have the types of the fields
        mix._check(source)
        return mix

    def _check(self, source: str) -> None:
        if not 0 <= self.short <= 1:
            raise ConfigError(f"{source}: short must be a share between 0 and 1")
        if not 1 <= self.requests <= _MOST_REQUESTS:
            raise ConfigError(f"{source}: requests must be between 1 and {_MOST_REQUESTS}")
        if not 0 <= self.batch <= _MOST_REQUESTS:
            raise ConfigError(f"{source}: batch must be between 0 and {_MOST_REQUESTS}")
        for name in ("short", "long", "output"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if not 1 <= low <= high:
                raise ConfigError(f"{source}: {name}_min ({low}) must be at least 1, {name}_max ({high}) no less")
            if high >= MAX_TOKENS:
                raise ConfigError(f"{source}: {name}_max must be less than {MAX_TOKENS} tokens")

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
        keys = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}
        if not self.batch:
            del keys["batch"]
        spec = PREFIX + ",".join(f"{name}={value}" for name, value in keys.items())
        return {"source": spec, "format": "mix", "sha256": hashlib.sha256(spec.encode()).hexdigest(), "mix": keys}
