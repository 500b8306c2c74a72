"""What a scheduler that has just started waits for: its predecessor's requests are still out there.

Decode instances say what they decide about, the pool what it holds. Until all that are up have said so (or PATIENCE_S
have passed), nothing of the gateways is acted upon: a request may be running on, and must not be started twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Message = TypeVar("Message")

PATIENCE_S = 5.0
WITH_INVENTORY = ("decode", "kv_pool")


class Succession(Generic[Message]):
    """Keeps the gateways' messages, in order, until it is `over`; `scheduler/process/actor.py` sends and receives."""

    def __init__(self) -> None:
        self.over = False
        self._expected: set[tuple[str, str]] = set()
        self._heard: set[tuple[str, str]] = set()
        self._kept: list[tuple[str, Message]] = []
        self._since_s: float | None = None

    def expect(self, ready: Iterable[tuple[str, str]], now_s: float) -> None:
        """(role, id) of everyone who is up, as the supervisor knows them now."""
        if self._since_s is None:
            self._since_s = now_s
        self._expected = {name for name in ready if name[0] in WITH_INVENTORY}

    def heard(self, role: str, instance_id: str) -> None:
        """It has said what it holds."""
        self._heard.add((role, instance_id))

    def keep(self, gateway_id: str, message: Message) -> None:
        self._kept.append((gateway_id, message))

    def end(self, now_s: float) -> list[tuple[str, Message]] | None:
        """The messages that were kept, once, when everyone has been heard or time is up; None before and after."""
        if self.over or self._since_s is None:
            return None
        if self._expected - self._heard and now_s - self._since_s < PATIENCE_S:
            return None
        self.over = True
        kept, self._kept = self._kept, []
        return kept
