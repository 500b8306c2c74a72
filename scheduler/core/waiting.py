"""Starvation and dynamic scheduling (paper, section 3.5).

Waiting is counted for each request, from the end of its prefill (or its eviction) until it decodes, whatever store it
is in meanwhile: the time stamp of a node says nothing of one old request in a subtree that keeps yielding batches.
The threshold is tied to the request's objective, and adjusted at run time (ADR 24).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.age_order import AgeOrder
from alignedserve.scheduler.deadlines import Deadlines


def join_range(shortest_tokens: int, longest_tokens: int, window: float) -> tuple[int, int]:
    """Lengths that match a running batch: within `window` (a share) of its own."""
    return int(shortest_tokens * (1.0 - window)), int(longest_tokens * (1.0 + window)) + 1


def _two_digits(seconds: float) -> float:
    """Never more than the request asked for; so that there are no more orders than a few hundred."""
    rounded = float(f"{seconds:.1e}")
    if rounded <= seconds:
        return rounded
    digits, _, exponent = f"{seconds:.15e}".partition("e")
    return float(f"{digits[:3]}e{exponent}")


GAIN = 0.02  # of the late share: the last fifty requests or so
SHORTER, LONGER = 0.98, 1.005  # the threshold's steps, one for each request that begins to decode
FEW_OBJECTIVES, LOOK_S = 8, 0.01  # with more of them than that who is overdue is looked up so often, not in each event
LEAST_SHARE = 0.25  # of an objective: the threshold is never shorter
DELAY_GAIN = 0.1  # of `delay_share`: the last ten late requests or so


@dataclass(slots=True)
class _Wait:
    since_s: float
    objective_s: float
    in_pool: bool = True
    overdue: bool = False
    overdue_since_s: float = math.inf  # when it was found so

    @property
    def due_s(self) -> float:
        return self.since_s + self.objective_s


class WaitingClock:
    """Who has waited past the threshold, in the pool or prefetched. O(1) an operation, but for the few out of order.

    The threshold is a share of each request's objective (`objective_s` where it has none): all of it, as long as no
    more than `late_share` of the requests that began to decode lately were late, that is, past their objective; else
    less, so that what is about to be late goes first sooner. What a late request still waited once it went first says
    how much less would have saved it: the threshold is shortened by no more, and not at all where even LEAST_SHARE
    would not have been enough, or while most of what waits is overdue. Going first would then mean going in the order
    of arrival, with less throughput, and more would be late.
    """

    def __init__(self, objective_s: float, late_share: float = 1.0) -> None:
        self.late = 0.0  # share of the requests that began to decode lately
        self.threshold_share = 1.0  # of an objective
        self.delay_share = 0.0  # of the objectives of late requests: how long they waited on once they were overdue
        self._objective_s = objective_s
        self._most_late = late_share
        self._waits: dict[RequestKey, _Wait] = {}
        self._in_time: dict[float, AgeOrder] = {}  # by objective
        self._overdue_in_pool = Deadlines()
        self._look_again_s = -math.inf
        self._overdue = 0

    def __len__(self) -> int:
        return len(self._waits)

    def start(self, key: RequestKey, since_s: float, objective_s: float = 0.0) -> None:
        """The request waits in the pool, since `since_s`. Its objective counts to two digits, cut; 0: it has none."""
        if key in self._waits:
            raise AccountingError(f"{key} waits already", request_id=key.request_id)
        objective_s = _two_digits(objective_s) if objective_s else self._objective_s
        self._waits[key] = _Wait(since_s, objective_s)
        self._in_time.setdefault(objective_s, AgeOrder()).add(key, since_s)

    def leave_pool(self, key: RequestKey) -> None:
        """It was prefetched, and waits on in a candidate buffer."""
        wait = self._waits[key]
        if wait.overdue and wait.in_pool:
            self._overdue_in_pool.discard(key)
        wait.in_pool = False

    def stop(self, key: RequestKey) -> float:
        """It was given back, or has ended. Since when it waited."""
        wait = self._waits.pop(key)
        self._overdue -= wait.overdue
        if not wait.overdue:
            order = self._in_time[wait.objective_s]
            order.remove(key, wait.since_s)
            if not len(order):
                del self._in_time[wait.objective_s]
        elif wait.in_pool:
            self._overdue_in_pool.discard(key)
        return wait.since_s

    def decode(self, key: RequestKey, now_s: float) -> None:
        """It decodes: the wait is over, and says whether the threshold is right."""
        wait = self._waits[key]
        late = now_s >= wait.due_s
        mostly_overdue = 2 * self._overdue > len(self._waits)
        self.stop(key)
        self.late += GAIN * (late - self.late)
        if late and wait.objective_s:
            delay_s = max(0.0, now_s - wait.overdue_since_s)
            self.delay_share += DELAY_GAIN * (delay_s / wait.objective_s - self.delay_share)
        self._adjust(can_help=not mostly_overdue and self.delay_share < 1.0 - LEAST_SHARE)

    def _adjust(self, *, can_help: bool) -> None:
        """A step of the threshold. `can_help`: a shorter one may save late requests."""
        enough = 1.0 - self.delay_share  # late requests would have been just in time
        if self.late > self._most_late and can_help:
            shorten, lengthen = self.threshold_share > enough, self.threshold_share < enough * SHORTER
        else:
            shorten, lengthen = False, not self._most_late / 2 < self.late <= self._most_late
        if shorten:
            self.threshold_share = max(LEAST_SHARE, self.threshold_share * SHORTER)
        elif lengthen:
            self.threshold_share = min(1.0, self.threshold_share * LONGER)

    def newly_overdue(self, now_s: float) -> list[RequestKey]:
        """Those that passed the threshold since this was last asked, the one that is due first first."""
        if len(self._in_time) > FEW_OBJECTIVES and now_s < self._look_again_s:
            return []
        self._look_again_s = now_s + LOOK_S
        found = []
        for objective_s, order in list(self._in_time.items()):
            since_most_s = now_s - objective_s * self.threshold_share
            while (oldest := order.first()) is not None and oldest[0] <= since_most_s:
                since_s, key = oldest
                order.remove(key, since_s)
                wait = self._waits[key]
                wait.overdue, wait.overdue_since_s = True, now_s
                self._overdue += 1
                if wait.in_pool:
                    self._overdue_in_pool.set(key, wait.due_s)
                found.append((wait.due_s, key))
            if not len(order):
                del self._in_time[objective_s]
        return [key for _, key in sorted(found)]

    def is_overdue(self, key: RequestKey) -> bool:
        wait = self._waits.get(key)
        return wait is not None and wait.overdue

    def due_s(self, key: RequestKey) -> float:
        """When the objective of one that waits ends."""
        return self._waits[key].due_s

    def oldest_overdue_in_pool(self) -> RequestKey | None:
        """The one that is, or was, due first."""
        oldest = self._overdue_in_pool.first()
        return None if oldest is None else oldest[1]

    def check_integrity(self) -> None:
        """Raises AccountingError where the orders do not match the requests."""
        in_time = sum(not wait.overdue for wait in self._waits.values())
        late = sum(wait.overdue and wait.in_pool for wait in self._waits.values())
        if (in_time, late, len(self._waits) - in_time) != (
            sum(map(len, self._in_time.values())),
            len(self._overdue_in_pool),
            self._overdue,
        ):
            raise AccountingError("the waiting times do not match the requests that wait")
