"""Turns measured passes into a cost model's file (`scheduler/cost/fitted.py`), with the errors of the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alignedserve.engine.profile.passes import CPU_GRID, Grid, Measurement
from alignedserve.scheduler.cost.fit import fit_bounded, hats, relative_errors
from alignedserve.scheduler.cost.fitted import SCHEMA, VERSION, parts_from
from alignedserve.scheduler.cost.grid import Floats
from alignedserve.scheduler.cost.measured import MeasuredCost, OneBlockCost
from alignedserve.scheduler.cost.parts import CostParts, ModelShape
from alignedserve.scheduler.cost.skew import AXES, long_share

# Search for one thread block's bandwidth: range in bytes/s, and the error ratio below which the data do not tell.
SLOWEST, FASTEST, STEPS, ROUNDS = 1e8, 4e12, 16, 3
TELLING, LEAST_ERROR = 1.02, 1e-6


@dataclass(frozen=True, slots=True)
class Profiled:
    """The measurements, and the model and device they were made on."""

    name: str
    model: str
    device: str
    shape: ModelShape
    sm_count: int
    measurements: Sequence[Measurement]
    hardware: dict[str, float]
    hardware_note: str
    host_s: Mapping[int, float]
    """Seconds that the engine adds to a pass, by number of requests; empty: not measured."""
    grid: Grid = CPU_GRID
    no_split: Sequence[Measurement] = ()
    """Decode passes with the kernel that does not split the KV of a request; empty: not available here."""
    block_bandwidth: float = 0.0
    """Read bandwidth of one thread block alone, in bytes a second."""


def fit_profile(profiled: Profiled) -> dict[str, Any]:
    """The file's content. Times are fitted to medians by least squares of relative errors, all at least 0.

    The engine's time extrapolated to no requests is the hardware's `host_overhead_s`, the rest is `sequences`.
    The errors in `fit` are for the timed passes, which exclude it.
    """
    measured = [measurement for measurement in profiled.measurements if measurement.seconds]
    fitted = [measurement for measurement in measured if not measurement.held_out]
    layers, bounds = profiled.shape.layers, {axis: list(profiled.grid.bounds.get(axis, ())) for axis in AXES}
    decode = _fit_decode(_of_kind(fitted, "decode"), layers, profiled.grid.bends)
    chunk = _fit_chunks(_of_kind(fitted, "chunk"), layers)
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
        "skew": {"bounds": bounds, "buckets": [[0] * len(AXES) + [0.0]]},
        "hardware": profiled.hardware,
        "hardware_note": profiled.hardware_note,
    }
    raw["skew"]["buckets"] = _fit_skew(_of_kind(fitted, "skew"), _cost(raw), bounds)
    raw["fit"] = _errors(measured, _cost(raw))
    other = [measurement for measurement in profiled.no_split if measurement.seconds]
    if _of_kind(other, "decode"):
        raw["no_split"] = _fit_no_split(other, raw, profiled)
        errors = _errors(other, OneBlockCost(parts_from(raw, "the profile", "")))
        raw["fit"] |= {f"no_split_{what}": found for what, found in errors.items()}
    if profiled.host_s:
        fixed_us, raw["sequences"] = _fit_host(profiled.host_s)
        raw["hardware"] = {**profiled.hardware, "host_overhead_s": round(fixed_us * 1e-6, 9)}
    return raw


def _fit_host(host_s: Mapping[int, float]) -> tuple[float, dict[str, list[float]]]:
    """A constant part of every pass, in µs, and a part by the number of requests."""
    counts = sorted(host_s)
    times = np.array([host_s[count] for count in counts]) * 1e6
    fixed, _ = fit_bounded(np.stack([np.ones(len(counts)), np.array(counts, dtype=np.float64)], axis=1), times)
    rest = np.maximum.accumulate(np.maximum(0.0, times - fixed))
    return float(fixed), {"requests": [float(count) for count in counts], "us": _rounded(rest)}


def _cost(raw: dict[str, Any]) -> MeasuredCost:
    return MeasuredCost(parts_from(raw, "the profile", ""))


def _times(measurements: Sequence[Measurement]) -> Floats:
    return np.array([measurement.median_s * 1e6 for measurement in measurements])


def _of_kind(measurements: Sequence[Measurement], kind: str) -> list[Measurement]:
    return [measurement for measurement in measurements if measurement.kind == kind]


def _fit_decode(measurements: Sequence[Measurement], layers: int, bends: Sequence[float]) -> dict[str, Any]:
    """Fit a part by the number of requests and, for each number, one by length, which is linear between `bends`."""
    points = np.array([(len(m.shape.lengths), m.shape.lengths[0]) for m in measurements], dtype=np.float64)
    counts, longest = sorted(set(points[:, 0].tolist())), float(points[:, 1].max())
    lengths = [0.0, *(bend for bend in bends if bend < longest), longest]
    by_count, by_length = hats([counts], points[:, :1]), hats([lengths], points[:, 1:])[:, 1:]
    features = np.hstack([by_count, *(by_count * weights[:, None] for weights in by_length.T)])
    found = fit_bounded(features, _times(measurements)).reshape(len(lengths), len(counts))
    reading = found[1:] / layers
    for place, count in enumerate(counts):
        measured = points[points[:, 0] == count, 1].max()
        for line in range(1, len(reading)):
            if measured <= lengths[line]:  # nothing longer was measured
                reading[line, place] = reading[line - 1, place] * lengths[line + 1] / lengths[line]
    reading = np.maximum.accumulate(np.maximum.accumulate(reading, axis=0), axis=1)
    return {
        "dense": {"tokens": counts, "us": _rounded(np.maximum.accumulate(found[0]))},
        "attention": {"requests": counts, "length": lengths, "us": [[0.0, *_rounded(column)] for column in reading.T]},
    }


def _fit_no_split(measurements: Sequence[Measurement], raw: Mapping[str, Any], profiled: Profiled) -> dict[str, Any]:
    """The parts of the non-splitting kernel: its time at equal lengths beside the same dense part, and block bandwidth.

    `alpha`: the cost of unequal lengths, by the buckets of the splitting kernel. It is for information, since the cost
    model assigns jobs to multiprocessors instead.
    """
    fitted = [measurement for measurement in measurements if not measurement.held_out]
    layers = profiled.shape.layers
    decode = _fit_decode(_of_kind(fitted, "decode"), layers, profiled.grid.bends)
    dense = parts_from(raw, "the profile", "").dense_decode
    assert dense is not None
    attention = decode["attention"]
    for row, count, whole in zip(attention["us"], attention["requests"], decode["dense"]["us"], strict=True):
        rest = (whole - dense.at(count)) / layers  # may be below 0, by noise
        row[:] = _rounded(np.maximum.accumulate(np.maximum(0.0, np.array(row) + rest)))
    found: dict[str, Any] = {"decode": attention, "block_bandwidth": 1e9}
    split_like = {**raw, "attention": {**raw["attention"], "decode": attention}}
    skewed = _of_kind(fitted, "skew")
    found["alpha"] = _fit_skew(skewed, _cost(split_like), raw["skew"]["bounds"])
    parts = parts_from({**raw, "no_split": found}, "the profile", "")
    found["block_bandwidth"] = _block_bandwidth(parts, skewed, profiled.block_bandwidth)
    return found


def _block_bandwidth(parts: CostParts, measurements: Sequence[Measurement], alone: float) -> float:
    """The bytes a second that predict these passes best; `alone`, if it is known and the passes hardly tell.

    Searched among numbers that are closer together in each round.
    """

    def error(bandwidth: float) -> float:
        cost = OneBlockCost(parts, block_bandwidth=bandwidth)
        return float(sum((cost.step_s((), m.shape.lengths) / m.median_s - 1.0) ** 2 for m in measurements))

    low, high = SLOWEST, FASTEST
    for _ in range(ROUNDS):
        candidates = [float(candidate) for candidate in np.geomspace(low, high, STEPS)]
        best, ratio = min(candidates, key=error), candidates[1] / candidates[0]
        low, high = best / ratio, best * ratio
    if alone and error(alone) <= TELLING * error(best) + LEAST_ERROR * len(measurements):
        return round(alone)
    return round(min(best, FASTEST))


def _fit_chunks(measurements: Sequence[Measurement], layers: int) -> dict[str, Any]:
    """Fit a part by the number of tokens, one for each pair of tokens in attention, and one for each cached token."""
    chunks = [m.shape.chunks[0] for m in measurements]
    tokens = np.array([chunk.tokens for chunk in chunks], dtype=np.float64)
    cached = np.array([chunk.cached_tokens for chunk in chunks], dtype=np.float64)
    counts, furthest = sorted(set(tokens.tolist())), float(max(1.0, cached.max()))
    pairs = tokens * (cached + tokens / 2.0)
    most = float(pairs.max())  # each feature is at most 1: `fit_bounded` ignores features with almost no weight
    features = np.hstack([hats([counts], tokens[:, None]), pairs[:, None] / most, cached[:, None] / furthest])
    found = fit_bounded(features, _times(measurements))
    again = float(found[-1]) / layers
    return {
        "dense": {"tokens": counts, "us": _rounded(np.maximum.accumulate(found[: len(counts)]))},
        "attention": {
            "tokens": [counts[0], counts[-1]],
            "cached": [0.0, furthest],
            "us": [[0.0, again], [0.0, again]],
            "pair_us": float(found[-2]) / most / layers,
        },
    }


def _fit_skew(
    measurements: Sequence[Measurement], cost: MeasuredCost, bounds: Mapping[str, Sequence[float]]
) -> list[list[float]]:
    """Fit alpha to the extra time of unequal lengths, by number of requests, share of long ones and longest length."""
    sums: dict[tuple[int, int, int], list[float]] = {}
    for measurement in measurements:
        lengths = measurement.shape.lengths
        count, total, longest, shortest = len(lengths), sum(lengths), max(lengths), min(lengths)
        equal = cost.balanced_step_s((), lengths)
        most = cost.step_s((), [longest] * count) - equal
        share = long_share(count, total, longest, shortest)
        values = {"requests": count, "long_share": share, "longest": longest}
        requests, long_ones, most_tokens = (int(np.searchsorted(bounds[axis], value)) for axis, value in values.items())
        place = (requests, long_ones, most_tokens)
        measured = measurement.median_s
        both = sums.setdefault(place, [0.0, 0.0])
        both[0] += most * (measured - equal) / measured**2
        both[1] += (most / measured) ** 2
    return [
        [0, requests, share, longest, 0, round(min(1.0, max(0.0, product / square)), 4) if square > 0 else 0.0]
        for (requests, share, longest), (product, square) in sorted(sums.items())
    ] or [[0, 0, 0, 0, 0, 0.0]]


def _errors(measurements: Sequence[Measurement], cost: MeasuredCost) -> dict[str, Any]:
    """Relative errors by kind of pass, for held-out and fitted passes."""
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
