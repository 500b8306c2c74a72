"""How the layers of a model are divided into the stages of a pipeline.

By what a layer, the embedding and the head cost: measured times (`layer_times.py`), or the weights that a pass of
`ROWS` tokens reads. Rank 0 decides for all ranks of its instance, and tells them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import nn

from alignedserve.engine.parallel.group import RankGroup

ROWS = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """What each layer costs, and what the first stage (`begin`), the last one (`end`) and `each` cost besides.

    In seconds if `measured`, else in weights. `why`: the reason if they could not be measured.
    """

    layers: Sequence[float]
    begin: float = 0.0
    end: float = 0.0
    each: float = 0.0
    measured: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Division:
    """The layers of each stage. `description`: for the log and the status; empty in ranks that were told."""

    stages: tuple[range, ...]
    description: str = ""

    @classmethod
    def by(cls, costs: Costs, stages: int, most: int) -> Division:
        """The best one whose stages have `most` layers at most. So many are enough for all layers."""
        found = shares(costs.layers, stages, costs.end, begin=costs.begin, most=most)
        return cls(tuple(found), describe(found, costs))

    def tell(self, group: RankGroup) -> None:
        """For rank 0."""
        group.tell(0, torch.tensor([own.stop for own in self.stages]))

    @classmethod
    def told(cls, group: RankGroup) -> Division:
        """For the other ranks. Waits for rank 0."""
        ends = group.told()[1].view(torch.int64).tolist()
        return cls(tuple(range(*pair) for pair in zip([0, *ends], ends, strict=False)))


def shares(
    costs: Sequence[float], stages: int, end: float, *, begin: float = 0.0, most: int | None = None
) -> list[range]:
    """Stages of layers with these costs, so that the most expensive one costs the least.

    The first one costs `begin` more, the last one `end`; each has `most` layers at most. Of equal divisions the earlier
    stages have fewer layers, since the first also does the driver's work.
    """
    count, most = len(costs), most or len(costs)
    sums = list(accumulate(costs, initial=0.0))
    infinite = (float("inf"), 0)

    @cache
    def best(first: int, stages: int) -> tuple[float, int]:
        """The cost of the most expensive stage of the layers from `first` on, and where the first of them ends."""
        extra = 0.0 if first else begin
        if stages == 1:
            return (sums[-1] - sums[first] + extra + end, count) if count - first <= most else infinite
        ends = range(first + 1, min(count - stages + 1, first + most) + 1)
        return min(
            ((max(sums[at] - sums[first] + extra, best(at, stages - 1)[0]), at) for at in ends), default=infinite
        )

    found, at = [], 0
    for left in range(stages, 0, -1):
        found.append(range(at, best(at, left)[1]))
        at = found[-1].stop
    return found


def by_weights(layers: Sequence[nn.Module], chosen: int, head: int, why: str = "") -> Costs:
    """The weights that a pass reads. `chosen`: experts of a mixture for a token. `head`: its weights."""
    return Costs([_active(layer, chosen) for layer in layers], end=float(head), why=why)


def describe(stages: Sequence[range], costs: Costs) -> str:
    """For example "layers 0-9, 10-15 (measured: 3.1 ms, 3 ms)"."""
    numbers = ", ".join(f"{own.start}-{own.stop - 1}" if len(own) > 1 else f"{own.start}" for own in stages)
    if not costs.measured:
        return f"layers {numbers} (by weights{': ' if costs.why else ''}{costs.why})"
    sums = [costs.each + sum(costs.layers[number] for number in own) for own in stages]
    sums[0] += costs.begin
    sums[-1] += costs.end
    return f"layers {numbers} (measured: {', '.join(f'{_ms(each)}' for each in sums)})"


def read_share(chosen: int, experts: int) -> float:
    """Of a layer's experts, that a pass reads in the mean."""
    return 1.0 - (1.0 - chosen / experts) ** ROWS


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{1 if seconds < 0.0995 else 0}f} ms"


def _active(layer: nn.Module, chosen: int) -> float:
    """Of a mixture, so many experts count as `ROWS` tokens choose by chance."""
    found = 0.0
    for module in layer.modules():
        experts = getattr(module, "num_experts", None)
        for each in module._parameters.values():
            if each is not None:
                is_stacked = isinstance(experts, int) and each.dim() == 3 and each.shape[0] == experts
                found += each.numel() * (read_share(chosen, each.shape[0]) if is_stacked and chosen else 1.0)
    return found
