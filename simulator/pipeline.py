"""Instances whose layers are divided into the stages of a pipeline (ADR 81), in the cost model's time.

Prefill passes follow each other through the stages. The requests of a decode iteration fly in as many lanes as there
are stages, so that each stage works on another lane.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.measured import MeasuredCost
from alignedserve.scheduler.cost.step import ChunkShape, StepCost
from alignedserve.scheduler.instance.lanes import by_tokens
from alignedserve.simulator.hardware import Hardware

HopTime = Callable[[int], float]


class PipelinedCost(StepCost):
    """`cost`, the one of all layers, for an instance of `stages` stages with their share of the layers each.

    `hop_s`: seconds to send the hidden states of so many tokens to the next stage. A decode pass is a round of all
    lanes. In a steady state it takes as long as the busiest stage has work, or as the slowest lane flies.
    """

    def __init__(self, cost: StepCost, layers: int, stages: int, hop_s: HopTime) -> None:
        """Raises ConfigError for more stages than layers."""
        if stages > layers:
            raise ConfigError(f"{stages} stages, but the model has {layers} layers: give at most {layers}")
        self._cost, self._hop_s = cost, hop_s
        most, more = divmod(layers, stages)  # an instance divides them by measured times
        self._shares = [(most + (stage >= stages - more)) / layers for stage in range(stages)]

    @classmethod
    def of(cls, cost: MeasuredCost, stages: int, hardware: Hardware) -> StepCost:
        """`cost` itself for one stage. Raises ConfigError for more stages than layers."""
        if stages == 1:
            return cost
        shape = cost.parts.shape
        token_bytes = (shape.hidden or shape.heads * shape.head_dim) * shape.itemsize

        def hop_s(tokens: int) -> float:
            return hardware.collective_latency_s + tokens * token_bytes / hardware.collective_bandwidth

        return cls(cost, shape.layers, stages, hop_s)

    def stages_s(self, chunks: Sequence[ChunkShape]) -> list[float]:
        whole_s, hop_s = self._cost.step_s(chunks, ()), self._hop_s(sum(chunk.tokens for chunk in chunks))
        return [share * whole_s + hop_s for share in self._shares[:-1]] + [self._shares[-1] * whole_s]

    def step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        """Chunks beside decodes, which no instance of stages has, count as a lane of their own."""
        lanes = [(self._cost.step_s((), lane), len(lane)) for lane in lanes_of(lengths, len(self._shares))]
        if chunks:
            lanes.append((self._cost.step_s(chunks, ()), sum(chunk.tokens for chunk in chunks)))
        return self._round_s(lanes)

    def run_s(self, lengths: Sequence[int], steps: int) -> list[float]:
        return [self.step_s((), [length + step for length in lengths]) for step in range(steps)]

    def balanced_step_s(self, chunks: Sequence[ChunkShape], lengths: Sequence[int]) -> float:
        """With lanes of equal times, too, so that idle stages count as bubble."""
        lanes = lanes_of(lengths, len(self._shares))
        if chunks or not lanes:
            return self.step_s(chunks, lengths)
        mean_s = sum(self._cost.balanced_step_s((), lane) for lane in lanes) / len(lanes)
        return min(self.step_s((), lengths), self._round_s([(mean_s, len(lengths) // len(lanes))] * len(lanes)))

    def describe(self) -> dict[str, Any]:
        return {**self._cost.describe(), "stages": len(self._shares)}

    def _round_s(self, lanes: Sequence[tuple[float, int]]) -> float:
        """`lanes`: seconds in all stages together, and the tokens whose states are sent."""
        if not lanes:
            return 0.0
        hops_s = [self._hop_s(tokens) for _, tokens in lanes]
        work_s = sum(seconds for seconds, _ in lanes)
        stage_s = max(self._shares) * work_s + sum(hops_s)
        flight_s = max(seconds + len(self._shares) * hop_s for (seconds, _), hop_s in zip(lanes, hops_s, strict=True))
        return max(stage_s, flight_s)


def lanes_of(lengths: Sequence[int], number: int) -> list[Sequence[int]]:
    """At most `number` lanes of adjacent lengths and like costs, in the order of the batch; none is empty."""
    ordered = sorted(range(len(lengths)), key=lengths.__getitem__)
    sums = list(accumulate(by_tokens((lengths[place],)) for place in ordered))
    ends = [bisect_left(sums, lane * sums[-1] / number) + 1 for lane in range(1, number)] if sums else []
    bounds = [0, *ends, len(ordered)]
    lanes = (ordered[begin:end] for begin, end in pairwise(bounds) if begin < end)
    return [[lengths[place] for place in sorted(lane)] for lane in lanes]
