"""`alignedserve profile` on a GPU: measures rates, links and passes in both kernel modes for a cost model's file."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from alignedserve.config import Config
from alignedserve.device_memory import DeviceMemory, RanksHere, activation_bytes
from alignedserve.engine.backends.choice import AUTO
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.profile.bandwidth import bandwidth_by_blocks
from alignedserve.engine.profile.copies import LinkFigures, device_copies
from alignedserve.engine.profile.device_passes import (
    GPU_GRID,
    NO_SPLIT,
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
from alignedserve.engine.profile.rank_passes import measure_rank_passes
from alignedserve.engine.profile.role_benches import ROLES, Arranged, RoleBenches, in_order
from alignedserve.errors import ResourceError
from alignedserve.memory import describe_bytes
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees, device_of
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

    What an engine adds to a pass is reported (`gpu.host_s`), and charged unless it runs during the previous pass.
    `ranks`: with several; `loaded` is rank 0's part of a decode instance then.
    """
    begun_s, info, device = time.monotonic(), loaded.info, loaded.device
    others = OtherWork([] if ranks is None else ranks.other_pids)
    rates = device_rates(device, CudaTimer(device))
    blocks = bandwidth_by_blocks(device)
    count = torch.cuda.device_count()
    links = device_copies(info.geometry(config.kv_pool.block_size), [torch.device("cuda", n) for n in range(count)])
    grid = _grid(info, {str(device): [RanksHere(1, Degrees())]} if ranks is None else ranks.by_device())
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
        hardware=_hardware(config, info, memory_bytes, properties.total_memory, links),
        hardware_note="the stores that `alignedserve serve` would plan with a GPU for each rank; links measured",
        host_s=passes.host_s if passes.waits_for_host else {},
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
    return with_other_work(content, others.share())


def profile_gpus(
    config: Config,
    info: ModelInfo,
    shape: ModelShape,
    memory_bytes: int,
    limit_s: float,
    host_overhead_s: HostOverhead,
    gpus: int,
    arranged: Arranged = in_order,
) -> dict[str, Any]:
    """The same of instances of several ranks, on `gpus` GPUs. Not yet run on GPUs.

    The attention backend is the configured one, or the fastest if that is `auto`; the one that does not split KV is not
    measured. `arranged` is as for `RoleBenches`.
    """
    if config.engine.attention == NO_SPLIT:
        config = replace(config, engine=replace(config.engine, attention=AUTO))
    made: RoleBenches[DevicePassBench] = RoleBenches(config, info, gpus, arranged)
    with contextlib.closing(made) as benches:
        loaded = benches.part("decode").loaded
        return profile_gpu(config, loaded, shape, memory_bytes, limit_s, host_overhead_s, benches)


def _grid(info: ModelInfo, ranks: Mapping[str, Sequence[RanksHere]]) -> Grid:
    """The grid, limited to passes whose KV fits beside the model. `ranks`: of each instance on a device, by device."""
    geometry, most = info.geometry(BLOCK_SIZE), GPU_GRID.most_tokens
    each = activation_bytes(info, GPU_GRID.chunks[-1] + GPU_GRID.requests[-1], GPU_GRID.requests[-1])
    for device, instances in ranks.items():
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        room = int(ROOM * free) - each * sum(here.number for here in instances)
        # Each range of ranks that share experts has as many blocks as the store of one rank would have.
        block_bytes = sum(here.block_bytes(info, geometry) * here.degrees.experts for here in instances)
        most = min(most, room // block_bytes * BLOCK_SIZE)
        if most >= LEAST_BLOCKS * BLOCK_SIZE:
            continue
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
) -> dict[str, float]:
    """Fields of the simulator's Hardware. `links`: as `device_copies` returns them."""
    devices, first = [], 0
    for role in ROLES:  # planned on GPUs of their own, on whichever they were measured
        ranks = config.degrees(role).ranks
        place = device_of(range(first, first + ranks))
        devices.append((role, DeviceMemory(f"{role}-0", place, device_bytes, device_bytes)))
        first += ranks
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
