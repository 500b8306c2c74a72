"""A cluster of plain processes on the device."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.cluster.local import LocalCluster
from alignedserve.config_sources import from_tree
from alignedserve.memory import GIB, available_memory_bytes
from gpu_suite.models import write_model
from gpu_suite.record import Context
from support.driver import Driver

REPORTED_S = 1.5  # a role reports its metrics with its heartbeats, one a second


@dataclass(frozen=True, slots=True)
class Cell:
    """A running cluster of one prefill and one decode instance that share the device."""

    cluster: LocalCluster
    driver: Driver


@contextlib.asynccontextmanager
async def running(context: Context, folder: str, name: str, **sections: Mapping[str, Any]) -> AsyncIterator[Cell]:
    """A cluster that is ready. Its integrity is checked at the end. On an error its processes' output is printed."""
    tree: dict[str, Any] = {
        "model": {"path": folder},
        "cluster": {"device": "cuda" if context.on_gpu else "cpu", "share_gpu": context.on_gpu},
        "supervisor": {"start_timeout_s": 60.0},
        "engine": {"compile": "off"},  # halves the start time; `iteration` and `throughput` measure with it
    }
    if not context.on_gpu:
        tree["cluster"]["threads"] = 1
    for section, keys in sections.items():
        tree[section] = {**tree.get(section, {}), **keys}
    output = context.work / f"{name}-processes"
    try:
        async with LocalCluster(from_tree(tree), output_dir=output, gpus=int(context.on_gpu)) as cluster:
            await cluster.wait_ready(90.0)
            async with Driver(cluster.address("scheduler-0"), cluster.token) as driver:
                yield Cell(cluster, driver)
    except BaseException:
        _print_output(output)
        raise


def pool_gib(clusters: int) -> float:
    """Pool size for each of `clusters`: an equal share of half the free host memory, at most 8 GiB."""
    return min(8.0, available_memory_bytes() / (2 * clusters * GIB))


def medium_model(context: Context) -> Path:
    """The folder of the medium model in bf16, written once for all groups of a run."""
    import torch

    folder = context.work / "medium"
    if not (folder / "config.json").is_file():
        beside = context.work / f"medium-{context.record.group}"
        write_model("medium", beside, context.device, small=context.small, dtype=torch.bfloat16, seed=7)
        with contextlib.suppress(OSError):  # another group was first
            beside.rename(folder)
    return folder


def _print_output(folder: Path) -> None:
    """Print the end of each process's output: the cluster's error names the process that failed."""
    for file in sorted(folder.glob("*.out")):
        text = file.read_text(encoding="utf-8", errors="replace")
        print(f"---- {file.name}\n{text[-6000:]}", flush=True)
