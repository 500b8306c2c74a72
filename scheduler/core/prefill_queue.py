"""Groups that wait for a prefill instance, first come, first served.

Groups that were begun and lost take priority over new ones: their clients are waiting in the middle of an answer.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey


@dataclass(slots=True)
class QueuedGroup:
    """The `n` answers to one prompt of `tokens` tokens, prefilled once, together.

    `kept_tokens`: the number of tokens whose KV the pool already holds.
    """

    keys: list[RequestKey]
    tokens: int
    kept_tokens: int = 0

    @property
    def work_tokens(self) -> int:
        """Tokens to be computed."""
        return self.tokens - self.kept_tokens


class PrefillQueue:
    """FCFS. Every operation is O(1), except `cancel` in a group of n, which is O(n)."""

    def __init__(self) -> None:
        # By number, since a key may leave its group and return; lost groups have negative numbers.
        self._groups: OrderedDict[int, QueuedGroup] = OrderedDict()
        self._lost: OrderedDict[int, QueuedGroup] = OrderedDict()
        self._group_of: dict[RequestKey, int] = {}
        self._numbers = itertools.count(1)
        self.tokens = 0  # to be computed, of all groups

    def __len__(self) -> int:
        """Number of requests, not groups."""
        return len(self._group_of)

    def add(self, keys: list[RequestKey], tokens: int, kept_tokens: int = 0, *, again: bool = False) -> None:
        """Queue a group. `again`: it was begun before, and lost."""
        if any(key in self._group_of for key in keys):
            raise AccountingError(f"{keys[0]} or one of its group is already queued")
        number = -next(self._numbers) if again else next(self._numbers)
        group = QueuedGroup(list(keys), tokens, kept_tokens)
        self._line(number)[number] = group
        self._group_of.update(dict.fromkeys(keys, number))
        self.tokens += group.work_tokens

    def head(self) -> QueuedGroup | None:
        """The next group; it stays queued."""
        return next(iter((self._lost or self._groups).values()), None)

    def pop(self) -> QueuedGroup:
        """Remove and return the next group. Raises AccountingError if there is none."""
        line = self._lost or self._groups
        if not line:
            raise AccountingError("the prefill queue is empty")
        _, group = line.popitem(last=False)
        for key in group.keys:
            del self._group_of[key]
        self.tokens -= group.work_tokens
        return group

    def lose_kept(self, key: RequestKey) -> None:
        """The pool has dropped its copy of a queued request: all of its tokens are to be computed."""
        number = self._group_of[key]
        group = self._line(number)[number]
        self.tokens += group.kept_tokens
        group.kept_tokens = 0

    def cancel(self, key: RequestKey) -> bool:
        """Remove a request from its group, and an empty group from the queue. Returns False if it is not queued."""
        number = self._group_of.pop(key, None)
        if number is None:
            return False
        group = self._line(number)[number]
        group.keys.remove(key)
        if not group.keys:
            del self._line(number)[number]
            self.tokens -= group.work_tokens
        return True

    def _line(self, number: int) -> OrderedDict[int, QueuedGroup]:
        return self._lost if number < 0 else self._groups

    def check_integrity(self) -> None:
        groups = {**self._groups, **self._lost}
        members = {key: number for number, group in groups.items() for key in group.keys}
        if members != self._group_of or self.tokens != sum(group.work_tokens for group in groups.values()):
            raise AccountingError("the prefill queue does not match a recount")
