"""An upper bound to compare with, in the simulator only: it is told output lengths, and takes the fewest left first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

from alignedserve.config import SchedulerConfig
from alignedserve.errors import AccountingError, ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry, as_many_as_fit

_Place = tuple[int, float, RequestKey]  # tokens left, waiting since


class OraclePolicy(BatchPolicy):
    NEEDS_OUTPUT_LENGTHS = True

    def __init__(self, config: SchedulerConfig) -> None:
        self._final_tokens: Mapping[str, int] = {}
        self._entries: dict[RequestKey, Entry] = {}
        self._order: list[_Place] = []
        self._blocks = 0

    def reveal(self, final_tokens: Mapping[str, int]) -> None:
        """By request id: the tokens, prompt and answer, with which the request will end. Before the first insert."""
        self._final_tokens = final_tokens

    def insert(self, entry: Entry) -> None:
        if entry.key in self._entries:
            raise AccountingError(f"{entry.key} waits already", request_id=entry.key.request_id)
        insort(self._order, self._place(entry))
        self._entries[entry.key] = entry
        self._blocks += entry.blocks

    def remove(self, key: RequestKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            raise AccountingError(f"{key} does not wait", request_id=key.request_id)
        del self._order[bisect_left(self._order, self._place(entry))]
        self._blocks -= entry.blocks

    def totals(self) -> tuple[int, int]:
        return len(self._entries), self._blocks

    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        first = seed if seed is not None else self._order[0][2] if self._order else None
        return [] if first is None else self._fewest_left(limits, first) or [self._entries[first]]

    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        return True

    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        return self._fewest_left(limits, None)

    def check_integrity(self) -> None:
        if self._order != sorted(self._place(entry) for entry in self._entries.values()):
            raise AccountingError("the order of tokens left does not match the requests")
        if self._blocks != sum(entry.blocks for entry in self._entries.values()):
            raise AccountingError("the blocks that wait do not match a recount")

    def _place(self, entry: Entry) -> _Place:
        final = self._final_tokens.get(entry.key.request_id)
        if final is None:
            raise ConfigError(f"policy oracle was not told the end of {entry.key.request_id}: simulator only")
        return final - entry.tokens, entry.since_s, entry.key

    def _fewest_left(self, limits: BatchLimits, first: RequestKey | None) -> list[Entry]:
        """`first`, then those with the fewest tokens left, as far as they fit."""
        keys = ([] if first is None else [first]) + [key for _, _, key in self._order[: limits.max_requests + 1]]
        return as_many_as_fit((self._entries[key] for key in dict.fromkeys(keys)), limits)
