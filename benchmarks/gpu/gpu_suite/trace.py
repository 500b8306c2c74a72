"""Computes how long the device idles between iterations, from a trace of torch's profiler.

Each iteration is launched inside `record_function(STEP)`. A kernel or copy belongs to the iteration whose range holds
the call that launched it: the profiler links the two by a correlation id, also for the kernels of a replayed graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "alignedserve-iteration"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle time of a trace's iterations: `between_s` from an iteration's last work to the next one's first work,
    `within_s` inside iterations."""

    iterations: int
    total_s: float
    between_s: float
    within_s: float

    @property
    def share(self) -> float:
        return self.between_s / self.total_s


def idle_of(events: Sequence[Mapping[str, Any]]) -> Idle:
    """Idle time from a trace's events. Raises ValueError if fewer than three iterations had work on the device."""
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == STEP and _is_host(e))
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in _CALLS and "correlation" in e.get("args", {})
    }
    work: list[list[tuple[float, float]]] = [[] for _ in steps]
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            at = launched.get(event.get("args", {}).get("correlation"))
            index = _step_of(steps, at) if at is not None else None
            if index is not None:
                work[index].append((event["ts"], event["ts"] + event["dur"]))
    busy = [sorted(spans) for spans in work if spans]
    if len(busy) < 3:
        raise ValueError(f"{len(busy)} of {len(steps)} iterations of the trace had work on the device")
    ends = [max(end for _, end in spans) for spans in busy]
    between = sum(max(0.0, busy[i + 1][0][0] - max(ends[: i + 1])) for i in range(len(busy) - 1))
    total = ends[-1] - busy[0][0][0]
    active = _covered([span for spans in busy for span in spans])
    return Idle(len(busy), total * 1e-6, between * 1e-6, (total - active - between) * 1e-6)


def read_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace that have a duration."""
    found = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


def _is_host(event: Mapping[str, Any]) -> bool:
    """False for the profiler's second event of a range, which gives its span on the device."""
    return not str(event.get("cat", "")).startswith("gpu")


def _step_of(steps: Sequence[tuple[float, float]], at: float) -> int | None:
    for index, (begin, end) in enumerate(steps):
        if begin <= at <= end:
            return index
    return None


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The total length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
