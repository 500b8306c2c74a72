"""A step cost in one JSON file, as written by `alignedserve profile` and as shipped in `scheduler/cost/data`.

    schema, version   "alignedserve-cost", 1
    name, model, device, attribution, licence      texts; the first is needed
    shape             layers, heads, kv_heads, head_dim, itemsize: as one device sees the model
    sm_count          thread blocks that run at once, for no_split; 0: not known
    dense             {tokens: [...], us: [...]}      all that depends on the tokens of a pass, all layers together
    dense_decode      the same in passes without a prompt, if it differs (optional)
    sequences         {requests: [...], us: [...]}    the part that depends on the number of requests (optional)
    attention         of one layer:
        decode        {requests: [...], length: [...], us: [[...]]}    equal lengths; the bytes read are their product
        chunk         {tokens: [...], cached: [...], us: [[...]]} and/or {token_us, pair_us}
        mixed         {tokens, cached, requests, length, us: [[[[...]]]]}   one chunk and decodes (optional: their sum)
    no_split          that kernel, if it was measured: {decode: as above, block_bandwidth: bytes/s, alpha: buckets as
                      in skew, for information} (optional)
    skew              {bounds: {axis: [...]}, buckets: [[chunk, requests, share, longest, cached, alpha], ...]}
    hardware          fields of the simulator's Hardware; hardware_note names their source (optional)
    fit               errors of the fit (optional)
    degrees           by role, over how many ranks the instances were that were measured: the fields of
                      `ranks/degrees.py` (optional)
    gpu               what a profile of a GPU measured besides passes, for information: memory_bytes, versions, backends
                      by kernel mode, rates, bandwidth_by_blocks (bytes/s by thread blocks), links (bytes/s, seconds),
                      host_s (of the decode loop, by requests; not charged) (optional)

Times in µs, linear between the points (`grid.py`); buckets as in `skew.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.grid import Curve, Grid4, Surface, check_knots
from alignedserve.scheduler.cost.parts import ChunkAttention, CostParts, ModelShape
from alignedserve.scheduler.cost.skew import AXES, Bucket, SkewTable

SCHEMA = "alignedserve-cost"
VERSION = 1
MIXED_AXES = ("tokens", "cached", "requests", "length")
SOURCE_KEYS = ("model", "device", "attribution", "licence", "hardware_note", "fit", "degrees")


def load_fitted(path: Path) -> CostParts:
    """Read a fitted cost model. Raises ConfigError that names the file and the position of a missing or broken part."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        raw = json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}") from error
    except RecursionError:
        raise ConfigError(f"{path} is not a cost model: its JSON is nested too deeply") from None
    except ValueError as error:  # not text, or a number with thousands of digits
        raise ConfigError(f"{path} is not a JSON file: {error}") from error
    return parts_from(raw, str(path), hashlib.sha256(content).hexdigest())


def parts_from(raw: Any, where: str, digest: str) -> CostParts:
    """The parts that a parsed file describes. `where` (its name) is for errors, `digest` for `describe`."""
    file = _Place(raw, where, "")
    if file.raw.get("schema") != SCHEMA or file.raw.get("version") != VERSION:
        raise ConfigError(
            f"{where}: not a cost model of schema {SCHEMA} version {VERSION}; write one with `alignedserve profile`"
        )
    attention = file.part("attention")
    mixed = attention.part("mixed") if "mixed" in attention.raw else None
    no_split = file.part("no_split") if "no_split" in file.raw else None
    return CostParts(
        name=str(file.raw.get("name") or Path(where).stem),
        shape=_shape(file.part("shape")),
        dense=file.part("dense").curve("tokens"),
        dense_decode=file.part("dense_decode").curve("tokens") if "dense_decode" in file.raw else None,
        sequences=file.part("sequences").curve("requests") if "sequences" in file.raw else Curve([1.0], [0.0]),
        decode=attention.part("decode").surface("requests", "length"),
        chunk=_chunk(attention.part("chunk")),
        mixed=mixed.grid() if mixed is not None else None,
        skew=_skew(file.part("skew")),
        sm_count=int(file.number("sm_count", default=0.0)),
        no_split=no_split.part("decode").surface("requests", "length") if no_split is not None else None,
        block_bandwidth=no_split.number("block_bandwidth", low=1.0) if no_split is not None else 0.0,
        hardware=_hardware(file),
        source={
            "kind": "fitted",
            "sha256": digest,
            **{key: file.raw[key] for key in SOURCE_KEYS if key in file.raw},
        },
    )


def _shape(place: _Place) -> ModelShape:
    fields = {name: int(place.number(name, low=1.0)) for name in ("layers", "heads", "kv_heads", "head_dim")}
    return ModelShape(**fields, itemsize=int(place.number("itemsize", low=1.0, default=2.0)))


def _chunk(place: _Place) -> ChunkAttention:
    token_us, pair_us = place.number("token_us", default=0.0), place.number("pair_us", default=0.0)
    surface = place.surface("tokens", "cached") if "us" in place.raw else None
    return ChunkAttention(surface, token_us, pair_us)


def _hardware(file: _Place) -> dict[str, float]:
    if "hardware" not in file.raw:
        return {}
    place = file.part("hardware")
    return {name: place.number(name) for name in sorted(place.raw)}


def _skew(place: _Place) -> SkewTable:
    limits = place.part("bounds")
    bounds = {axis: limits.numbers(axis, empty=True) for axis in AXES}
    buckets = place.raw.get("buckets")
    if not isinstance(buckets, list) or not buckets:
        raise place.error("buckets", "must be a list of buckets")
    alphas: dict[Bucket, float] = {}
    for number, entry in enumerate(buckets):
        if not isinstance(entry, list) or len(entry) != len(AXES) + 1:
            raise place.error(f"buckets[{number}]", f"must be the bucket numbers of {', '.join(AXES)}, and alpha")
        *index, alpha = entry
        for axis, value in zip(AXES, index, strict=True):
            if not isinstance(value, int) or not 0 <= value <= len(bounds[axis]):
                raise place.error(f"buckets[{number}]", f"has {value!r}, which is not a bucket of {axis}")
        if not _is_number(alpha):
            raise place.error(f"buckets[{number}]", f"alpha must be a number, not {alpha!r}")
        alphas[(index[0], index[1], index[2], index[3], index[4])] = float(alpha)
    return SkewTable(bounds, alphas)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class _Place:
    """An object inside the file, with its path for errors."""

    def __init__(self, raw: Any, where: str, path: str) -> None:
        self.raw: Mapping[str, Any] = raw
        self._where, self._path = where, path
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: {path or 'the file'} must be a JSON object")

    def error(self, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self._where}: {self._path}{key} {message}")

    def part(self, key: str) -> _Place:
        if key not in self.raw:
            raise self.error(key, "is missing")
        return _Place(self.raw[key], self._where, f"{self._path}{key}.")

    def number(self, key: str, low: float = 0.0, default: float | None = None) -> float:
        value = self.raw.get(key, default)
        if not _is_number(value) or float(value) < low:
            raise self.error(key, f"must be a number of at least {low:g}, not {value!r}")
        return float(value)

    def numbers(self, key: str, empty: bool = False) -> list[float]:
        """A list of rising numbers."""
        values = self.raw.get(key)
        if not isinstance(values, list) or not all(_is_number(value) for value in values):
            raise self.error(key, "must be a list of numbers")
        if values or not empty:
            check_knots(f"{self._where}: {self._path}{key}", values)
        return [float(value) for value in values]

    def times(self, axes: tuple[list[float], ...]) -> Any:
        try:
            values = np.array(self.raw.get("us"), dtype=np.float64)
        except (TypeError, ValueError):
            values = np.empty(0)
        if values.shape != tuple(len(points) for points in axes):
            raise self.error("us", f"must be numbers in the shape {[len(points) for points in axes]}")
        if not (np.isfinite(values).all() and (values >= 0.0).all()):
            raise self.error("us", "must be finite numbers of at least 0")
        return values

    def curve(self, axis: str) -> Curve:
        xs = self.numbers(axis)
        return Curve(xs, self.times((xs,)).tolist())

    def surface(self, first: str, second: str) -> Surface:
        xs, ys = self.numbers(first), self.numbers(second)
        return Surface(xs, ys, self.times((xs, ys)).tolist())

    def grid(self) -> Grid4:
        axes = tuple(self.numbers(axis) for axis in MIXED_AXES)
        return Grid4(axes, self.times(axes))
