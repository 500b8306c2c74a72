"""Finds KV in the pool that no request needs any more, because the message to release it was lost with a process.

A scheduler may die before it gets a worker's report that a request has ended, a shard's process before it gets a
release, and a gateway together with the scheduler that knew its requests. After each such loss, every shard is asked
what it holds. Requests that this scheduler does not know are sent to every gateway, and released if no gateway has them
open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.request import RequestKey

SETTLE_S = 2.0  # in this time, pending reports arrive and gateways connect
EVERY_S = 60.0
# Lost requests that are remembered for each gateway, the newest ones. The audit finds older ones.
KEPT = 4096


class PoolAudit:
    """Decides when to ask which process; `actor.py` does the messaging. `knows`: whether a request is known here."""

    def __init__(self, knows: Callable[[RequestKey], bool]) -> None:
        self._knows = knows
        self._due_s = SETTLE_S
        self._started_s: float | None = None
        self._unheard: set[str] = set()  # shards that were asked and have not answered
        self._unknown: set[RequestKey] = set()
        self._asked: set[str] = set()  # gateways

    def suspect(self, now_s: float) -> None:
        """Something was lost: an audit starts soon. An audit that is in progress starts again."""
        if self._started_s is None:
            self._due_s = min(self._due_s, now_s + SETTLE_S)
        else:
            self.postpone(now_s)

    def postpone(self, now_s: float) -> None:
        """A process to ask is not available: stops the present audit, and delays the next one by SETTLE_S."""
        self._started_s = None
        self._due_s = now_s + SETTLE_S

    def start(self, now_s: float, pool_ids: Iterable[str]) -> bool:
        """Starts an audit if one is due. Returns whether to ask these shards for their inventories now."""
        if self._started_s is not None and now_s - self._started_s > EVERY_S:
            self._started_s = None  # an answer was lost
        if self._started_s is not None or now_s < self._due_s:
            return False
        self._started_s = now_s
        self._due_s = now_s + EVERY_S
        self._unheard = set(pool_ids)
        self._unknown.clear()
        self._asked.clear()
        return True

    def inventory(self, pool_id: str, held: Iterable[RequestKey], gateways: Iterable[str]) -> list[RequestKey]:
        """Handles a shard's answer. When all shards have answered, returns the keys to send to all `gateways`."""
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
        """Handles a gateway's answer. When all gateways have answered, returns the keys to release."""
        if self._started_s is None or gateway_id not in self._asked:
            return []
        self._asked.discard(gateway_id)
        self._unknown.difference_update(keys)
        return self.verdict()

    def verdict(self) -> list[RequestKey]:
        """When all shards and gateways have answered, ends the audit and returns the keys that no gateway claims."""
        if self._started_s is None or self._unheard or self._asked:
            return []
        self._started_s = None
        return [key for key in self._unknown if not self._knows(key)]


class LeftBehind:
    """The requests that each gateway was told are lost. A request that was submitted again since has a new key, which
    is not included.
    """

    def __init__(self) -> None:
        self._keys: dict[str, dict[RequestKey, None]] = {}

    def note(self, gateway_id: str, keys: Iterable[RequestKey]) -> None:
        """Remembers requests that a gateway was told are lost, at most the KEPT newest."""
        known = self._keys.setdefault(gateway_id, {})
        known.update(dict.fromkeys(keys))
        while len(known) > KEPT:
            del known[next(iter(known))]

    def take(self, gateway_id: str) -> tuple[RequestKey, ...]:
        """Removes and returns the lost requests of a gateway that does not come back."""
        return tuple(self._keys.pop(gateway_id, ()))
