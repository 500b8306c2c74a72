"""`rounds` with one of its parts taken out, for `ablation.py`."""

from __future__ import annotations

import math
from dataclasses import replace

from alignedserve.scheduler.policies import rounds
from alignedserve.scheduler.policies.base import BatchLimits, Entry
from alignedserve.scheduler.policies.rounds import RoundsPolicy


class NoLateJoins(RoundsPolicy):
    """Batches only: nothing joins a running batch because its length matches."""

    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        return []

    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        return False


class AnyLateJoins(RoundsPolicy):
    """What arrives during a round may join its batches at any time."""

    def _latest_s(self) -> float:
        return math.inf


class EvictedWait(RoundsPolicy):
    """What is evicted waits for the next round."""

    def insert(self, entry: Entry) -> None:
        super().insert(replace(entry, evicted=False))


class AlwaysByLength(RoundsPolicy):
    """Every round goes by length, with late joins, whatever unequal lengths cost."""

    def _loss(self, limits: BatchLimits) -> float:
        return 1.0


class AlwaysLateJoins(RoundsPolicy):
    """Every round by length has late joins."""

    def _loss(self, limits: BatchLimits) -> float:
        loss = super()._loss(limits)
        return loss if loss < rounds.LEAST_FOR_ROUND else 1.0
