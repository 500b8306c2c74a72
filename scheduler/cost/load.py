"""Cost models by name, file or folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.measured import STEP_COSTS, MeasuredCost
from alignedserve.scheduler.cost.parts import CostParts
from alignedserve.scheduler.cost.step import KERNEL_MODES
from alignedserve.scheduler.cost.tables import load_tables

SHAPE_OPTIONS = ("layers", "heads", "kv_heads", "head_dim", "itemsize")  # of a folder of tables
MODE_OPTIONS: dict[str, tuple[str, ...]] = {"split_kv": (), "no_split": ("block_bandwidth", "sm_count", "heads")}


def load_step_cost(source: str | Path, kernel_mode: str = "split_kv", **options: Any) -> MeasuredCost:
    """The cost model called `source`: a name that ships, a JSON file, or a folder of measured tables.

    `options`: of the kernel mode (`no_split`: block_bandwidth in bytes/s, sm_count, heads), and for a folder the shape
    of its model (layers, heads, kv_heads, head_dim, itemsize). Raises ConfigError for what is unknown or broken.
    """
    if kernel_mode not in KERNEL_MODES:
        raise ConfigError(f"unknown kernel mode {kernel_mode!r}; choose one of: {', '.join(KERNEL_MODES)}")
    folder = Path(source).is_dir()
    allowed = (*MODE_OPTIONS[kernel_mode], *(SHAPE_OPTIONS if folder else ()))
    for name, value in options.items():
        if name not in allowed:
            raise ConfigError(
                f"a cost model in mode {kernel_mode} has no option {name!r}; its options are: "
                f"{', '.join(allowed) or 'none'}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"option {name} of a cost model must be a number above 0; got {value!r}")
    shape = {name: int(options[name]) for name in SHAPE_OPTIONS if name in options}
    parts = load_parts(source, shape)
    return STEP_COSTS[kernel_mode](
        parts, **{name: options[name] for name in MODE_OPTIONS[kernel_mode] if name in options}
    )


def load_parts(source: str | Path, shape: dict[str, int] | None = None) -> CostParts:
    path = Path(source)
    if path.is_dir():
        return load_tables(path, shape)
    raise ConfigError(f"unknown cost model {str(source)!r}; give a folder of measured tables")
