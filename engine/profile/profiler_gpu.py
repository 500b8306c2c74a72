"""`alignedserve profile` on a GPU: measures rates, links and passes in both kernel modes for a cost model's file."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from alignedserve.config import Config
from alignedserve.device_memory import DeviceMemory, activation_bytes
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.profile.bandwidth import bandwidth_by_blocks
from alignedserve.engine.profile.copies import LinkFigures, device_copies
from alignedserve.engine.profile.device_passes import (
    GPU_GRID,
    CudaTimer,
    DevicePassBench,
    device_rates,
    gpu_benches,
    measure_passes,
)
from alignedserve.engine.profile.fit import Profiled, fit_profile
from alignedserve.engine.profile.other_work import OtherWork
from alignedserve.engine.profile.passes import BLOCK_SIZE, LEAST_BLOCKS, Grid
from alignedserve.engine.profile.profiler import HOST_REQUESTS, HostOverhead, store_fields, with_other_work
from alignedserve.engine.profile.rank_passes import measure_rank_passes, most_sharing
from alignedserve.engine.profile.role_benches import ROLES, RoleBenches
from alignedserve.errors import ResourceError
from alignedserve.memory import describe_bytes
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import device_of
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.sizing import plan_stores

ROOM = 0.8  # of a GPU's free memory, for the store in which passes are profiled and their other memory
LEAST_PASSES_S = 2.0


def profile_gpu(
    config: Config,
    loaded: LoadedModel,
    shape: ModelShape,
    memory_bytes: int,
    limit_s: float,
    host_overhead_s: HostOverhead,
    ranks: RoleBenches[DevicePassBench] | None = None,
) -> dict[str, Any]:
    """`profile` of a model on a GPU: rates first, which warm its clocks, then links, then passes in the time left.

    What an engine adds to a pass runs during the previous pass, so it is reported (`gpu.host_s`) and not charged.
    `ranks`: with several; `loaded` is rank 0's part of a decode instance then.
    """
    begun_s, info, device = time.monotonic(), loaded.info, loaded.device
    others = OtherWork()
    rates = device_rates(device, CudaTimer(device))
    blocks = bandwidth_by_blocks(device)
    count = torch.cuda.device_count()
    links = device_copies(info.geometry(config.kv_pool.block_size), [torch.device("cuda", n) for n in range(count)])
    devices = [f"a GPU for {role}" for role in ROLES]
    if ranks is not None:
        devices = [device_of(name.partition(":")[2] for name in ranks.part(role).devices) for role in ROLES]
    grid = _grid(info, device, 1 if ranks is None else most_sharing(ranks))
    left_s = max(LEAST_PASSES_S, limit_s - (time.monotonic() - begun_s))
    if ranks is None:
        benches = gpu_benches(loaded, config, grid.requests)
        passes = measure_passes(loaded, grid, left_s, benches, host_overhead_s, HOST_REQUESTS)
    else:
        passes = measure_rank_passes(config, ranks, grid, left_s, host_overhead_s, HOST_REQUESTS)
    name, properties = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device)
    profiled = Profiled(
        name=f"{info.name}-{name}".replace(" ", "-").lower(),
        model=info.name,
        device=name,
        shape=shape,
        sm_count=int(properties.multi_processor_count),
        measurements=passes.plan,
        hardware=_hardware(config, info, memory_bytes, properties.total_memory, links, devices),
        hardware_note="the stores that `alignedserve serve` would plan with a GPU for each rank; links measured",
        host_s={},
        grid=grid,
        no_split=passes.no_split,
        block_bandwidth=blocks[1],
    )
    content = fit_profile(profiled)
    content["fit"]["rounds"] = passes.rounds
    content["dtype"] = info.dtype
    content["gpu"] = {
        "memory_bytes": properties.total_memory,
        "versions": _versions(),
        "backends": passes.backends,
        "rates": {name: round(rate) for name, rate in rates.items()},
        "bandwidth_by_blocks": {str(number): round(rate) for number, rate in blocks.items()},
        "links": [link.to_dict() for link in links],
        "host_s": {str(number): round(seconds, 9) for number, seconds in passes.host_s.items()},
    }
    if ranks is not None:
        content["degrees"] = {role: asdict(degrees) for role, degrees in ranks.degrees.items()}
    return with_other_work(content, others)


def profile_gpus(
    config: Config,
    info: ModelInfo,
    shape: ModelShape,
    memory_bytes: int,
    limit_s: float,
    host_overhead_s: HostOverhead,
    gpus: int,
) -> dict[str, Any]:
    """The same of instances of several ranks, on `gpus` GPUs. Not yet run on GPUs.

    The attention backend is the configured one, or the fastest if that is `auto`; the one that does not split KV is not
    measured beside it.
    """
    made: RoleBenches[DevicePassBench] = RoleBenches(config, info, gpus)
    with contextlib.closing(made) as benches:
        loaded = benches.part("decode").loaded
        return profile_gpu(config, loaded, shape, memory_bytes, limit_s, host_overhead_s, benches)


def _grid(info: ModelInfo, device: torch.device, sharing: int) -> Grid:
    """The grid, limited to passes whose KV fits beside the model. `sharing`: ranks on the fullest device."""
    free, _ = torch.cuda.mem_get_info(device)
    room = int(ROOM * free) - activation_bytes(info, GPU_GRID.chunks[-1] + GPU_GRID.requests[-1], GPU_GRID.requests[-1])
    most = min(GPU_GRID.most_tokens, room // sharing // info.geometry(BLOCK_SIZE).token_bytes)
    if most < LEAST_BLOCKS * BLOCK_SIZE:
        raise ResourceError(
            f"{describe_bytes(free)} of {device} are free beside {info.name}: too little to profile passes; stop "
            "other processes that use it, or choose a smaller model.dtype"
        )
    return replace(GPU_GRID, most_tokens=most)


def _hardware(
    config: Config,
    info: ModelInfo,
    memory_bytes: int,
    device_bytes: int,
    links: Sequence[LinkFigures],
    places: Sequence[str],
) -> dict[str, float]:
    """Fields of the simulator's Hardware. `links`: as `device_copies` returns them. `places`: of prefill, of decode."""
    devices = [
        (role, DeviceMemory(f"{role}-0", place, device_bytes, device_bytes))
        for role, place in zip(ROLES, places, strict=True)
    ]
    one_each = replace(config, cluster=replace(config.cluster, prefill=1, decode=1))
    to_device, from_device, within, *between = links
    return {
        **store_fields(plan_stores(one_each, info, memory_bytes, devices), info),
        "pool_bandwidth": round(min(to_device.bandwidth, from_device.bandwidth)),
        "peer_bandwidth": round(max((link.bandwidth for link in between), default=within.bandwidth)),
        "copy_latency_s": round(to_device.latency_s, 9),
    }


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("triton", "transformers"):
        found[package] = importlib.metadata.version(package)
    return found
