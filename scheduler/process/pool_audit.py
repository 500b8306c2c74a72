"""Finds what nobody needs any more in the pool, where the word that it was done with got lost with a process.

A worker's report that a request has ended goes to a scheduler that may just have died, a release to a pool that may
just have died, a gateway may die with the scheduler that knew its requests. After each such loss every shard of the
pool is asked what it holds; what this scheduler does not know is shown to every gateway, and released if none has it
open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.request import RequestKey

SETTLE_S = 2.0  # reports that are on their way arrive, gateways connect
EVERY_S = 60.0
# Lost requests of each gateway that are remembered, newest first; the audit finds what is older.
KEPT = 4096


class PoolAudit:
    """Decides when to ask which process; `actor.py` sends and receives. `knows`: whether a request is known here."""

    def __init__(self, knows: Callable[[RequestKey], bool]) -> None:
        self._knows = knows
        self._due_s = SETTLE_S
        self._started_s: float | None = None
        self._unheard: set[str] = set()  # shards that were asked and have not answered
        self._unknown: set[RequestKey] = set()
        self._asked: set[str] = set()  # gateways

    def suspect(self, now_s: float) -> None:
        """Something was lost: look soon, and anew where a look is under way."""
        if self._started_s is None:
            self._due_s = min(self._due_s, now_s + SETTLE_S)
        else:
            self.postpone(now_s)

    def postpone(self, now_s: float) -> None:
        """Whom to ask is not there now: not before a while from now."""
        self._started_s = None
        self._due_s = now_s + SETTLE_S

    def start(self, now_s: float, pool_ids: Iterable[str]) -> bool:
        """Whether to ask these shards for their inventories now."""
        if self._started_s is not None and now_s - self._started_s > EVERY_S:
            self._started_s = None  # an answer that never came
        if self._started_s is not None or now_s < self._due_s:
            return False
        self._started_s = now_s
        self._due_s = now_s + EVERY_S
        self._unheard = set(pool_ids)
        self._unknown.clear()
        self._asked.clear()
        return True

    def inventory(self, pool_id: str, held: Iterable[RequestKey], gateways: Iterable[str]) -> list[RequestKey]:
        """A shard's answer: what to show to all `gateways`, once all shards have answered."""
        if self._started_s is None or pool_id not in self._unheard:
            return []
        self._unheard.discard(pool_id)
        self._unknown.update(key for key in held if not self._knows(key))
        if self._unheard:
            return []
        self._asked = set(gateways)
        if not self._unknown:
            self._started_s = None
        return sorted(self._unknown)

    def claimed(self, gateway_id: str, keys: Iterable[RequestKey]) -> list[RequestKey]:
        """A gateway's answer: what to release, once all have answered."""
        if self._started_s is None or gateway_id not in self._asked:
            return []
        self._asked.discard(gateway_id)
        self._unknown.difference_update(keys)
        return self.verdict()

    def verdict(self) -> list[RequestKey]:
        """What nobody claims, where nobody is left to ask."""
        if self._started_s is None or self._unheard or self._asked:
            return []
        self._started_s = None
        return [key for key in self._unknown if not self._knows(key)]


class LeftBehind:
    """Which requests each gateway was told to be lost. What has gone on since has a new key: it is not meant."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[RequestKey, None]] = {}

    def note(self, gateway_id: str, keys: Iterable[RequestKey]) -> None:
        known = self._keys.setdefault(gateway_id, {})
        known.update(dict.fromkeys(keys))
        while len(known) > KEPT:
            del known[next(iter(known))]

    def take(self, gateway_id: str) -> tuple[RequestKey, ...]:
        """Those of a gateway that does not come back."""
        return tuple(self._keys.pop(gateway_id, ()))
