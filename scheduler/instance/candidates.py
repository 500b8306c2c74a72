"""The candidates in the two candidate buffers (paper, section 3.4), as a decode instance sees them: without KV.

Overdue candidates of either buffer come first, earliest deadline first; the others follow by the rank of their
priority, and in order of arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import BufferKind, Candidate
from alignedserve.scheduler.priorities import Turns

MOST_EARLY_OVERDUE = 4096
MOST_OVERTAKES = 64  # joins of lower ranks before one of a rank that waits has its turn


class CandidateBuffers:
    """The candidates of one decode instance. O(1) for each; for overdue ones O(log n) and the move of a list's tail."""

    def __init__(self) -> None:
        self._normal: dict[BufferKind, dict[RequestKey, Candidate]] = {kind: {} for kind in BufferKind}
        self._overdue: dict[BufferKind, dict[RequestKey, Candidate]] = {kind: {} for kind in BufferKind}
        self._by_due: list[tuple[float, RequestKey]] = []  # the overdue candidates of both buffers
        self._kind: dict[RequestKey, BufferKind] = {}
        self._turns = Turns(MOST_OVERTAKES)
        self._ranks: dict[int, int] = {}  # how many candidates have each rank
        self._early_overdue: dict[RequestKey, float] = {}  # marked overdue before they were announced: when each is due

    def __len__(self) -> int:
        return len(self._kind)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._kind)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._kind

    def add(self, candidate: Candidate) -> None:
        """Add a candidate.

        A known candidate is replaced in its place, and keeps its earlier deadline if it was overdue.
        """
        key = candidate.key
        due_s = min(candidate.due_s, self._early_overdue.pop(key, math.inf))
        known = self._kind.get(key)
        if known is not None:
            was = self._overdue[known].get(key)
            due_s = due_s if was is None else min(due_s, was.due_s)
            if was is not None or due_s < math.inf or known is not candidate.buffer:
                self.remove(key)
                known = None
        if due_s < math.inf:
            candidate = candidate if due_s == candidate.due_s else replace(candidate, due_s=due_s)
            self._overdue[candidate.buffer][key] = candidate
            insort(self._by_due, (due_s, key))
        else:
            self._normal[candidate.buffer][key] = candidate
        self._kind[key] = candidate.buffer
        if known is None:
            self._ranks[candidate.rank] = self._ranks.get(candidate.rank, 0) + 1

    def remove(self, key: RequestKey) -> Candidate | None:
        """Remove and return the candidate; None if it is unknown. A later announcement is then not overdue."""
        self._early_overdue.pop(key, None)
        kind = self._kind.pop(key, None)
        if kind is None:
            return None
        candidate = self._normal[kind].pop(key, None)
        if candidate is None:
            candidate = self._overdue[kind].pop(key)
            del self._by_due[bisect_left(self._by_due, (candidate.due_s, key))]
        self._ranks[candidate.rank] -= 1
        if not self._ranks[candidate.rank]:
            del self._ranks[candidate.rank]
        return candidate

    def mark_overdue(self, key: RequestKey, due_s: float) -> None:
        """Give the candidate priority, even if it is announced later: the mark may overtake the announcement."""
        kind = self._kind.get(key)
        if kind is None:
            self._early_overdue[key] = due_s
            if len(self._early_overdue) > MOST_EARLY_OVERDUE:  # marks of requests that never came
                del self._early_overdue[next(iter(self._early_overdue))]
            return
        candidate = self._normal[kind].get(key) or self._overdue[kind][key]
        if due_s < candidate.due_s:
            self.add(replace(candidate, due_s=due_s))

    def overdue(self) -> Iterator[Candidate]:
        """The overdue candidates of both buffers, earliest deadline first. Must not be changed during iteration."""
        return (self._overdue[self._kind[key]][key] for _, key in self._by_due)

    def first_due_s(self) -> float:
        """The earliest deadline of the overdue candidates; infinite if none is overdue."""
        return self._by_due[0][0] if self._by_due else math.inf

    @property
    def ranks(self) -> Collection[int]:
        """Of all candidates. Changes with them."""
        return self._ranks.keys()

    def in_turn(self) -> list[int]:
        """The ranks of all candidates: the least join first, except where another has its turn."""
        ranks = sorted(self._ranks)
        if len(ranks) > 1:
            first = self._turns.next(ranks)
            ranks.sort(key=lambda rank: rank != first)
        return ranks

    def count_turn(self, rank: int, joined: int) -> None:
        """So many of the rank have joined and been removed."""
        if joined and self._ranks.keys() - {rank}:
            self._turns.had(rank)
            for _ in range(joined):
                self._turns.served(rank, self._ranks)

    def normal(self, kind: BufferKind, rank: int | None = None) -> Iterable[Candidate]:
        """Oldest first; with `rank` those of this rank. Must not be changed during iteration."""
        candidates = self._normal[kind].values()
        if rank is None or len(self._ranks) == 1:
            return candidates
        return [candidate for candidate in candidates if candidate.rank == rank]

    def first(self, rank: int) -> Candidate | None:
        """A candidate of this rank that is not overdue."""
        found = (candidate for kind in BufferKind for candidate in self.normal(kind, rank))
        return next(found, None)

    def of(self, kind: BufferKind) -> Iterator[Candidate]:
        """All candidates of a buffer. Must not be changed during iteration."""
        return chain(self._overdue[kind].values(), self._normal[kind].values())

    def count(self, kind: BufferKind, rank: int | None = None) -> int:
        """With `rank`: overdue candidates, and those of no higher rank."""
        normal = self._normal[kind]
        if rank is None or len(self._ranks) == 1:
            return len(normal) + len(self._overdue[kind])
        return len(self._overdue[kind]) + sum(candidate.rank <= rank for candidate in normal.values())

    def has_overdue(self, kind: BufferKind) -> bool:
        return bool(self._overdue[kind])
