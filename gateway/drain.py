"""Drains a gateway: it accepts no new requests, lets open requests finish, and fails those left after a time limit.

The drain of a whole cluster can be taken back: a supervisor that fails announces the end, but its successor may keep
the cluster running. The drain of a single gateway is final.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from alignedserve.gateway.ledger.ledger import Ledger


class Drain:
    """`state` is "" until `begin`, then "draining", and "drained" when no request is open. Each change calls
    `on_change`.
    """

    def __init__(self, ledger: Ledger, on_change: Callable[[], None]) -> None:
        self.state = ""
        self._ledger = ledger
        self._on_change = on_change
        self._cut_off: asyncio.Handle | None = None  # of the timer that ends open requests
        self._until_s = math.inf  # when it ends them, in the loop's time
        self._watch: asyncio.Task[None] | None = None
        self._for_good = False

    def begin(self, grace_s: float, *, for_good: bool = True) -> None:
        """Starts the drain: open requests have `grace_s` seconds from now. A second call can only shorten this time.

        `for_good`: `take_back` has no effect any more.
        """
        self._for_good = self._for_good or for_good
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        if until_s >= self._until_s:
            return
        if self._cut_off is not None:
            self._cut_off.cancel()
        self._until_s = until_s
        self._cut_off = loop.call_at(until_s, self._ledger.close_all)
        if self._watch is None:
            self._ledger.drain()
            self._set("draining")
            self._watch = loop.create_task(self._wait_empty())

    def take_back(self) -> None:
        """Accepts requests again, unless the drain is final. Requests that were ended stay ended."""
        if self._watch is None or self._for_good:
            return
        self.close()
        self._cut_off = self._watch = None
        self._until_s = math.inf
        self._ledger.take_calls()
        self._set("")

    async def _wait_empty(self) -> None:
        await self._ledger.wait_empty()
        self._set("drained")

    def _set(self, state: str) -> None:
        self.state = state
        self._on_change()

    def close(self) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()
        if self._watch is not None:
            self._watch.cancel()
