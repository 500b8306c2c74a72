"""First come, first served, whatever the prefix lengths, as DistServe's decode stage admits."""

from __future__ import annotations

from itertools import chain

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.age_order import AgeOrder
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry, as_many_as_fit


class FcfsPolicy(BatchPolicy):
    BY_LENGTH = False
    OVERDUE = False

    def __init__(self, config: SchedulerConfig) -> None:
        self._entries: dict[RequestKey, Entry] = {}
        self._order = AgeOrder[Entry]()
        self._blocks = 0

    def insert(self, entry: Entry) -> None:
        if entry.key in self._entries:
            raise AccountingError(f"{entry.key} is already waiting", request_id=entry.key.request_id)
        self._entries[entry.key] = entry
        self._order.add(entry, entry.since_s)
        self._blocks += entry.blocks

    def remove(self, key: RequestKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            raise AccountingError(f"{key} is not waiting", request_id=key.request_id)
        self._order.remove(entry, entry.since_s)
        self._blocks -= entry.blocks

    def totals(self) -> tuple[int, int]:
        return len(self._entries), self._blocks

    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        """The seed, then the oldest that fit. With its own wait objective the seed need not be the oldest."""
        oldest = self._order.first()
        if oldest is None:
            return []
        return self._oldest(limits, seed) or [oldest[1] if seed is None else self._entries[seed]]

    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        """Every prefix length matches."""
        return True

    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        return self._oldest(limits)

    def overtakes(self) -> bool:
        return False

    def check_integrity(self) -> None:
        if [entry.since_s for entry in self._order] != sorted(entry.since_s for entry in self._entries.values()):
            raise AccountingError("the order of arrival does not match the requests")
        if self._blocks != sum(entry.blocks for entry in self._entries.values()):
            raise AccountingError("the waiting blocks do not match a recount")

    def _oldest(self, limits: BatchLimits, seed: RequestKey | None = None) -> list[Entry]:
        first = () if seed is None else (self._entries[seed],)
        return as_many_as_fit(chain(first, (entry for entry in self._order if entry.key != seed)), limits)
