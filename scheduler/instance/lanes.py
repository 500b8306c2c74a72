"""Which requests fly next where several iterations are computed at the same time, one in each stage of a pipeline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence

from alignedserve.request import RequestKey
from alignedserve.scheduler.instance.plan import RunItem

REQUEST_TOKENS = 64  # of KV, as expensive as what a request costs beside them, where no cost model says more
_SPARE = 1.1  # a lane with so much more than its share is not cut

Lengths = Sequence[int]


def by_tokens(lengths: Lengths) -> float:
    """The predicted cost of an iteration, up to a constant, without a cost model."""
    return sum(lengths) + REQUEST_TOKENS * len(lengths)


def share_of(
    free: Sequence[RunItem],
    flying: Iterable[Lengths],
    depth: int,
    cost: Callable[[Lengths], float] = by_tokens,
    late: Collection[RequestKey] = (),
) -> list[RunItem]:
    """Of requests that can run now, those of the next lane, so that all `depth` lanes take about equally long.

    `flying`: prefix lengths of the lanes under way. `cost`: of a lane; what any lane costs does not count. If there
    are more requests than the lane's share, those are left for the next lane whose lengths are nearest to the others';
    of these, none that was left before (`late`).
    """
    if len(free) < 2:
        return list(free)
    others = list(flying)
    fixed = 2 * cost((1,)) - cost((1, 1))
    lengths = [item.kv_tokens for item in free]
    whole = cost(lengths) - fixed
    share = (whole + sum(cost(each) - fixed for each in others)) / depth
    if whole <= share * _SPARE:
        return list(free)
    elsewhere = [length for each in others for length in each]
    longer = not elsewhere or sum(elsewhere) * len(lengths) >= sum(lengths) * len(elsewhere)
    sign = 1 if longer else -1
    ordered = sorted(free, key=lambda item: (item.key not in late, sign * item.kv_tokens))

    def of_first(number: int) -> float:
        return cost([item.kv_tokens for item in ordered[:number]]) - fixed

    enough = 1 + bisect_left(range(1, len(ordered)), share, key=of_first)
    if enough > 1 and share - of_first(enough - 1) < of_first(enough) - share:
        enough -= 1
    return ordered[:enough]


class Lanes:
    """The lanes of one instance. A round of all lanes is one iteration of all requests."""

    def __init__(self, depth: int, cost: Callable[[Lengths], float]) -> None:
        self._depth, self._cost = depth, cost
        self._late: set[RequestKey] = set()  # left for the next lane
        self._round: list[Lengths] = []
        self._seconds = 0.0

    def next(self, free: Sequence[RunItem], flying: Iterable[Lengths]) -> list[RunItem]:
        """The next lane of the requests that can run now."""
        lane = share_of(free, flying, self._depth, self._cost, self._late)
        self._late = {item.key for item in free} - {item.key for item in lane}
        return lane

    def took(self, lengths: Lengths, seconds: float, flying: int) -> tuple[list[Lengths], float] | None:
        """A lane's prefix lengths and time, while so many others fly. Returns those of a round that ends with it."""
        self._round.append(lengths)
        self._seconds += seconds
        if len(self._round) <= flying:
            return None
        whole = self._round, self._seconds
        self.pause()
        return whole

    def pause(self) -> None:
        """Nothing runs."""
        self._round, self._seconds = [], 0.0
