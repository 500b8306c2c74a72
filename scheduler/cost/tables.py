"""Measured tables of one model on one device as parts of a step cost (`alignedserve simulate --cost-model DIR`).

    dense.csv         layer,tokens,time_us               embedding and final_layernorm once, the others in every layer
    per_sequence.csv  layer,sequences,time_us            lm_head, sampler
    attention.csv     prefill_chunk,kv_prefill,n_decode,kv_decode,time_us      of one layer
    skew_fit.csv      pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha   alpha by bucket
    moe.csv           tokens,activated_experts,time_us   of one layer of a mixture whose experts dense.csv lacks
    meta.yaml         model, gpu; the bounds of the buckets (skew_fit.bucket_axes), else they are read from the labels

KV lengths are those before the pass: LLMServingSim's profiler gives each decode `kv_decode` computed tokens and one new
(profiler/core/hooks/batch.py), and each chunk `kv_prefill`.

The tables are those of one device of a group, without collectives (`tensor_parallel.py` adds them). The
degree is an option, else the folder's suffix `-tpN`, else 1: `engine_effective` in meta.yaml may describe a run of
another degree and is not read. For a model whose shape is not known by name, meta.yaml needs the whole model's `shape:
{layers: 64, heads: 64, kv_heads: 8, head_dim: 128}`; for an unknown GPU it needs `sm_count`. Options override both.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.csv_table import read_rows
from alignedserve.scheduler.cost.grid import Curve, Floats, Grid4, Surface
from alignedserve.scheduler.cost.known import is_mixture, known_device, known_shape
from alignedserve.scheduler.cost.parts import ChunkAttention, CostParts, ModelShape
from alignedserve.scheduler.cost.skew import AXES, Bucket, SkewTable
from alignedserve.scheduler.cost.tensor_parallel import instance_hardware

Rows = Mapping[tuple[float, ...], float]

FILES = ("attention.csv", "dense.csv", "meta.yaml", "per_sequence.csv", "skew_fit.csv")
EXPERTS = "moe.csv"
ONCE = ("embedding", "final_layernorm")  # computed once a pass, not in every layer
TWICE = ("layernorm",)  # before attention and before the feed-forward part
ATTENTION_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
SKEW_COLUMNS = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
SKEW_BOUNDS = {"requests": "n", "long_share": "skew_rate", "longest": "kv_big", "cached_tokens": "kp"}
LABEL = re.compile(r"[A-Za-z]+(<=|=|>)(\d+)([k%]?)")
UNITS = {"": (1, 1), "k": (1024, 1), "%": (1, 100)}  # numerator and denominator


def load_tables(
    folder: Path, shape: Mapping[str, int] | None = None, degree: int = 1, expert_ranks: int = 1
) -> CostParts:
    """The parts from the tables in `folder`. `shape`: fields of `ModelShape` that replace the known whole model's.

    `degree`: of tensor parallelism, as the tables were measured. `expert_ranks`: over how many ranks the experts of a
    mixture are divided, each rank with as many tokens as this one (expert parallelism).

    Raises ConfigError for a missing or broken file, with its line and column, and for a model of unknown shape or one
    that cannot be divided.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}; measured tables are the files {', '.join(FILES)}")
    meta = _read_meta(folder / "meta.yaml")
    _check_experts(folder, meta)
    whole = _shape_of(meta, folder, shape or {})
    model, device = whole.part(degree), known_device(str(meta.get("gpu", "")))
    attention = {tuple(row[:4]): row[4] for _, row in read_rows(folder / "attention.csv", (), ATTENTION_COLUMNS)}
    chunk, decode, mixed = attention_grids(attention, str(folder / "attention.csv"))
    return CostParts(
        name=folder.resolve().name,
        shape=model,
        dense=_dense(folder / "dense.csv", model.layers, expert_ranks),
        sequences=_sum_of(folder / "per_sequence.csv", "sequences", {}),
        decode=decode,
        chunk=ChunkAttention(chunk),
        skew=_skew(folder / "skew_fit.csv", meta, folder / "meta.yaml"),
        mixed=mixed,
        experts_each=_experts_each(folder / EXPERTS),
        sm_count=_count(meta, "sm_count", folder) or (0 if device is None else device.sms),
        hardware=instance_hardware(model, str(meta.get("model", "")), device, degree),
        source={
            "kind": "tables",
            "sha256": _digest(folder),
            **{key: str(meta[key]) for key in ("model", "gpu", "profiled_at") if key in meta},
            **({"expert_ranks": expert_ranks} if expert_ranks > 1 else {}),
        },
    )


def attention_grids(rows: Rows, where: str) -> tuple[Surface, Surface, Grid4 | None]:
    """Chunks alone, decodes alone, and both together, from `(chunk, cached, requests, length) -> µs`."""
    alone: Rows = {(key[0], key[1]): value for key, value in rows.items() if key[0] > 0 and key[2] == 0}
    decodes: Rows = {(key[2], key[3]): value for key, value in rows.items() if key[0] == 0 and key[2] > 0}
    both: Rows = {key: value for key, value in rows.items() if key[0] > 0 and key[2] > 0}
    for what, some in (("prompt chunks alone", alone), ("decodes alone", decodes)):
        if not some:
            raise ConfigError(f"{where}: no row of {what}")
    surfaces = []
    for some in (alone, decodes):
        axes, values = full_grid(some)
        surfaces.append(Surface(axes[0], axes[1], values.tolist()))
    if not both:
        return surfaces[0], surfaces[1], None
    axes, values = full_grid(both)
    return surfaces[0], surfaces[1], Grid4(axes, values)


def full_grid(rows: Rows) -> tuple[list[list[float]], Floats]:
    """Axes and values of the smallest grid that contains every row; missing values are interpolated linearly.

    Neighbours along the last axis are used first: times are closest to linear in the lengths.
    """
    dimensions = len(next(iter(rows)))
    axes = [sorted({key[axis] for key in rows}) for axis in range(dimensions)]
    index = [{x: number for number, x in enumerate(points)} for points in axes]
    values = np.full([len(points) for points in axes], np.nan)
    for key, value in rows.items():
        values[tuple(places[x] for places, x in zip(index, key, strict=True))] = value
    for edges in (False, True):
        for axis in reversed(range(dimensions)):
            if np.isnan(values).any():
                _fill_lines(values, np.array(axes[axis]), axis, edges)
    return axes, values


def _fill_lines(values: Floats, xs: Floats, axis: int, edges: bool) -> None:
    """Fill unknown points of each line along `axis` between known ones; with `edges` also beyond the outermost."""
    lines = np.moveaxis(values, axis, 0)
    known = ~np.isnan(lines)
    numbers = np.arange(len(xs)).reshape(-1, *[1] * (lines.ndim - 1))
    below = np.maximum.accumulate(np.where(known, numbers, -1), axis=0)
    above = np.minimum.accumulate(np.where(known, numbers, len(xs))[::-1], axis=0)[::-1]
    if edges:
        below, above = np.where(below < 0, above, below), np.where(above == len(xs), below, above)
    usable = ~known & (below >= 0) & (above < len(xs))
    below, above = np.where(usable, below, 0), np.where(usable, above, 0)
    low, high = np.take_along_axis(lines, below, axis=0), np.take_along_axis(lines, above, axis=0)
    width = np.where(above > below, xs[above] - xs[below], 1.0)
    share = (xs.reshape(numbers.shape) - xs[below]) / width
    between = np.where(above > below, low + share * (high - low), low)
    np.copyto(lines, between, where=usable)


def _dense(path: Path, layers: int, expert_ranks: int) -> Curve:
    weights = dict.fromkeys(ONCE, 1.0) | dict.fromkeys(TWICE, 2.0 * layers)
    dense, experts = _sum_of(path, "tokens", weights, default=float(layers)), path.with_name(EXPERTS)
    if not experts.is_file():
        return dense
    tokens, per_layer = _experts(experts, expert_ranks)
    xs = sorted({*dense.xs, *tokens})
    return Curve(xs, [dense.at(x) + layers * per_layer(x) for x in xs])


def _check_experts(folder: Path, meta: Mapping[str, Any]) -> None:
    """Raises ConfigError if names tell a mixture of experts, and no table has the experts' times."""
    model, architecture = (str(meta.get(name, "")) for name in ("model", "architecture"))
    if (folder / EXPERTS).is_file() or not is_mixture(model, architecture):
        return
    layers = {layer for (layer,), _ in read_rows(folder / "dense.csv", ("layer",), ())}
    if not any("moe" in layer or "expert" in layer for layer in layers):
        raise ConfigError(
            f"{folder} has no {EXPERTS}, but {model} ({architecture or 'by its name'}) is a mixture of experts: its "
            f"experts would take no time; add {EXPERTS} (tokens,activated_experts,time_us of one layer)"
        )


def _experts(path: Path, ranks: int) -> tuple[list[float], Callable[[float], float]]:
    """The measured numbers of tokens, and µs of one layer's experts for any, each token routed to experts at random.

    A token activates as many as a single token does in the table. There are as many as are ever active there. Of E, T
    tokens with k each activate E (1 - (1 - k / E) ** T) on average. With R ranks the tokens of all are routed, R T, and
    a rank has E / R experts: T k of the R T k pairs of token and expert, as in the table. Fewer experts than a token
    activates were not measured, and take as long as that many.
    """
    rows = _expert_rows(path)
    each, all_of = min(active for _, active in rows), max(active for _, active in rows)
    axes, values = full_grid(rows)
    surface = Surface(axes[0], axes[1], values.tolist())
    here = all_of / ranks  # the surface takes a number below its first point as that
    return axes[0], lambda tokens: surface.at(tokens, here * (1.0 - (1.0 - each / all_of) ** (ranks * tokens)))


def _expert_rows(path: Path) -> dict[tuple[float, ...], float]:
    """Microseconds by tokens and activated experts."""
    return {tuple(row[:2]): row[2] for _, row in read_rows(path, (), ("tokens", "activated_experts", "time_us"))}


def _experts_each(path: Path) -> int:
    """Experts that one token activates in a layer; 0 without the table."""
    return int(min(active for _, active in _expert_rows(path))) if path.is_file() else 0


def _sum_of(path: Path, column: str, weights: Mapping[str, float], default: float = 1.0) -> Curve:
    """The weighted sum of the curves of all layers in the file, at every point that any of them has."""
    points: dict[str, dict[float, float]] = {}
    for (layer,), (x, time_us) in read_rows(path, ("layer",), (column, "time_us")):
        points.setdefault(layer, {})[x] = time_us
    curves = {name: Curve(sorted(found), [found[x] for x in sorted(found)]) for name, found in points.items()}
    xs = sorted({x for found in points.values() for x in found})
    return Curve(xs, [sum(weights.get(name, default) * curves[name].at(x) for name in sorted(curves)) for x in xs])


def _skew(path: Path, meta: Mapping[str, Any], meta_path: Path) -> SkewTable:
    """The chunk buckets are the profiled chunks: a chunk between two belongs to the nearer by ratio."""
    rows = read_rows_signed(path)
    axes = (meta.get("skew_fit") or {}).get("bucket_axes")
    labels: list[list[str]] = []
    bounds: dict[str, list[float]] = {}
    for number, (axis, name) in enumerate(SKEW_BOUNDS.items()):
        if axes is None:
            bounds[axis], names = _bounds_of({texts[number] for texts, _ in rows}, f"{path}: {SKEW_COLUMNS[number]}")
        else:
            bins, names = axes.get(f"{name}_bins"), axes.get(f"{name}_labels")
            if not isinstance(bins, list) or not isinstance(names, list) or len(bins) != len(names) + 1:
                raise ConfigError(f"{meta_path}: skew_fit.bucket_axes needs {name}_bins, and one {name}_labels fewer")
            bounds[axis] = [float(x) for x in bins[1:-1]]
        labels.append([str(label) for label in names])
    found: dict[tuple[float, ...], float] = {}
    for number, (texts, figures) in enumerate(rows):
        for column, text, names in zip(SKEW_COLUMNS, texts, labels, strict=True):
            if text not in names:
                raise ConfigError(
                    f"{path}:{number + 2}: column {column!r} has {text!r}, not a label of {meta_path.name}"
                )
        places = [names.index(text) for text, names in zip(texts, labels, strict=True)]
        found[(figures[0], *places)] = figures[1]
    chunks = sorted({key[0] for key in found})
    bounds["chunk_tokens"] = [chunk_bound(a, b) for a, b in pairwise(chunks)]
    alphas: dict[Bucket, float] = {}
    for key, alpha in found.items():
        alphas[(chunks.index(key[0]), int(key[1]), int(key[2]), int(key[3]), int(key[4]))] = alpha
    return SkewTable({axis: bounds[axis] for axis in AXES}, alphas)


def _bounds_of(labels: Iterable[str], where: str) -> tuple[list[float], list[str]]:
    """The inclusive upper bounds that labels such as `n<=16`, `kvB<=4k`, `sr>70%` and `kp=0` name, and the labels in
    order. The bucket past the last bound may have no label."""
    found: dict[tuple[float, bool], str] = {}
    for label in labels:
        if (parts := LABEL.fullmatch(label)) is None:
            raise ConfigError(f"{where} has {label!r}, which is no bound such as n<=16 or kvB>4k")
        times, by = UNITS[parts[3]]
        found[int(parts[2]) * times / by, parts[1] == ">"] = label
    ordered = sorted(found)
    bounds = [bound for bound, beyond in ordered if not beyond]
    if [bound for bound, beyond in ordered if beyond] not in ([], bounds[-1:]):
        raise ConfigError(f"{where} has a bucket without an upper bound that does not begin at the last bound")
    return bounds, [found[place] for place in ordered]


def chunk_bound(below: float, above: float) -> float:
    """The bound between two profiled chunks; 0 between no chunk and the smallest."""
    return float((below * above) ** 0.5) if below else 0.0


def read_rows_signed(path: Path) -> list[tuple[list[str], list[float]]]:
    """Rows of skew_fit.csv. Noise may put alpha slightly below 0; the other columns must be at least 0."""
    result: list[tuple[list[str], list[float]]] = []
    for texts, (chunk,) in read_rows(path, (*SKEW_COLUMNS, "alpha"), ("pc",)):
        if not re.fullmatch(r"-?\d+(\.\d*)?([eE]-?\d+)?", texts[-1].strip()):
            raise ConfigError(f"{path}:{len(result) + 2}: column 'alpha' must be a number, not {texts[-1]!r}")
        result.append((texts[:-1], [chunk, float(texts[-1])]))
    return result


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{place}: {error.problem or 'broken YAML'}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(meta, dict):
        raise ConfigError(f"{path} must be a mapping of keys to values")
    return meta


def _shape_of(meta: Mapping[str, Any], folder: Path, options: Mapping[str, int]) -> ModelShape:
    known, noted = known_shape(str(meta.get("model", ""))), meta.get("shape", {})
    fields = {name: getattr(known, name) for name in ModelShape.__slots__} if known is not None else {}
    if not isinstance(noted, dict) or noted.keys() - set(ModelShape.__slots__):
        raise ConfigError(f"{folder / 'meta.yaml'}: shape must hold some of {', '.join(ModelShape.__slots__)}")
    fields |= {name: _count(noted, name, folder) for name in noted} | dict(options)
    missing: Sequence[str] = [name for name in ("layers", "heads", "kv_heads", "head_dim") if name not in fields]
    if missing:
        raise ConfigError(
            f"{folder / 'meta.yaml'}: the shape of model {meta.get('model')!r} is not known; add it there, e.g. "
            f"`shape: {{layers: 32, heads: 32, kv_heads: 8, head_dim: 128}}` (missing: {', '.join(missing)})"
        )
    return ModelShape(**fields)


def _count(raw: Mapping[str, Any], name: str, folder: Path) -> int:
    """A whole number above 0; 0 if it is absent."""
    value = raw.get(name)
    if name in raw and (type(value) is not int or value < 1):
        raise ConfigError(f"{folder / 'meta.yaml'}: {name} must be a whole number above 0, not {value!r}")
    return value or 0


def _digest(folder: Path) -> str:
    """SHA-256 over names and contents of all files."""
    digest = hashlib.sha256()
    for name in (*FILES, *([EXPERTS] if (folder / EXPERTS).is_file() else ())):
        content = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
