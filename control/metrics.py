"""Metrics of a role's stores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.metrics import Page


@dataclass(frozen=True, slots=True)
class StoreCount:
    """The number of one store's blocks by state. Always, `free + owned + cached == capacity`."""

    store: str
    capacity: int
    free: int
    owned: int
    cached: int = 0

    @classmethod
    def of(cls, store: str, capacity: int, free: int, cached: int) -> StoreCount:
        """From counts that another thread may be changing. Blocks that are neither free nor cached count as owned."""
        return cls(store, capacity, free, max(0, capacity - free - cached), min(cached, capacity - free))


def show_stores(page: Page, stores: Iterable[StoreCount]) -> None:
    """Adds the stores' gauges to the page."""
    meaning = "blocks by state: free, owned by requests, cached (can be taken back)"
    for count in stores:
        for state in ("free", "owned", "cached"):
            page.gauge("kv_blocks", meaning, getattr(count, state), store=count.store, state=state)
        page.gauge("kv_capacity_blocks", "blocks of the store", count.capacity, store=count.store)
