"""Consecutive passes of one decode instance with the same requests: when each ends, and its time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from alignedserve.scheduler.cost.step import StepCost
from alignedserve.simulator.report.steps import StepRecorder


class Leap:
    """The passes of a leap. `done` of them have ended and are recorded; the next one is running."""

    def __init__(self, gap_s: float, several: bool) -> None:
        self.ends_s: list[float] = []
        self.done = 0
        self._cost: StepCost | None = None  # the cost model of the times
        self._gap_s = gap_s
        self._several = several
        self._seconds: list[float] = []
        self._balanced_s: list[float] = []
        self._lengths = (0, 0, 0, 0)  # requests; the shortest, longest and sum of their lengths in the first pass
        self._switching = False

    def begin(
        self,
        now_s: float,
        cost: StepCost,
        lengths: Sequence[int],
        passes: int,
        until_s: float,
        *,
        switching: bool,
        same: bool,
    ) -> float:
        """Start at most `passes` passes, up to the first that ends at `until_s` or later. Returns when the last ends.

        `same`: the requests are those of the passes before, so times already computed by the cost model remain valid.
        """
        spare = self._seconds[self.done :] if same and cost is self._cost else []
        self._cost = cost
        if len(spare) >= passes:
            self._seconds = spare
            self._balanced_s = self._balanced_s[self.done :]
        elif self._several:
            self._seconds = cost.run_s(lengths, passes)
            self._balanced_s = cost.balanced_run_s(lengths, passes)
        else:
            self._seconds = [cost.step_s((), lengths)]
            self._balanced_s = [cost.balanced_step_s((), lengths)]
        self.done = 0
        self.ends_s = ends_s = []
        end_s = now_s
        for seconds in self._seconds[:passes]:
            end_s = (end_s + self._gap_s) + seconds
            ends_s.append(end_s)
        del ends_s[bisect_left(ends_s, until_s) + 1 :]
        self._lengths = len(lengths), min(lengths), max(lengths), sum(lengths)
        self._switching = switching
        return ends_s[-1]

    def cut(self) -> float:
        """End the leap with the current pass. Returns when that ends."""
        del self.ends_s[self.done + 1 :]
        return self.ends_s[-1]

    def record(self, steps: StepRecorder, done: int) -> None:
        """Record the passes before number `done` as ended."""
        first, self.done = self.done, done
        seconds = self._seconds[first:done]
        starts_s = [end_s - passed for end_s, passed in zip(self.ends_s[first:done], seconds, strict=True)]
        count, shortest, longest, total = self._lengths
        lengths = count, shortest + first, longest + first, total + count * first
        steps.add_decodes(starts_s, seconds, self._balanced_s[first:done], lengths, self._switching)
