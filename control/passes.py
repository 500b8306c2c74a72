"""Collects measured times of forward passes, from the compute thread to the report to the scheduler."""

from __future__ import annotations

import threading
import time

from alignedserve.proto import common_pb2 as pb

REPORT_EVERY_S = 0.1


class PassMeter:
    """Adds up passes until the sums are taken, at most once every `REPORT_EVERY_S`. Threads may share it.

    `total_s`: seconds of all passes since the start. `predicted_s`: the cost model's prediction for them in seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = pb.Passes()
        self._taken_s = 0.0
        self.total_s = self.predicted_s = 0.0

    def add(
        self, tokens: int, cached_tokens: int, seconds: float, predicted_s: float = 0.0, padded_tokens: int = 0
    ) -> None:
        """Adds one pass. For the values see `alignedserve.scheduler.cost.pass_model.Passes`."""
        with self._lock:
            self.total_s += seconds
            self.predicted_s += predicted_s
            self._sums.passes += 1
            self._sums.tokens += tokens
            self._sums.cached_tokens += cached_tokens
            self._sums.seconds += seconds
            self._sums.padded_tokens += padded_tokens

    def take(self) -> pb.Passes | None:
        """The sums since they were last taken; None if that was less than REPORT_EVERY_S ago, or if there are none."""
        now_s = time.monotonic()
        with self._lock:
            if not self._sums.passes or now_s - self._taken_s < REPORT_EVERY_S:
                return None
            sums, self._sums, self._taken_s = self._sums, pb.Passes(), now_s
        return sums
