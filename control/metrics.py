"""Prometheus text of a role's stores. Every role makes its own; the gateway's scrape collects them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
