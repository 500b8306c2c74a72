"""What waits in the two candidate buffers (paper, section 3.4), as a decode instance sees it: lengths, never KV.

In each buffer overdue candidates go first, in the order in which they became overdue; then the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from alignedserve.request import RequestKey
from alignedserve.scheduler.events import BufferKind
from alignedserve.scheduler.plan import Candidate

MOST_EARLY_URGENT = 4096


class CandidateBuffers:
    """The waiting candidates of one decode instance. Every operation is O(1) a request."""

    def __init__(self) -> None:
        self._normal: dict[BufferKind, dict[RequestKey, Candidate]] = {kind: {} for kind in BufferKind}
        self._overdue: dict[BufferKind, dict[RequestKey, Candidate]] = {kind: {} for kind in BufferKind}
        self._kind: dict[RequestKey, BufferKind] = {}
        self._early_urgent: dict[RequestKey, None] = {}  # marked urgent before they were announced

    def __len__(self) -> int:
        return len(self._kind)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._kind)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._kind

    def add(self, candidate: Candidate) -> None:
        """A candidate that is here already is replaced and keeps its place where it is as urgent as before."""
        key = candidate.key
        known = self._kind.get(key)
        was_overdue = known is not None and key in self._overdue[known]
        if known is not None and known is not candidate.buffer:
            self.remove(key)
        if (key in self._early_urgent or was_overdue) and not candidate.overdue:
            candidate = replace(candidate, overdue=True)
        self._early_urgent.pop(key, None)
        if candidate.overdue:
            self._normal[candidate.buffer].pop(key, None)
        queue = self._overdue if candidate.overdue else self._normal
        queue[candidate.buffer][key] = candidate
        self._kind[key] = candidate.buffer

    def remove(self, key: RequestKey) -> Candidate | None:
        """The candidate that was removed, or None where there is none (a later announcement is then not urgent)."""
        self._early_urgent.pop(key, None)
        kind = self._kind.pop(key, None)
        if kind is None:
            return None
        return self._normal[kind].pop(key, None) or self._overdue[kind].pop(key)

    def mark_overdue(self, key: RequestKey) -> None:
        """The candidate goes first; also one that comes later, since the mark may overtake the announcement."""
        kind = self._kind.get(key)
        if kind is None:
            self._early_urgent[key] = None
            if len(self._early_urgent) > MOST_EARLY_URGENT:  # marks of requests that never came
                del self._early_urgent[next(iter(self._early_urgent))]
            return
        candidate = self._normal[kind].pop(key, None)
        if candidate is not None:
            self._overdue[kind][key] = replace(candidate, overdue=True)

    def overdue(self, kind: BufferKind) -> Iterable[Candidate]:
        """Oldest first. Not to be changed while it is iterated over."""
        return self._overdue[kind].values()

    def normal(self, kind: BufferKind) -> Iterable[Candidate]:
        """Oldest first. Not to be changed while it is iterated over."""
        return self._normal[kind].values()

    def in_order(self, kind: BufferKind) -> Iterator[Candidate]:
        """Overdue ones first. Not to be changed while it is iterated over."""
        return chain(self._overdue[kind].values(), self._normal[kind].values())

    def count(self, kind: BufferKind) -> int:
        return len(self._normal[kind]) + len(self._overdue[kind])

    def has_overdue(self, kind: BufferKind) -> bool:
        return bool(self._overdue[kind])
