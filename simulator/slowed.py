"""A cost model with every pass slowed by a factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignedserve.scheduler.cost.step import ChunkShape, StepCost


class SlowedCost(StepCost):
    """`cost` with every time multiplied by `slowdown`."""

    def __init__(self, cost: StepCost, slowdown: float) -> None:
        self._cost = cost
        self._slowdown = slowdown

    @classmethod
    def of(cls, cost: StepCost, slowdown: float) -> StepCost:
        """The cost model itself if `slowdown` is 1."""
        return cost if slowdown == 1.0 else cls(cost, slowdown)

    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        return self._cost.step_s(chunks, lengths) * self._slowdown

    def stages_s(self, chunks: Sequence[ChunkShape]) -> Sequence[float]:
        return [seconds * self._slowdown for seconds in self._cost.stages_s(chunks)]

    def run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        return [seconds * self._slowdown for seconds in self._cost.run_s(lengths, steps)]

    def balanced_step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        return self._cost.balanced_step_s(chunks, lengths) * self._slowdown

    def balanced_run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        return [seconds * self._slowdown for seconds in self._cost.balanced_run_s(lengths, steps)]

    def counted_s(self, requests: int, total: int, longest: int, shortest: int) -> float:
        return self._cost.counted_s(requests, total, longest, shortest) * self._slowdown

    def describe(self) -> dict[str, Any]:
        return {**self._cost.describe(), "slowdown": self._slowdown}
