"""The start of a scheduler, while it learns about its predecessor's requests.

Decode instances report the requests that they have, and shards the KV that they hold. Messages from gateways are kept
until all of these processes that are up have reported, or PATIENCE_S have passed. Otherwise, a request that is still
running could be started twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Message = TypeVar("Message")

PATIENCE_S = 5.0
WITH_INVENTORY = ("decode", "kv_pool")


class Succession(Generic[Message]):
    """Keeps the gateways' messages, in order, until it is `over`. `scheduler/process/actor.py` does the messaging."""

    def __init__(self) -> None:
        self.over = False
        self._expected: set[tuple[str, str]] = set()
        self._heard: set[tuple[str, str]] = set()
        self._kept: list[tuple[str, Message]] = []
        self._since_s: float | None = None

    def expect(self, ready: Iterable[tuple[str, str]], now_s: float) -> None:
        """Notes the (role, id) of all processes that are up now, according to the supervisor."""
        if self._since_s is None:
            self._since_s = now_s
        self._expected = {name for name in ready if name[0] in WITH_INVENTORY}

    def heard(self, role: str, instance_id: str) -> None:
        """This process has reported its inventory."""
        self._heard.add((role, instance_id))

    def keep(self, gateway_id: str, message: Message) -> None:
        """Keeps a gateway's message until `end`."""
        self._kept.append((gateway_id, message))

    def end(self, now_s: float) -> list[tuple[str, Message]] | None:
        """The kept messages, once, when all processes have reported or the time is up; None before and afterwards."""
        if self.over or self._since_s is None:
            return None
        if self._expected - self._heard and now_s - self._since_s < PATIENCE_S:
            return None
        self.over = True
        kept, self._kept = self._kept, []
        return kept
