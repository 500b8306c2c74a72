"""Measured figures of a request log, to compare a simulation with the cluster that wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from alignedserve.request import FinishReason, Stage
from alignedserve.simulator.report.summary import spread

_WHOLE = (None, FinishReason.STOP, FinishReason.LENGTH)


class LogFigures:
    """Named like a simulation's, in seconds: tokens from arrival at the scheduler, TPOT = (last - first) / (n - 1)."""

    def __init__(self) -> None:
        self._ttft: list[float] = []
        self._second: list[float] = []
        self._tpot: list[float] = []
        self._stages: dict[Stage, list[float]] = {stage: [] for stage in Stage}
        self._begin, self._end = math.inf, -math.inf

    def add(self, entry: Mapping[str, Any], arrival_s: float, tokens: int) -> None:
        """Add a line of the log. Lines without time stamps, and of requests begun by another gateway, are skipped."""
        first, last = (_seconds(entry, f"{which}_token_unix_s") for which in ("first", "last"))
        submitted = arrival_s if entry.get("epoch") else _seconds(entry, "queue_unix_s")  # of the last epoch
        if first is None or last is None or submitted is None or entry.get("resumed"):
            return
        self._ttft.append(first - submitted)
        self._begin, self._end = min(self._begin, submitted), max(self._end, last)
        if tokens > 1:
            self._tpot.append((last - first) / (tokens - 1))
            second = _seconds(entry, "second_token_unix_s")
            self._second += [] if second is None else [second - submitted]
        if entry.get("outcome") not in _WHOLE:  # it was cut off in a stage
            return
        for stage, spent in self._stages.items():
            spent.append(_seconds(entry, f"{stage}_s") or 0.0)

    def describe(self) -> dict[str, object] | None:
        """The figures; None if no line has any."""
        if not self._ttft:
            return None
        return {
            "requests": len(self._ttft),
            "makespan_s": self._end - self._begin,
            **spread("ttft", np.array(self._ttft)),
            **spread("second_token", np.array(self._second)),
            **spread("tpot", np.array(self._tpot)),
            **{f"stage_{stage}_mean_s": float(np.mean(spent)) for stage, spent in self._stages.items() if spent},
        }


def _seconds(entry: Mapping[str, Any], key: str) -> float | None:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
