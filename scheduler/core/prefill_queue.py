"""Groups that wait for a prefill instance: those of the least rank of priorities first, and first come, first served.

Groups of one rank that were begun and lost take priority over new ones: their clients are waiting in the middle of an
answer. A rank that waits has a turn after MOST_OVERTAKES groups of lower ranks.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey
from alignedserve.scheduler.cache.recent import Place
from alignedserve.scheduler.priorities import BACKGROUND, Turns

MOST_OVERTAKES = 64  # groups of lower ranks that are begun before a rank has its turn


@dataclass(slots=True)
class QueuedGroup:
    """The `n` answers to one prompt of `tokens` tokens, prefilled once, together.

    `kept_tokens`: the number of tokens whose KV the pool already holds. `cached`: (shard, tokens) of what prefix caches
    have, each only for instances of its own node. `coming`: how many of its first tokens were known when it was queued
    (`scheduler/cache/recent.py`); `recent`: where they are, looked up again before it is begun. `reads_s`: by shard,
    the predicted time until what is on disk of it is in memory.
    """

    keys: list[RequestKey]
    tokens: int
    kept_tokens: int = 0
    rank: int = 0
    cached: tuple[tuple[str, int], ...] = ()
    coming: int = 0
    recent: Sequence[tuple[int, Place]] = ()
    reads_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def work_tokens(self) -> int:
        """Tokens to be computed where least must be."""
        return self.tokens - max(self.kept_tokens, self.coming, max((tokens for _, tokens in self.cached), default=0))

    @property
    def best(self) -> tuple[str, int]:
        """The shard that has most of the prompt, and how many tokens; ("", 0) if none has any, or its KV is kept."""
        if self.kept_tokens:
            return "", 0
        stored = ((place.pool_id, tokens) for tokens, place in self.recent if place.pool_id)
        return max(itertools.chain(self.cached, stored), key=lambda found: found[1], default=("", 0))

    def work_at(self, pool_id: str, prefill_id: str = "") -> int:
        """Tokens to be computed by this instance, which writes to this shard."""
        here = next((tokens for shard, tokens in self.cached if shard == pool_id), 0) if self.cached else 0
        soon = next((tokens for tokens, place in self.recent if place.near(prefill_id, pool_id)), 0)
        return self.tokens - max(self.kept_tokens, here, soon)


@dataclass(slots=True)
class _Line:
    """The groups of one rank by number, since a key may leave its group and return; lost ones have negative numbers."""

    groups: OrderedDict[int, QueuedGroup] = field(default_factory=OrderedDict)
    lost: OrderedDict[int, QueuedGroup] = field(default_factory=OrderedDict)
    requests: int = 0
    tokens: int = 0  # to be computed

    def part(self, number: int) -> OrderedDict[int, QueuedGroup]:
        return self.lost if number < 0 else self.groups

    @property
    def first(self) -> OrderedDict[int, QueuedGroup]:
        return self.lost or self.groups


class PrefillQueue:
    """Every operation is O(1) for a few ranks, except `cancel` in a group of n, which is O(n)."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}  # by rank; none is empty
        self._place_of: dict[RequestKey, tuple[int, int]] = {}  # (rank, number)
        self._numbers = itertools.count(1)
        self._turns = Turns(MOST_OVERTAKES)

    def __len__(self) -> int:
        """Number of requests, not groups."""
        return len(self._place_of)

    @property
    def tokens(self) -> int:
        """To be computed, of all groups."""
        return sum(line.tokens for line in self._lines.values())

    def ahead(self) -> tuple[int, int]:
        """(requests, tokens to be computed) of the groups with hurry: they go before the others."""
        lines = [line for rank, line in self._lines.items() if rank < BACKGROUND]
        return sum(line.requests for line in lines), sum(line.tokens for line in lines)

    def add(
        self,
        keys: list[RequestKey],
        tokens: int,
        kept_tokens: int = 0,
        *,
        again: bool = False,
        rank: int = 0,
        cached: tuple[tuple[str, int], ...] = (),
        coming: int = 0,
    ) -> None:
        """Queue a group. `again`: it was begun before, and lost."""
        if any(key in self._place_of for key in keys):
            raise AccountingError(f"{keys[0]} or one of its group is already queued")
        number = -next(self._numbers) if again else next(self._numbers)
        group = QueuedGroup(list(keys), tokens, kept_tokens, rank, cached, coming)
        line = self._lines.setdefault(rank, _Line())
        line.part(number)[number] = group
        line.requests += len(keys)
        line.tokens += group.work_tokens
        self._place_of.update(dict.fromkeys(keys, (rank, number)))

    def work_of(self, key: RequestKey) -> int:
        """Tokens to be computed of a queued request's group, where least must be."""
        rank, number = self._place_of[key]
        return self._lines[rank].part(number)[number].work_tokens

    def head(self) -> QueuedGroup | None:
        """The next group; it stays queued."""
        return next(iter(self._lines[self._next()].first.values())) if self._lines else None

    def pop(self) -> QueuedGroup:
        """Remove and return the next group. Raises AccountingError if there is none."""
        if not self._lines:
            raise AccountingError("the prefill queue is empty")
        rank = self._next()
        line = self._lines[rank]
        _, group = line.first.popitem(last=False)
        for key in group.keys:
            del self._place_of[key]
        self._turns.served(rank, self._lines)
        self._turns.had(rank)
        self._less(rank, line, len(group.keys), group.work_tokens)
        return group

    def give_way(self) -> bool:
        """The next group cannot be begun: if it has overtaken lower ranks in its turn, they go first after all.

        Returns False if it is of the least rank anyway.
        """
        rank = self._next()
        self._turns.had(rank)
        return rank != min(self._lines)

    def lose_kept(self, key: RequestKey) -> None:
        """The pool has dropped its copy of a queued request: all of its tokens are to be computed."""
        rank, number = self._place_of[key]
        line = self._lines[rank]
        group = line.part(number)[number]
        line.tokens -= group.work_tokens
        group.kept_tokens = 0
        line.tokens += group.work_tokens

    def cancel(self, key: RequestKey) -> bool:
        """Remove a request from its group, and an empty group from the queue. Returns False if it is not queued."""
        place = self._place_of.pop(key, None)
        if place is None:
            return False
        rank, number = place
        line = self._lines[rank]
        group = line.part(number)[number]
        group.keys.remove(key)
        tokens = 0
        if not group.keys:
            del line.part(number)[number]
            tokens = group.work_tokens
        self._less(rank, line, 1, tokens)
        return True

    def last_behind(self, rank: int) -> Iterator[QueuedGroup]:
        """New groups of higher ranks, the last of the highest rank first. Must not be changed during iteration."""
        for other in sorted(self._lines, reverse=True):
            if other <= rank:
                return
            yield from reversed(self._lines[other].groups.values())

    def _next(self) -> int:
        return next(iter(self._lines)) if len(self._lines) == 1 else self._turns.next(self._lines)

    def _less(self, rank: int, line: _Line, requests: int, tokens: int) -> None:
        line.requests -= requests
        line.tokens -= tokens
        if not line.requests:
            del self._lines[rank]

    def check_integrity(self) -> None:
        members, right = {}, True
        for rank, line in self._lines.items():
            groups = {**line.groups, **line.lost}
            found = {key: (rank, number) for number, group in groups.items() for key in group.keys}
            members.update(found)
            work = sum(group.work_tokens for group in groups.values())
            right &= bool(found) and line.requests == len(found) and line.tokens == work
        if not right or members != self._place_of:
            raise AccountingError("the prefill queue does not match a recount")
