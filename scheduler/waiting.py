"""Starvation and dynamic scheduling (paper, section 3.5).

Waiting is counted for each request, from the end of its prefill (or its eviction) until it decodes, whatever store it
is in meanwhile: the time stamp of a node says nothing of one old request in a subtree that keeps yielding batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.age_order import AgeOrder


def join_range(shortest_tokens: int, longest_tokens: int, window: float) -> tuple[int, int]:
    """Lengths that match a running batch: within `window` (a share) of its own."""
    return int(shortest_tokens * (1.0 - window)), int(longest_tokens * (1.0 + window)) + 1


@dataclass(slots=True)
class _Wait:
    since_s: float
    in_pool: bool = True
    overdue: bool = False


class WaitingClock:
    """Who has waited past the threshold, in the pool or prefetched. O(1) an operation, but for the few out of order."""

    def __init__(self, threshold_s: float) -> None:
        self.threshold_s = threshold_s
        self._waits: dict[RequestKey, _Wait] = {}
        self._in_time = AgeOrder()
        self._overdue_in_pool = AgeOrder()

    def __len__(self) -> int:
        return len(self._waits)

    def start(self, key: RequestKey, since_s: float) -> None:
        """The request waits in the pool, since `since_s`."""
        if key in self._waits:
            raise AccountingError(f"{key} waits already", request_id=key.request_id)
        self._waits[key] = _Wait(since_s)
        self._in_time.add(key, since_s)

    def leave_pool(self, key: RequestKey) -> None:
        """It was prefetched, and waits on in a candidate buffer."""
        wait = self._waits[key]
        if wait.overdue and wait.in_pool:
            self._overdue_in_pool.remove(key, wait.since_s)
        wait.in_pool = False

    def stop(self, key: RequestKey) -> float:
        """It decodes, was given back, or has ended. Since when it waited."""
        wait = self._waits.pop(key)
        if not wait.overdue:
            self._in_time.remove(key, wait.since_s)
        elif wait.in_pool:
            self._overdue_in_pool.remove(key, wait.since_s)
        return wait.since_s

    def newly_overdue(self, now_s: float) -> list[RequestKey]:
        """Those that passed the threshold since this was last asked, oldest first."""
        found = []
        while (oldest := self._in_time.first()) is not None and now_s - oldest[0] >= self.threshold_s:
            since_s, key = oldest
            self._in_time.remove(key, since_s)
            wait = self._waits[key]
            wait.overdue = True
            if wait.in_pool:
                self._overdue_in_pool.add(key, since_s)
            found.append(key)
        return found

    def is_overdue(self, key: RequestKey) -> bool:
        wait = self._waits.get(key)
        return wait is not None and wait.overdue

    def oldest_overdue_in_pool(self) -> RequestKey | None:
        oldest = self._overdue_in_pool.first()
        return None if oldest is None else oldest[1]

    def check_integrity(self) -> None:
        """Raises AccountingError where the orders do not match the requests."""
        in_time = sum(not wait.overdue for wait in self._waits.values())
        late = sum(wait.overdue and wait.in_pool for wait in self._waits.values())
        if in_time != len(self._in_time) or late != len(self._overdue_in_pool):
            raise AccountingError("the waiting times do not match the requests that wait")
