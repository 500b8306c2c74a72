"""Iterations that were launched, whose tokens are not taken yet, and copies that wait for them."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.decode_worker.flights import Flight
from alignedserve.engine.live import LiveRequest
from alignedserve.scheduler.instance.plan import Evict, Join


class UnderWay:
    """The oldest flight first. Several fly only ahead of each other's tokens, or over the stages of a pipeline."""

    def __init__(self) -> None:
        self.flights: list[Flight] = []
        self._evictions: list[tuple[Evict, LiveRequest | None]] = []
        self._joins: list[Join] = []

    def __len__(self) -> int:
        return len(self.flights)

    @property
    def newest(self) -> Flight | None:
        return self.flights[-1] if self.flights else None

    def has(self, live: LiveRequest | None) -> bool:
        """Whether the request's token is not known yet."""
        return any(flight.row_of(live) is not None for flight in self.flights)

    def uses(self, block_ids: Iterable[int]) -> bool:
        """Whether the device may read or write one of these blocks."""
        return any(flight.touches(block_ids) for flight in self.flights)

    def remove(self, flight: Flight) -> None:
        self.flights = [each for each in self.flights if each is not flight]

    # ---- what waits

    def evict_later(self, evict: Evict, live: LiveRequest | None) -> None:
        """When the request's token is known: it is stored with the request."""
        self._evictions.append((evict, live))

    def join_later(self, join: Join) -> None:
        """When no flight uses the blocks that the copy writes to."""
        self._joins.append(join)

    def due_evictions(self) -> list[tuple[Evict, LiveRequest | None]]:
        """Those that need not wait any more, once. The request of one may have ended meanwhile."""
        if not self._evictions:
            return []
        due = [entry for entry in self._evictions if not self.has(entry[1])]
        self._evictions = [entry for entry in self._evictions if self.has(entry[1])]
        return due

    def due_joins(self) -> list[Join]:
        """Those that need not wait any more, once."""
        if not self._joins:
            return []
        due = [join for join in self._joins if not self.uses(_written(join))]
        self._joins = [join for join in self._joins if self.uses(_written(join))]
        return due

    def delays(self, join: Join) -> bool:
        return self.uses(_written(join))


def _written(join: Join) -> Iterable[int]:
    return join.block_ids[join.resident_blocks :]
