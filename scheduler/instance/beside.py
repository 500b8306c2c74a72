"""Which members without hurry run beside others: as many as make an iteration longer by at most a share (ADR 60).

Those that do not run keep their blocks, and go on later: a pause costs no copy. They take turns. What an iteration
does not use of its share is saved, up to one iteration's time, so that even a single one that takes far longer runs now
and then. While any of them pauses, no more join.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.pace import Pace
from alignedserve.scheduler.instance.running_batch import RunningBatch, RunningRequest


class Beside:
    """`slowdown`: the share. `pace`: predicts; its objective is kept, too, except by a single one now and then."""

    def __init__(self, slowdown: float, pace: Pace) -> None:
        self.pace = pace
        self._slowdown = slowdown
        self._joins = 0  # as many as run in the last iteration; 0: some paused
        self._saved_s = 0.0
        self._line: dict[RequestKey, None] = {}  # members without hurry, the one that has paused longest first

    def most_joins(self, batch: RunningBatch) -> int | None:
        """How many candidates without hurry may join now from each buffer; None: all that have room."""
        if not batch.background:
            return 1 if batch.size else None
        if batch.background == batch.size:
            return None
        return max(0, self._joins - sum(member.background for member in batch.entering.values()))

    def choose(self, run: Sequence[RunningRequest]) -> list[RunningRequest]:
        """The members of the next iteration, in the order of `run`."""
        others = [member.kv_tokens for member in run if not member.background]
        behind = {member.key: member for member in run if member.background}
        if not others or not behind:
            return list(run)
        new = {key: None for key in behind if key not in self._line}  # they go first, since they cannot leave before
        self._line = new | {key: None for key in self._line if key in behind}
        line = [behind[key] for key in self._line]
        alone_s = self.pace.iteration_s(others)
        spare_s = self._saved_s + self._slowdown * alone_s
        lengths = [*others, *(member.kv_tokens for member in line)]

        def added_s(count: int) -> float:
            return self.pace.iteration_s(lengths[: len(others) + count]) - alone_s

        most = min(spare_s, self.pace.objective_s - alone_s)
        count = bisect_right(range(1, len(line) + 1), most, key=added_s)
        if not count and spare_s >= alone_s:  # nothing more can be saved: the iteration is as long as it is
            count, spare_s = 1, 0.0
        else:
            spare_s -= added_s(count) if count else 0.0
        self._saved_s = min(max(0.0, spare_s), alone_s)
        self._joins = 0 if count < len(line) else count
        runs = dict.fromkeys(member.key for member in line[:count])
        for key in runs:
            self._line[key] = self._line.pop(key)
        return [member for member in run if not member.background or member.key in runs]
