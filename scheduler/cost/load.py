"""Cost models by name, file or folder."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from alignedserve.config import SchedulerConfig
from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.fitted import load_fitted
from alignedserve.scheduler.cost.measured import STEP_COSTS, MeasuredCost
from alignedserve.scheduler.cost.parts import CostParts
from alignedserve.scheduler.cost.step import KERNEL_MODES, StepCost
from alignedserve.scheduler.cost.tables import EXPERTS, load_tables
from alignedserve.scheduler.cost.tensor_parallel import (
    LATENCY_S,
    Collectives,
    check_weights_fit,
    degree_of,
    with_collectives,
    with_exchange,
)

_DATA = Path(__file__).parent / "data"
KV_TOKENS = "kv_tokens"
LINKS = ("pool_bandwidth", "peer_bandwidth")
WHOLE = ("_tokens", "_per_token", "_size")  # suffixes of counts
SHAPE_OPTIONS = ("layers", "heads", "kv_heads", "head_dim", "itemsize", "hidden", "vocab")  # of the whole model
BANDWIDTH, LATENCY = COLLECTIVES = ("collective_bandwidth", "collective_latency_s")
EXPERT_RANKS = "expert_ranks"
FOLDER_OPTIONS = (*SHAPE_OPTIONS, "tensor_parallel", EXPERT_RANKS, *COLLECTIVES)
ONE_BLOCK_OPTIONS = ("block_bandwidth", "sm_count", "heads")
MODE_OPTIONS = {mode: ONE_BLOCK_OPTIONS if mode != "split_kv" else () for mode in KERNEL_MODES}


def load_step_cost(source: str | Path, kernel_mode: str = "split_kv", **options: Any) -> MeasuredCost:
    """The cost model called `source`: a shipped name, a JSON file, or a folder of measured tables.

    `options`: those of the kernel mode (`no_split`: block_bandwidth in bytes/s, sm_count, heads); for a folder the
    shape of its model (layers, heads, kv_heads, head_dim, itemsize, hidden, vocab), and for tensor parallelism the
    degree (tensor_parallel), the ranks that share the experts of a mixture (expert_ranks), bytes/s of a device's link
    in collectives and seconds of their latency (collective_bandwidth, collective_latency_s). Raises ConfigError for
    unknown names and broken files.
    """
    if kernel_mode not in KERNEL_MODES:
        raise ConfigError(f"unknown kernel mode {kernel_mode!r}; choose one of: {', '.join(KERNEL_MODES)}")
    folder = Path(source).is_dir()
    allowed = (*MODE_OPTIONS[kernel_mode], *(FOLDER_OPTIONS if folder else ()))
    for name, value in options.items():
        if name not in allowed:
            raise ConfigError(
                f"a cost model in mode {kernel_mode} has no option {name!r}; its options are: "
                f"{', '.join(allowed) or 'none'}"
            )
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if not number or not (0 < value < math.inf or (value == 0 and name == LATENCY)):
            raise ConfigError(f"option {name} of a cost model must be a finite number above 0; got {value!r}")
    parts = load_parts(source, {name: options[name] for name in FOLDER_OPTIONS if name in options})
    return STEP_COSTS[kernel_mode](
        parts, **{name: options[name] for name in MODE_OPTIONS[kernel_mode] if name in options}
    )


def configured_cost(config: SchedulerConfig) -> StepCost | None:
    """The configured cost model of the scheduler, or None. Raises as `load_step_cost`."""
    return _configured(config.cost_model, config.kernel_mode, config.block_bandwidth_gb_s)


def shared_cost(config: SchedulerConfig) -> StepCost | None:
    """The same, read once in this process: for policies, which are made for each range and priority while serving."""
    return _read_once(config.cost_model, config.kernel_mode, config.block_bandwidth_gb_s)


def _configured(cost_model: str, kernel_mode: str, block_bandwidth_gb_s: float) -> StepCost | None:
    if not cost_model:
        return None
    options: dict[str, float] = {}
    if block_bandwidth_gb_s and kernel_mode != "split_kv":
        options["block_bandwidth"] = block_bandwidth_gb_s * 1e9
    return load_step_cost(cost_model, kernel_mode, **options)


_read_once = lru_cache(maxsize=4)(_configured)


def load_parts(source: str | Path, options: Mapping[str, float] | None = None) -> CostParts:
    """The parts for `load_step_cost`. `options`: of a folder of tables."""
    path, options = Path(source), options or {}
    if path.is_dir():
        return _add_collectives(path, _load_folder(path, options), options)
    if str(source) in shipped_names():
        return load_fitted(_shipped_file(str(source)))
    if path.is_file():
        return load_fitted(path)
    raise ConfigError(
        f"unknown cost model {str(source)!r}; choose one of: {', '.join(shipped_names())}, a JSON file "
        "written by `alignedserve profile`, or a folder of measured tables"
    )


def _load_folder(folder: Path, options: Mapping[str, float]) -> CostParts:
    """Tables with the links and the pool of the shipped model of the same device, without collectives."""
    degree = _degree(folder, options)
    shape = {name: int(options[name]) for name in SHAPE_OPTIONS if name in options}
    parts = load_tables(folder, shape, degree, int(options.get(EXPERT_RANKS, 1)))
    for name in shipped_names():
        shipped = load_fitted(_shipped_file(name))
        if shipped.source.get("device") == parts.source.get("gpu"):
            links = {key: degree * shipped.hardware[key] for key in LINKS if key in shipped.hardware}
            same = degree == 1 and shipped.source.get("model") == parts.source.get("model")
            parts = replace(parts, hardware={**parts.hardware, **(shipped.hardware if same else links)})
    return parts


def _degree(folder: Path, options: Mapping[str, float]) -> int:
    return int(options["tensor_parallel"] if "tensor_parallel" in options else degree_of(folder))


def _add_collectives(folder: Path, parts: CostParts, options: Mapping[str, float]) -> CostParts:
    degree, ranks = _degree(folder, options), int(options.get(EXPERT_RANKS, 1))
    if degree == 1 and (ranks == 1 or not parts.experts_each):
        return parts
    bandwidth = options.get(BANDWIDTH, parts.hardware.get(BANDWIDTH))
    latency_s = options.get(LATENCY, LATENCY_S)
    if not bandwidth:
        raise ConfigError(
            f"{folder} is of tensor parallelism {degree} and {ranks} ranks that share experts, on an unknown GPU: give "
            "the bytes/s of a device's link in collectives (collective_bandwidth, a key of --hardware)"
        )
    collectives = Collectives(bandwidth, latency_s)
    return with_exchange(with_collectives(parts, degree, collectives), ranks, collectives)


def load_rank_cost(source: str | Path, ranks: int, kernel_mode: str = "split_kv", **options: Any) -> MeasuredCost:
    """`load_step_cost` of one of `ranks` decode ranks, which share the experts if tables tell their times."""
    if (Path(source) / EXPERTS).is_file():
        options[EXPERT_RANKS] = ranks
    return load_step_cost(source, kernel_mode, **options)


def shipped_names() -> list[str]:
    """The cost models that come with the package."""
    return sorted(file.stem for file in _DATA.glob("*.json"))


def default_hardware(source: str | Path, given: Collection[str] = (), **options: float) -> dict[str, float | int]:
    """Fields of the simulator's Hardware that come with a cost model; counts are whole numbers.

    `given`: fields that replace these. `options`: of `load_step_cost`, for a folder of tables. Raises ConfigError if
    the weights do not fit the devices of a folder, unless `kv_tokens` is given.
    """
    path = Path(source)
    parts = _load_folder(path, options) if path.is_dir() else load_parts(source)
    if path.is_dir() and not {KV_TOKENS} & {*given, *parts.hardware}:
        check_weights_fit(parts, _degree(path, options))
    return {name: int(value) if name.endswith(WHOLE) else value for name, value in parts.hardware.items()}


def _shipped_file(name: str) -> Path:
    return _DATA / f"{name}.json"
