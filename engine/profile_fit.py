"""Turns measured passes into a cost model's file (`scheduler/cost/fitted.py`), and says how far off it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alignedserve.engine.profile import Measurement
from alignedserve.scheduler.cost.fit import fit_bounded, hats, relative_errors
from alignedserve.scheduler.cost.fitted import SCHEMA, VERSION, parts_from
from alignedserve.scheduler.cost.grid import Floats
from alignedserve.scheduler.cost.measured import MeasuredCost
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.scheduler.cost.skew import AXES, long_share

SKEW_BOUNDS: dict[str, list[float]] = {axis: [] for axis in AXES} | {"requests": [8.0], "long_share": [0.15, 0.4]}

BEND = 512.0  # tokens: where the cost of a longer prefix may change


@dataclass(frozen=True, slots=True)
class Profiled:
    """What was measured, and on what."""

    name: str
    model: str
    device: str
    shape: ModelShape
    sm_count: int
    measurements: Sequence[Measurement]
    hardware: dict[str, float]
    hardware_note: str
    host_s: Mapping[int, float]
    """What an engine adds to a pass, by the number of requests; empty: it was not measured."""


def fit_profile(profiled: Profiled) -> dict[str, Any]:
    """The file's content. Times are fitted to medians by least squares of relative errors, none below 0.

    What the engine adds to a pass of no requests is the hardware's `host_overhead_s`, the rest of it `sequences`; the
    errors in `fit` are of what was timed, passes without it.
    """
    measured = [measurement for measurement in profiled.measurements if measurement.seconds]
    fitted = [measurement for measurement in measured if not measurement.held_out]
    decode = _fit_decode([measurement for measurement in fitted if measurement.kind == "decode"], profiled.shape.layers)
    chunk = _fit_chunks([measurement for measurement in fitted if measurement.kind == "chunk"], profiled.shape.layers)
    raw: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "name": profiled.name,
        "model": profiled.model,
        "device": profiled.device,
        "attribution": "measured by `alignedserve profile`",
        "shape": {name: getattr(profiled.shape, name) for name in ModelShape.__slots__},
        "sm_count": profiled.sm_count,
        "dense": chunk["dense"],
        "dense_decode": decode["dense"],
        "attention": {"decode": decode["attention"], "chunk": chunk["attention"]},
        "skew": {"bounds": SKEW_BOUNDS, "buckets": [[0] * len(AXES) + [0.0]]},
        "hardware": profiled.hardware,
        "hardware_note": profiled.hardware_note,
    }
    skewed = [measurement for measurement in fitted if measurement.kind == "skew"]
    raw["skew"]["buckets"] = _fit_skew(skewed, _cost(raw))
    raw["fit"] = _errors(measured, _cost(raw))
    if profiled.host_s:
        fixed_us, raw["sequences"] = _fit_host(profiled.host_s)
        raw["hardware"] = {**profiled.hardware, "host_overhead_s": round(fixed_us * 1e-6, 9)}
    return raw


def _fit_host(host_s: Mapping[int, float]) -> tuple[float, dict[str, list[float]]]:
    """A part that every pass has, in µs, and one by the number of requests."""
    counts = sorted(host_s)
    times = np.array([host_s[count] for count in counts]) * 1e6
    fixed, _ = fit_bounded(np.stack([np.ones(len(counts)), np.array(counts, dtype=np.float64)], axis=1), times)
    rest = np.maximum.accumulate(np.maximum(0.0, times - fixed))
    return float(fixed), {"requests": [float(count) for count in counts], "us": _rounded(rest)}


def _cost(raw: dict[str, Any]) -> MeasuredCost:
    return MeasuredCost(parts_from(raw, "the profile", ""))


def _times(measurements: Sequence[Measurement]) -> Floats:
    return np.array([measurement.median_s * 1e6 for measurement in measurements])


def _fit_decode(measurements: Sequence[Measurement], layers: int) -> dict[str, Any]:
    """A part by the number of requests, and one by their length at each number: two lines that meet at `BEND`."""
    points = np.array([(len(m.shape.lengths), m.shape.lengths[0]) for m in measurements], dtype=np.float64)
    counts, longest = sorted(set(points[:, 0].tolist())), float(points[:, 1].max())
    lengths = [0.0, BEND, longest] if longest > BEND else [0.0, longest]
    by_count, by_length = hats([counts], points[:, :1]), hats([lengths], points[:, 1:])[:, 1:]
    features = np.hstack([by_count, *(by_count * weights[:, None] for weights in by_length.T)])
    found = fit_bounded(features, _times(measurements)).reshape(len(lengths), len(counts))
    reading = found[1:] / layers
    for place, count in enumerate(counts):
        if len(reading) > 1 and points[points[:, 0] == count, 1].max() <= BEND:  # nothing longer was measured
            reading[1, place] = reading[0, place] * longest / BEND
    reading = np.maximum.accumulate(np.maximum.accumulate(reading, axis=0), axis=1)
    return {
        "dense": {"tokens": counts, "us": _rounded(np.maximum.accumulate(found[0]))},
        "attention": {"requests": counts, "length": lengths, "us": [[0.0, *_rounded(column)] for column in reading.T]},
    }


def _fit_chunks(measurements: Sequence[Measurement], layers: int) -> dict[str, Any]:
    """A part by the tokens, one for each pair of tokens that attend, and one for each token that is read again."""
    chunks = [m.shape.chunks[0] for m in measurements]
    tokens = np.array([chunk.tokens for chunk in chunks], dtype=np.float64)
    cached = np.array([chunk.cached_tokens for chunk in chunks], dtype=np.float64)
    counts, furthest = sorted(set(tokens.tolist())), float(max(1.0, cached.max()))
    pairs = tokens * (cached + tokens / 2.0)
    features = np.hstack([hats([counts], tokens[:, None]), pairs[:, None] * 1e-3, cached[:, None] / furthest])
    found = fit_bounded(features, _times(measurements))
    again = float(found[-1]) / layers
    return {
        "dense": {"tokens": counts, "us": _rounded(np.maximum.accumulate(found[: len(counts)]))},
        "attention": {
            "tokens": [counts[0], counts[-1]],
            "cached": [0.0, furthest],
            "us": [[0.0, again], [0.0, again]],
            "pair_us": float(found[-2]) * 1e-3 / layers,
        },
    }


def _fit_skew(measurements: Sequence[Measurement], cost: MeasuredCost) -> list[list[float]]:
    """Alpha by number of requests and share of long ones, from what unequal lengths took beyond equal ones."""
    sums: dict[tuple[int, int], list[float]] = {}
    for measurement in measurements:
        lengths = measurement.shape.lengths
        count, total, longest, shortest = len(lengths), sum(lengths), max(lengths), min(lengths)
        equal = cost.balanced_step_s((), lengths)
        most = cost.step_s((), [longest] * count) - equal
        share = long_share(count, total, longest, shortest)
        place = (
            int(np.searchsorted(SKEW_BOUNDS["requests"], count)),
            int(np.searchsorted(SKEW_BOUNDS["long_share"], share)),
        )
        measured = measurement.median_s
        both = sums.setdefault(place, [0.0, 0.0])
        both[0] += most * (measured - equal) / measured**2
        both[1] += (most / measured) ** 2
    return [
        [0, requests, share, 0, 0, round(min(1.0, max(0.0, product / square)), 4) if square > 0 else 0.0]
        for (requests, share), (product, square) in sorted(sums.items())
    ] or [[0, 0, 0, 0, 0, 0.0]]


def _errors(measurements: Sequence[Measurement], cost: MeasuredCost) -> dict[str, Any]:
    """Relative errors on passes that were not fitted, by kind, and on those that were."""
    result = {}
    for kind in ("decode", "chunk", "mixed", "skew"):
        for held_out in (True, False):
            some = [m for m in measurements if m.kind == kind and m.held_out == held_out]
            if some:
                predicted = np.array([cost.step_s(m.shape.chunks, m.shape.lengths) for m in some])
                errors = relative_errors(predicted, np.array([m.median_s for m in some]))
                result[f"{kind}_{'held_out' if held_out else 'fitted'}"] = errors
    return result


def _rounded(values: Floats) -> list[float]:
    return [float(value) for value in np.round(values, 3)]
