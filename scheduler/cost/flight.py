"""How long a lane flies through all stages of a pipeline, by a cost model of whichever number of stages."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.scheduler.cost.step import StepCost


class FlightCost:
    """`cost` predicts a pass through all layers, or, if it was measured on stages, a round of as many lanes. A round of
    a lane's copies takes as long as one of them flies. With `no_split` and stages that is too long: its makespan is of
    all requests in one kernel."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def flight_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a lane with these prefix lengths in all stages together."""
        return self._cost.step_s((), [*lengths] * self._cost.rounds_of)

    def balanced_flight_s(self, lengths: Sequence[int]) -> float:
        """The same if its requests read the same bytes at equal lengths."""
        return self._cost.balanced_step_s((), [*lengths] * self._cost.rounds_of)
