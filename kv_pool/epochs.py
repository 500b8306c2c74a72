"""The epochs of requests that are over, remembered for as long as a late message may name them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

# Longer than any copy, retry or fencing takes. The scheduler's audit of the pool finds what a later message leaves.
REMEMBERED_S = 120.0
MAX_REMEMBERED = 1 << 16


class OverEpochs:
    """The newest epoch of each request that is over. Bounded in time and number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: OrderedDict[str, tuple[int, float]] = OrderedDict()  # least recently ended first

    def __len__(self) -> int:
        return len(self._newest)

    def end(self, request_id: str, epoch: int) -> None:
        """Record that this epoch and all earlier ones are over."""
        now = self._clock()
        newest = max(self.newest(request_id), epoch)
        self._newest[request_id] = (newest, now)
        self._newest.move_to_end(request_id)
        while len(self._newest) > MAX_REMEMBERED or next(iter(self._newest.values()))[1] < now - REMEMBERED_S:
            self._newest.popitem(last=False)

    def newest(self, request_id: str) -> int:
        """The newest epoch of the request that is over; -1 if none is known."""
        return self._newest.get(request_id, (-1, 0.0))[0]
