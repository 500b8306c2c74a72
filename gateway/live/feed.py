"""One reader of the cluster's state for all viewers of this gateway. It asks only while there are viewers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

from alignedserve.errors import UnavailableError
from alignedserve.gateway.live.samples import Change, Samples, Window
from alignedserve.gateway.live.state import ENDED, MOST_EVENTS, live_state
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

EVERY_S = 1.0
WINDOW_S = 10.0
MOST_VIEWERS = 64
NOTHING = Samples("", 0.0)

State = dict[str, Any]


class LiveFeed:
    """`read` asks the supervisor what all processes said last; it may raise UnavailableError."""

    def __init__(self, read: Callable[[], Awaitable[sv.LiveState]]) -> None:
        self._read = read
        self._window = Window(WINDOW_S, ENDED)
        self._state: State = {}  # the last one; empty: none yet
        self._changed = asyncio.Event()  # set, and replaced by a new one, with each state
        self._batches: dict[str, int] = {}  # the number of each decode instance's batch in the last state
        self.viewers = 0  # that look now
        self.open = True  # else viewers leave, and find another gateway
        self._reading: asyncio.Task[None] | None = None

    async def states(self) -> AsyncGenerator[State, None]:
        """A state now, and one each second. A viewer that is slow misses some. Do not change them."""
        self.viewers += 1
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read_on())
        try:
            if time.time() - self._state.get("now", 0.0) < 2 * EVERY_S:
                yield self._state
            while self.open:
                await self._changed.wait()
                if self.open:
                    yield self._state
        finally:
            self.viewers -= 1
            if not self.viewers:
                self.close()

    def set_open(self, is_open: bool) -> None:
        """False: every stream ends now, so that this gateway can end."""
        self.open = is_open
        if not is_open:
            self._wake()

    def close(self) -> None:
        """Stop reading; a later viewer starts it again. Batches that are switched meanwhile are not marked."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._batches.clear()

    async def _read_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + EVERY_S
            with contextlib.suppress(Exception):  # a state that cannot be made must not end the feed
                self._state = await self._next()
                self._wake()
            await asyncio.sleep(max(0.1, due_s - loop.time()))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next(self) -> State:
        try:
            live = await self._read()
            state = live_state(live, self._window.add(Samples(live.status.metrics, time.monotonic())))
        except UnavailableError as error:
            before = self._state or live_state(sv.LiveState(), Change(NOTHING, NOTHING))
            return {**before, "now": time.time(), "stale": error.message}
        except Exception:
            logger.exception("the state for the live page cannot be made")
            raise
        self._mark_switches(state)
        events = _merged(self._state.get("events", ()), state["events"])
        return {"now": time.time(), "stale": "", **state, "events": events}

    def _mark_switches(self, state: State) -> None:
        """Also those that began and ended since the last state."""
        known = {one["id"]: one for one in state["decode"] if one["batch"] is not None}
        for name, one in known.items():
            one["switching"] |= self._batches.get(name, one["batch"]) != one["batch"]
        self._batches = {name: one["batch"] for name, one in known.items()}


def _merged(before: Iterable[State], now: Iterable[State]) -> list[State]:
    """The newest events of both, oldest first: a new supervisor knows none of those before its start."""
    found = {(one["unix_s"], one["level"], one["text"]): one for one in (*before, *now)}
    return sorted(found.values(), key=lambda one: one["unix_s"])[-MOST_EVENTS:]
