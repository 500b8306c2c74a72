"""Counts this machine's NVIDIA GPUs without torch and without the driver."""

from __future__ import annotations

import os
from pathlib import Path


def count_gpus(*, proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")) -> int:
    """Number of GPUs that this process may use. `CUDA_VISIBLE_DEVICES` is respected."""
    present = len(list(proc.iterdir())) if proc.is_dir() else 0
    nodes = sum(1 for entry in dev.glob("nvidia[0-9]*") if entry.name.removeprefix("nvidia").isdigit())
    # A container sees all of the machine's GPUs in /proc, and has device nodes for its own.
    count = min(present, nodes) if present and nodes else nodes
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    named = [name for name in visible.split(",") if name.strip()]
    if "-1" in named:
        named = named[: named.index("-1")]
    return min(count, len(named))
