"""Refuses requests before their bodies are read, if the scheduler would refuse them because of load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from alignedserve.errors import OverloadedError
from alignedserve.gateway.metrics import GatewayMetrics

HOLD_HEADER = "x-alignedserve-hold"
LEAST_AGAIN_S = 0.02
MOST_AGAIN_S = 1.0  # without an update for this long, submit one request anyway


class Intake:
    """The room that the scheduler last reported, less the requests accepted since, and the number of calls being read.

    The scheduler makes the final decision with the request's actual size. The intake only saves the cost of reading
    requests that would be refused. Without a scheduler it refuses no request because of the scheduler's load.
    """

    def __init__(self, max_calls: int, metrics: GatewayMetrics) -> None:
        self._max_calls = max_calls  # requests in the ledger and calls being read, together
        self._metrics = metrics
        self.on_refused: Callable[[str], None] | None = None  # gets why, in the context of the refused call
        self._limited = False  # whether `_requests` counts; from the scheduler's last report
        self._requests = 0  # room in the last report, less one for each call admitted since
        self._retry_s = 0.0  # seconds until there is room again, in the last report
        self._again_at_s = 0.0  # monotonic time at which one call is admitted without room; each one moves it on
        self.reading = 0  # calls whose bodies have been read, and that are not in the ledger yet

    def tell(self, requests: int, again_s: float, *, limited: bool) -> None:
        """The scheduler's report: it accepts `requests` more requests, or, if 0, one more in `again_s` seconds.

        If not `limited`, it accepts any number.
        """
        self._limited = limited
        self._requests = requests
        self._retry_s = again_s
        self._again_at_s = time.monotonic() + min(MOST_AGAIN_S, max(LEAST_AGAIN_S, again_s))

    def forget(self) -> None:
        """There is no scheduler, so its room is unknown: no request is refused because of it."""
        self._limited = False

    def check(self, held: int) -> None:
        """Before a body is read: raises OverloadedError if the call would be refused now.

        `held`: requests in the ledger. It reserves no room, so a client that sends slowly occupies none.
        """
        if held >= self._max_calls:
            self._refuse_full(held)
        if self._limited and self._requests <= 0 and (wait_s := self._again_at_s - time.monotonic()) > 0:
            self._refuse("the cluster is full", max(self._retry_s, wait_s))

    def has_room(self, held: int, spare: int) -> bool:
        """Whether a call would be admitted now, and `spare` more after it. `held`: requests in the ledger."""
        if held + self.reading + spare >= self._max_calls:
            return False
        return not self._limited or self._requests > spare

    @contextlib.contextmanager
    def admit(self, held: int, *, again: bool = False) -> Iterator[None]:
        """Encloses validation and tokenisation of one call whose body has been read. `held`: requests in the ledger.

        `again`: it resumes a call that was accepted before, so it is not refused because of the scheduler's load.
        Raises OverloadedError if the call is refused.
        """
        if held + self.reading >= self._max_calls:
            self._refuse_full(held + self.reading)
        if self._limited and not again:
            self._take()
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1

    def hold_header(self) -> dict[str, str]:
        """The header of a refusal while other requests would be refused too: a proxy may then refuse them itself."""
        closed = self._limited and self._requests <= 0 and time.monotonic() < self._again_at_s
        return {HOLD_HEADER: "1"} if closed else {}

    def _take(self) -> None:
        if self._requests > 0:
            self._requests -= 1
            return
        now_s = time.monotonic()
        if now_s < self._again_at_s:
            self._refuse("the cluster is full", max(self._retry_s, self._again_at_s - now_s))
        self._again_at_s = now_s + min(MOST_AGAIN_S, max(LEAST_AGAIN_S, self._retry_s))

    def _refuse_full(self, held: int) -> None:
        self._refuse(f"this gateway holds {held} requests, which is its limit", 1.0)

    def _refuse(self, why: str, retry_after_s: float) -> None:
        error = OverloadedError(f"{why}; try again later", retry_after_s=retry_after_s)
        self._metrics.on_call_failed(error)
        if self.on_refused is not None:
            self.on_refused(why)
        raise error
