"""What is let in at all: a request that the scheduler would refuse for load is refused before its body is read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from alignedserve.errors import OverloadedError
from alignedserve.gateway.metrics import GatewayMetrics

HOLD_HEADER = "x-alignedserve-hold"
LEAST_AGAIN_S = 0.02
MOST_AGAIN_S = 1.0  # a gateway that heard nothing for so long lets one through, whatever was predicted


class Intake:
    """What the scheduler said last of its room, less what was let in since; and how many are being read right now.

    The scheduler decides in the end, with the request's true size: this only keeps what is hopeless from costing
    anything. Without a scheduler nobody is held back here.
    """

    def __init__(self, max_calls: int, metrics: GatewayMetrics) -> None:
        self._max_calls = max_calls
        self._metrics = metrics
        self._limited = False
        self._requests = 0
        self._retry_s = 0.0
        self._again_at_s = 0.0
        self.reading = 0  # calls that have come whole, and are not in the ledger yet

    def tell(self, requests: int, again_s: float, *, limited: bool) -> None:
        """The scheduler's news: so many more requests; where none, one in `again_s`."""
        self._limited = limited
        self._requests = requests
        self._retry_s = again_s
        self._again_at_s = time.monotonic() + min(MOST_AGAIN_S, max(LEAST_AGAIN_S, again_s))

    def forget(self) -> None:
        """There is no scheduler, so nobody knows."""
        self._limited = False

    def check(self, held: int) -> None:
        """Before a body is read: raises OverloadedError where the call would be refused now. It takes no place, so
        clients that send slowly keep none."""
        if held >= self._max_calls:
            self._refuse_full(held)
        if self._limited and self._requests <= 0 and (wait_s := self._again_at_s - time.monotonic()) > 0:
            self._refuse("the cluster is full", max(self._retry_s, wait_s))

    @contextlib.contextmanager
    def admit(self, held: int, *, again: bool = False) -> Iterator[None]:
        """Around the checking and tokenising of one call that has come whole, while the ledger holds `held` requests.

        `again`: it goes on with a call that was accepted before, so load is no reason to refuse it. Raises
        OverloadedError where it is not to be read.
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
        """For a refusal, while every other request would be refused too: a proxy in front may answer them itself."""
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
        self._refuse(f"this gateway holds {held} requests, as many as it may", 1.0)

    def _refuse(self, why: str, retry_after_s: float) -> None:
        error = OverloadedError(f"{why}; try again later", retry_after_s=retry_after_s)
        self._metrics.on_call_failed(error)
        raise error
