"""How long a lane flies through all stages of a pipeline, by a cost model of whichever number of stages."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.scheduler.cost.step import StepCost


class FlightCost:
    """`cost` predicts a pass through all layers. Where it was measured on stages, that is a round of as many lanes:
    a flight of one of them has all that does not depend on its requests, and its part of the rest in every stage."""

    def __init__(self, cost: StepCost) -> None:
        self._cost, self._rounds = cost, cost.rounds_of
        self._fixed_s = max(0.0, 2 * cost.step_s((), (1,)) - cost.step_s((), (1, 1)))

    def flight_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a lane with these prefix lengths in all stages together."""
        return self._flown(self._cost.step_s((), lengths))

    def balanced_flight_s(self, lengths: Sequence[int]) -> float:
        """The same if its requests read the same bytes at equal lengths."""
        return self._flown(self._cost.balanced_step_s((), lengths))

    def _flown(self, step_s: float) -> float:
        return self._fixed_s + self._rounds * (step_s - self._fixed_s)
