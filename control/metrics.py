"""Prometheus text of a role's stores. Every role makes its own; the gateway's scrape collects them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreCount:
    """One store's blocks at one moment: `free + owned + cached == capacity`, always."""

    store: str
    capacity: int
    free: int
    owned: int
    cached: int = 0

    @classmethod
    def of(cls, store: str, capacity: int, free: int, cached: int) -> StoreCount:
        """From counts that another thread may be changing: what is neither free nor cached is owned."""
        return cls(store, capacity, free, max(0, capacity - free - cached), min(cached, capacity - free))


def store_lines(instance: str, stores: Iterable[StoreCount]) -> list[str]:
    """Samples of `alignedserve_kv_blocks` and `alignedserve_kv_capacity_blocks`, without HELP and TYPE lines."""
    lines = []
    for count in stores:
        labels = f'store="{count.store}",instance="{instance}"'
        lines += [
            f'alignedserve_kv_blocks{{{labels},state="{state}"}} {getattr(count, state)}'
            for state in ("free", "owned", "cached")
        ]
        lines.append(f"alignedserve_kv_capacity_blocks{{{labels}}} {count.capacity}")
    return lines


def counter_lines(instance: str, values: Mapping[str, float]) -> list[str]:
    """One sample a name, labelled with the instance."""
    return [f'alignedserve_{name}{{instance="{instance}"}} {value!r}' for name, value in values.items()]


class Histogram:
    """Counts by upper bound, and the sum. One thread observes; any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, instance: str) -> list[str]:
        """The samples of a Prometheus histogram, with its TYPE line."""
        family, lines, below = f"alignedserve_{name}", [], 0
        counts = list(self._counts)
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), counts, strict=True):
            below += count
            lines.append(f'{family}_bucket{{instance="{instance}",le="{bound}"}} {below}')
        ends = [
            f'{family}_sum{{instance="{instance}"}} {self.sum!r}',
            f'{family}_count{{instance="{instance}"}} {below}',
        ]
        return [f"# TYPE {family} histogram", *lines, *ends]
