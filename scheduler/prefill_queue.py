"""Groups that wait for a prefill instance, first come, first served (systems.md, AlignedServe)."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

from alignedserve.errors import AccountingError
from alignedserve.request import RequestKey


@dataclass(slots=True)
class QueuedGroup:
    """The `n` answers to one prompt of `tokens` tokens: prefilled once, together."""

    keys: list[RequestKey]
    tokens: int


class PrefillQueue:
    """FCFS. Every operation is O(1), but for `cancel` in a group of n, which is O(n)."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, QueuedGroup] = OrderedDict()  # by a number: a key may leave its group and return
        self._group_of: dict[RequestKey, int] = {}
        self._numbers = itertools.count()
        self.tokens = 0  # prompt tokens of all groups

    def __len__(self) -> int:
        """Requests, not groups."""
        return len(self._group_of)

    def add(self, keys: list[RequestKey], tokens: int) -> None:
        if any(key in self._group_of for key in keys):
            raise AccountingError(f"{keys[0]} or one of its group is queued already")
        number = next(self._numbers)
        self._groups[number] = QueuedGroup(list(keys), tokens)
        self._group_of.update(dict.fromkeys(keys, number))
        self.tokens += tokens

    def head(self) -> QueuedGroup | None:
        """The group that is next; it stays in line."""
        return next(iter(self._groups.values()), None)

    def pop(self) -> QueuedGroup:
        """The group that is next leaves. Raises AccountingError where there is none."""
        if not self._groups:
            raise AccountingError("nothing is queued")
        _, group = self._groups.popitem(last=False)
        for key in group.keys:
            del self._group_of[key]
        self.tokens -= group.tokens
        return group

    def cancel(self, key: RequestKey) -> bool:
        """One request leaves its group, and a group without requests the queue. False where it is not queued."""
        number = self._group_of.pop(key, None)
        if number is None:
            return False
        group = self._groups[number]
        group.keys.remove(key)
        if not group.keys:
            del self._groups[number]
            self.tokens -= group.tokens
        return True

    def check_integrity(self) -> None:
        members = {key: number for number, group in self._groups.items() for key in group.keys}
        if members != self._group_of or self.tokens != sum(group.tokens for group in self._groups.values()):
            raise AccountingError("the prefill queue does not match a recount")
