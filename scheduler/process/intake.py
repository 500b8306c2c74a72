"""Tells gateways how many more requests would be accepted, so that they refuse other requests before reading them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.scheduler.core.overload import MOST_ROOM, Headroom
from alignedserve.scheduler.core.scheduler_core import SchedulerCore

EVERY_S = 0.01  # the shortest time between two messages


class IntakeNews:
    """Sends the core's room to all gateways with `tell`. Sends nothing while the room is unlimited."""

    def __init__(self, tell: Callable[[sc.Intake], None]) -> None:
        self._tell = tell
        self._told = Headroom(MOST_ROOM)
        self._submitted = False
        self._told_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def submitted(self) -> None:
        """A request was submitted: its gateway has subtracted it from the room that it was told last."""
        self._submitted = True

    def look(self, core: SchedulerCore) -> None:
        """The core has handled an event. This is cheap: the core's room is read at most once every EVERY_S."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            wait_s = self._told_s + EVERY_S - loop.time()
            self._timer = loop.call_later(max(0.0, wait_s), self._look_now, core)

    def message(self) -> sc.Intake:
        """The last message, for a gateway that has just connected."""
        room = self._told
        return sc.Intake(limited=room.limited, requests=room.requests, again_s=room.again_s)

    def _look_now(self, core: SchedulerCore) -> None:
        self._timer = None
        self._told_s = asyncio.get_running_loop().time()
        room = core.room(time.monotonic())
        if not room.limited and not self._told.limited:
            return
        if room.requests != self._told.requests or self._submitted:
            self._told, self._submitted = room, False
            self._tell(self.message())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
