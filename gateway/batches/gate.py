"""How many lines of batches a gateway has in flight: what interactive calls leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.metrics import GatewayMetrics

FIRST_LIMIT = 8
MOST_UNBEGUN = 16  # lines without a token: more would only lengthen the queue for prefill
SPARE_CALLS = 8  # calls that the scheduler or this gateway could still take after a line
MOST_BYTES = 64 << 20  # of the lines in flight
LOOK_S = 0.05
LEAST_PAUSE_S, MOST_PAUSE_S = 0.2, 10.0


class Gate:
    """A line enters before it is submitted, and leaves when its answer is written. One gate for all batches.

    No line enters while an interactive call of this gateway waits for its first token, while MOST_UNBEGUN lines do,
    while the scheduler has little room, or for some time after it refused a line. The limit then halves, and grows by
    one with each answer, up to `most_lines`. One line may always be in flight, so that a batch never stands still.
    """

    def __init__(self, ledger: Ledger, intake: Intake, metrics: GatewayMetrics, most_lines: int) -> None:
        self._ledger = ledger
        self._intake = intake
        self._metrics = metrics
        self._most_lines = most_lines
        self._limit = min(FIRST_LIMIT, most_lines)
        self._bytes = 0
        self._closed_until_s = 0.0
        self._left = asyncio.Event()
        self.lines = 0  # in flight

    async def enter(self, size: int, going: Callable[[], bool]) -> bool:
        """Waits for room for a line of `size` bytes. False as soon as `going` returns False."""
        while going():
            if self._has_room(size):
                self.lines += 1
                self._bytes += size
                self._metrics.lines_in_flight.set(self.lines)
                return True
            self._left.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._left.wait()
            except TimeoutError:
                pass
        return False

    def leave(self, size: int, *, answered: bool) -> None:
        self.lines -= 1
        self._bytes -= size
        if answered:
            self._limit = min(self._most_lines, self._limit + 1)
        self._metrics.lines_in_flight.set(self.lines)
        self._left.set()

    def refused(self, retry_after_s: float | None) -> float:
        """A line was refused because of load. Returns after how many seconds it is to be tried again."""
        now_s = asyncio.get_running_loop().time()
        pause_s = min(MOST_PAUSE_S, max(LEAST_PAUSE_S, retry_after_s or 0.0))
        if now_s >= self._closed_until_s:  # the lines that are refused together count once
            self._limit = max(1, self._limit // 2)
        self._closed_until_s = max(self._closed_until_s, now_s + pause_s)
        return pause_s

    def _has_room(self, size: int) -> bool:
        if not self.lines:
            return True
        if self.lines >= self._limit or self._bytes + size > MOST_BYTES:
            return False
        if asyncio.get_running_loop().time() < self._closed_until_s:
            return False
        interactive, offline = self._ledger.without_token()
        if interactive or offline >= MOST_UNBEGUN:
            return False
        return self._intake.has_room(len(self._ledger), SPARE_CALLS)
