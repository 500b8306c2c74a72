"""How likely a conversation goes on while its KV is still cached, by the way its last request ended.

After a tool call the next request comes within seconds, after an answer when a person has read it, after the first
answer often never. How likely and how soon is counted; only what a tool call means is assumed until then. How long
blocks stay cached follows from how many there are and how many are evicted in a second (Little's law).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOOL_CALLS, STOP, LENGTH, UNKNOWN = "tool_calls", "stop", "length", ""
KINDS = (TOOL_CALLS, STOP, LENGTH)
LATER_TURN = 2  # turns are told apart up to this one

SHORTEST_S = 0.25
BINS_PER_OCTAVE = 2
BINS = 36  # of delays: the last one ends after 13 hours
ENDS_S = tuple(SHORTEST_S * 2.0 ** (number / BINS_PER_OCTAVE) for number in range(BINS))
MIDDLE: float = 2.0 ** (-0.5 / BINS_PER_OCTAVE)  # of a bin, as a multiple of its end
MEMORY = 512  # endings of one kind after which an older one counts 1/e
PRIOR_ENDINGS = 8.0
EVEN = 0.5
PRIOR = {TOOL_CALLS: (0.9, 4.0), STOP: (EVEN, 60.0), LENGTH: (EVEN, 60.0)}  # share that go on, and seconds until then
LEAST_CHANCE = 1 / 64

RATE_OVER_S = 60.0  # over about this time the rate of evictions is averaged
HORIZON = 2.0  # times the mean time that a block stays cached: what is likely to be used stays longer


@dataclass(slots=True)
class _Endings:
    """Of one kind: how many there were, and after which delays a request followed. Older ones fade."""

    count: float
    returned: list[float]


class ReturnTimes:
    """For one thread."""

    def __init__(self) -> None:
        self.horizon_s = math.inf
        self._endings = {(kind, turn): _prior(kind) for kind in KINDS for turn in range(1, LATER_TURN + 1)}
        self._looked: tuple[float, int] | None = None  # when, and how many blocks had been evicted
        self._rate = 0.0  # of evictions, blocks a second

    def look(self, now_s: float, evicted_blocks: int, cached_blocks: int) -> None:
        """Measure how long blocks stay cached. `evicted_blocks`: since the process began."""
        before_s, before = self._looked or (now_s, evicted_blocks)
        if now_s > before_s:
            kept = math.exp((before_s - now_s) / RATE_OVER_S)
            self._rate = self._rate * kept + (evicted_blocks - before) / (now_s - before_s) * (1.0 - kept)
            self.horizon_s = HORIZON * cached_blocks / self._rate if self._rate > 0.0 else math.inf
        if now_s > before_s or self._looked is None:
            self._looked = now_s, evicted_blocks

    def ended(self, kind: str, turns: int) -> None:
        """A request ended so; `turns` requests of its conversation have."""
        endings = self._of(kind, turns)
        kept = 1.0 - 1.0 / MEMORY
        endings.count = endings.count * kept + 1.0
        endings.returned = [weight * kept for weight in endings.returned]

    def returned(self, kind: str, turns: int, delay_s: float) -> None:
        """A conversation went on `delay_s` after that ending."""
        self._of(kind, turns).returned[_bin(delay_s)] += 1.0

    def chance(self, kind: str, turns: int) -> float:
        """How likely a conversation that ended so goes on within the horizon: LEAST_CHANCE to 1.

        For an unknown kind, the least of all kinds: a rank can be raised when the kind is known, but not lowered.
        """
        if kind == UNKNOWN:
            return min(self.chance(known, turns) for known in KINDS)
        endings = self._of(kind, turns)
        found = sum(endings.returned[: BINS if self.horizon_s > ENDS_S[-1] else _bin(self.horizon_s) + 1])
        return min(1.0, max(LEAST_CHANCE, found / endings.count))

    def expected_s(self, kind: str, turns: int) -> float | None:
        """The median delay of the conversations that went on after such an ending; None for an unknown kind."""
        if kind == UNKNOWN:
            return None
        returned = self._of(kind, turns).returned
        half, so_far = sum(returned) / 2, 0.0
        for number, weight in enumerate(returned):
            so_far += weight
            if so_far >= half:
                return float(ENDS_S[number] * MIDDLE)
        return None

    def _of(self, kind: str, turns: int) -> _Endings:
        return self._endings[kind, max(1, min(turns, LATER_TURN))]


def _prior(kind: str) -> _Endings:
    share, delay_s = PRIOR[kind]
    endings = _Endings(PRIOR_ENDINGS, [0.0] * BINS)
    endings.returned[_bin(delay_s)] = PRIOR_ENDINGS * share
    return endings


def _bin(delay_s: float) -> int:
    """The number of the first bin that ends at this delay or later."""
    found = math.ceil(math.log2(max(delay_s, 1e-9) / SHORTEST_S) * BINS_PER_OCTAVE - 1e-9)
    return min(BINS - 1, max(0, found))
