"""Ranks of priorities, and whose turn it is: the least rank's, but no other is passed over for ever (ADR 60)."""

from __future__ import annotations

import math
from collections.abc import Collection

from alignedserve.request import BATCH_PRIORITY

EXACT = 8  # priorities from -8 to 8 each have a rank
BACKGROUND = EXACT - 2 + (BATCH_PRIORITY - 1).bit_length()
"""The rank of all priorities from BATCH_PRIORITY on. Such requests take only what all others leave."""


def rank_of(priority: int) -> int:
    """A number from -BACKGROUND to BACKGROUND; never higher for a lower priority.

    Beyond EXACT a rank is a power of two, so that a client that sends times as priorities makes few ranks.
    """
    if not priority:
        return 0
    size = abs(priority)
    rank = size if size <= EXACT else BACKGROUND if size >= BATCH_PRIORITY else EXACT - 3 + size.bit_length()
    return rank if priority > 0 else -rank


class Turns:
    """A rank that waits gets a turn once `most` of lower ranks were served since its last one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._passed: dict[int, int] = {}  # how many of lower ranks were served since its last turn

    def next(self, waiting: Collection[int]) -> int:
        """Whose turn it is of the ranks that wait, at least one."""
        least = min(waiting)
        due = [rank for rank in waiting if rank != least and self._passed.get(rank, 0) >= self._most]
        return max(due, key=lambda rank: (self._passed[rank], -rank)) if due else least

    def served(self, rank: int, waiting: Collection[int]) -> None:
        """One of `rank` was served. `waiting`: the ranks that wait."""
        for other in waiting:
            if other > rank:
                self._passed[other] = self._passed.get(other, 0) + 1

    def had(self, rank: int) -> None:
        """The rank has had its turn."""
        self._passed.pop(rank, None)


def objective_s(own_s: float, rank: int, default_s: float) -> float:
    """The wait objective of a request. `own_s`: 0 if it has none; one above rank 0 is then never overdue.

    Otherwise a backlog without hurry would soon be overdue, and go before all others.
    """
    return own_s or (math.inf if rank > 0 else default_s)
