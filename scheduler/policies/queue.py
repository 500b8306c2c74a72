"""A policy defined by a sort order: a subclass only ranks requests."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry, as_many_as_fit

_Place = tuple[Any, RequestKey]


class QueuePolicy(BatchPolicy):
    """Keeps the waiting requests sorted by `rank`; a batch is as many requests from the front as fit.

    Finding a place is logarithmic; making room for it moves up to one pointer for each waiting request (1 ms for a
    million).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._entries: dict[RequestKey, Entry] = {}
        self._order: list[_Place] = []
        self._blocks = 0

    @abstractmethod
    def rank(self, entry: Entry) -> Any:
        """Sort key of a request, least first. It must never change for the same entry. Ties: by key."""

    def insert(self, entry: Entry) -> None:
        if entry.key in self._entries:
            raise AccountingError(f"{entry.key} is already waiting", request_id=entry.key.request_id)
        rank = self.rank(entry)
        if not all(part == part for part in (rank if isinstance(rank, tuple) else (rank,))):
            raise AccountingError(
                f"rank() of {entry.key} is {rank!r}: NaN has no place in an order", request_id=entry.key.request_id
            )
        insort(self._order, (rank, entry.key))
        self._entries[entry.key] = entry
        self._blocks += entry.blocks

    def remove(self, key: RequestKey) -> None:
        entry = self._entries.get(key)
        if entry is None:
            raise AccountingError(f"{key} is not waiting", request_id=key.request_id)
        place = self._place(entry)
        at = bisect_left(self._order, place)
        if self._order[at : at + 1] != [place]:
            raise AccountingError(
                f"rank() of {key} is now {place[0]!r}, not what it was when it was inserted", request_id=key.request_id
            )
        del self._order[at], self._entries[key]
        self._blocks -= entry.blocks

    def totals(self) -> tuple[int, int]:
        return len(self._entries), self._blocks

    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        first: tuple[Entry, ...] = () if seed is None else (self._entries[seed],)
        order = chain(first, (entry for entry in self if entry.key != seed))
        return as_many_as_fit(order, limits) or list(islice(chain(first, self), 1))  # too large: a batch alone

    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        """Every prefix length matches."""
        return True

    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        fitting: Iterable[Entry] = (e for e in self if self.matches(e.tokens, shortest_tokens, longest_tokens))
        return as_many_as_fit(fitting, limits)

    def check_integrity(self) -> None:
        if self._order != sorted(map(self._place, self._entries.values())):
            raise AccountingError("the order does not match the waiting requests")
        if self._blocks != sum(entry.blocks for entry in self._entries.values()):
            raise AccountingError("the waiting blocks do not match a recount")

    def __iter__(self) -> Iterator[Entry]:
        """The waiting requests, in order."""
        return (self._entries[key] for _, key in self._order)

    def _place(self, entry: Entry) -> _Place:
        return self.rank(entry), entry.key
