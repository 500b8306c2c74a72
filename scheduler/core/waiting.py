"""Starvation and dynamic scheduling (paper, section 3.5).

The wait is counted for each request, from the end of its prefill (or its eviction) until it decodes, whatever store
holds it meanwhile. A time stamp on a tree node would miss a single old request in a subtree that keeps yielding
batches. The threshold is tied to the request's wait objective, and adjusted at run time (ADR 24).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.age_order import AgeOrder
from alignedserve.scheduler.deadlines import Deadlines


def _two_digits(seconds: float) -> float:
    """Round down to two digits: never above the requested objective, and at most a few hundred distinct orders."""
    rounded = float(f"{seconds:.1e}")
    if rounded <= seconds:
        return rounded
    digits, _, exponent = f"{seconds:.15e}".partition("e")
    return float(f"{digits[:3]}e{exponent}")


GAIN = 0.02  # of the late share: about the last fifty requests
SHORTER, LONGER = 0.98, 1.005  # the threshold's steps, one for each request that joins
# With more distinct objectives than this, overdue requests are looked up every LOOK_S, not at each event
FEW_OBJECTIVES, LOOK_S = 8, 0.01
LEAST_SHARE = 0.25  # of an objective: the threshold is never shorter
DELAY_GAIN = 0.1  # of `delay_share`: about the last ten late requests


@dataclass(slots=True)
class _Wait:
    since_s: float
    objective_s: float
    in_pool: bool = True
    overdue: bool = False
    overdue_since_s: float = math.inf  # when it was found to be overdue

    @property
    def due_s(self) -> float:
        return self.since_s + self.objective_s


class WaitingClock:
    """Finds requests, in the pool or prefetched, that have waited past the threshold.

    O(1) an operation in nearly all cases. The threshold is a share of each request's wait objective (`objective_s` if
    it has none). It is the whole objective while no more than `late_share` of the requests that recently began to
    decode were late, that is, past their objective. Otherwise it is shortened, so that requests about to be late get
    priority sooner. The time that late requests still waited after they got priority tells how much shorter it must be:
    it is shortened by no more than that. It is not shortened at all if even LEAST_SHARE would not have been enough, or
    while most waiting requests are overdue. Priority would then mean order of arrival, with less throughput, and more
    requests would be late.
    """

    def __init__(self, objective_s: float, late_share: float = 1.0) -> None:
        self.late = 0.0  # share of the requests that recently began to decode
        self.threshold_share = 1.0  # of an objective
        self.delay_share = 0.0  # how long late requests waited after they were overdue, as a share of their objectives
        self._objective_s = objective_s
        self._most_late = late_share
        self._waits: dict[RequestKey, _Wait] = {}
        self._in_time: dict[float, AgeOrder[RequestKey]] = {}  # by objective
        self._overdue_in_pool = Deadlines[RequestKey]()
        self._look_again_s = -math.inf
        self._overdue = 0

    def __len__(self) -> int:
        return len(self._waits)

    def start(self, key: RequestKey, since_s: float, objective_s: float = 0.0) -> None:
        """The request waits in the pool since `since_s`. Its objective is cut to two digits; 0: the default."""
        if key in self._waits:
            raise AccountingError(f"{key} is already waiting", request_id=key.request_id)
        objective_s = _two_digits(objective_s) if objective_s else self._objective_s
        self._waits[key] = _Wait(since_s, objective_s)
        self._in_time.setdefault(objective_s, AgeOrder()).add(key, since_s)

    def leave_pool(self, key: RequestKey) -> None:
        """It was prefetched, and continues to wait in a candidate buffer."""
        wait = self._waits[key]
        if wait.overdue and wait.in_pool:
            self._overdue_in_pool.discard(key)
        wait.in_pool = False

    def stop(self, key: RequestKey) -> float:
        """It was returned, or has ended. Returns since when it waited."""
        wait = self._waits.pop(key)
        self._overdue -= wait.overdue
        if not wait.overdue:
            order = self._in_time[wait.objective_s]
            order.remove(key, wait.since_s)
            if not order:
                del self._in_time[wait.objective_s]
        elif wait.in_pool:
            self._overdue_in_pool.discard(key)
        return wait.since_s

    def decode(self, key: RequestKey, now_s: float) -> None:
        """It decodes: the wait is over. Adjusts the threshold by whether it was late."""
        wait = self._waits[key]
        late = now_s >= wait.due_s
        mostly_overdue = 2 * self._overdue > len(self._waits)
        self.stop(key)
        if wait.objective_s == math.inf:  # it could not be late
            return
        self.late += GAIN * (late - self.late)
        if late and wait.objective_s:
            delay_s = max(0.0, now_s - wait.overdue_since_s)
            self.delay_share += DELAY_GAIN * (delay_s / wait.objective_s - self.delay_share)
        self._adjust(can_help=not mostly_overdue and self.delay_share < 1.0 - LEAST_SHARE)

    def _adjust(self, *, can_help: bool) -> None:
        """One adjustment step of the threshold. `can_help`: a shorter one may save late requests."""
        enough = 1.0 - self.delay_share  # at this share late requests would have been just in time
        if self.late > self._most_late and can_help:
            shorten, lengthen = self.threshold_share > enough, self.threshold_share < enough * SHORTER
        else:
            shorten, lengthen = False, not self._most_late / 2 < self.late <= self._most_late
        if shorten:
            self.threshold_share = max(LEAST_SHARE, self.threshold_share * SHORTER)
        elif lengthen:
            self.threshold_share = min(1.0, self.threshold_share * LONGER)

    def newly_overdue(self, now_s: float) -> list[RequestKey]:
        """The requests that passed the threshold since the last call, earliest deadline first."""
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
            if not order:
                del self._in_time[objective_s]
        return [key for _, key in sorted(found)]

    def is_overdue(self, key: RequestKey) -> bool:
        wait = self._waits.get(key)
        return wait is not None and wait.overdue

    def due_s(self, key: RequestKey) -> float:
        """When the objective of a waiting request ends."""
        return self._waits[key].due_s

    def oldest_overdue_in_pool(self) -> RequestKey | None:
        """The overdue request in the pool with the earliest deadline."""
        oldest = self._overdue_in_pool.first()
        return None if oldest is None else oldest[1]

    def check_integrity(self) -> None:
        """Raises AccountingError if the orders do not match the requests."""
        in_time = sum(not wait.overdue for wait in self._waits.values())
        late = sum(wait.overdue and wait.in_pool for wait in self._waits.values())
        if (in_time, late, len(self._waits) - in_time) != (
            sum(map(len, self._in_time.values())),
            len(self._overdue_in_pool),
            self._overdue,
        ):
            raise AccountingError("the waiting times do not match the waiting requests")
