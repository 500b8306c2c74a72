"""`alignedserve profile` on a GPU: measures rates, links and passes in both kernel modes for a cost model's file."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from alignedserve.config import Config
from alignedserve.device_memory import DECODE, PREFILL, DeviceMemory, activation_bytes
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.profile.bandwidth import bandwidth_by_blocks
from alignedserve.engine.profile.copies import LinkFigures, device_copies
from alignedserve.engine.profile.device_passes import GPU_GRID, CudaTimer, device_rates, gpu_benches, measure_passes
from alignedserve.engine.profile.fit import Profiled, fit_profile
from alignedserve.engine.profile.other_work import OtherWork
from alignedserve.engine.profile.passes import BLOCK_SIZE, LEAST_BLOCKS, Grid
from alignedserve.engine.profile.profiler import HOST_REQUESTS, HostOverhead, store_fields, with_other_work
from alignedserve.errors import ResourceError
from alignedserve.memory import describe_bytes
from alignedserve.model import ModelInfo
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
) -> dict[str, Any]:
    """`profile` of a model on a GPU: rates first, which warm its clocks, then links, then passes in the time left.

    What an engine adds to a pass runs during the previous pass, so it is reported (`gpu.host_s`) and not charged.
    """
    begun_s, info, device = time.monotonic(), loaded.info, loaded.device
    others = OtherWork()
    rates = device_rates(device, CudaTimer(device))
    blocks = bandwidth_by_blocks(device)
    count = torch.cuda.device_count()
    links = device_copies(info.geometry(config.kv_pool.block_size), [torch.device("cuda", n) for n in range(count)])
    grid = _grid(info, device)
    left_s = max(LEAST_PASSES_S, limit_s - (time.monotonic() - begun_s))
    benches = gpu_benches(loaded, config, grid.requests)
    passes = measure_passes(loaded, grid, left_s, benches, host_overhead_s, HOST_REQUESTS)
    name, properties = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device)
    profiled = Profiled(
        name=f"{info.name}-{name}".replace(" ", "-").lower(),
        model=info.name,
        device=name,
        shape=shape,
        sm_count=int(properties.multi_processor_count),
        measurements=passes.plan,
        hardware=_hardware(config, info, memory_bytes, properties.total_memory, links),
        hardware_note="the stores that `alignedserve serve` would plan with a GPU for each instance; links measured",
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
    return with_other_work(content, others)


def _grid(info: ModelInfo, device: torch.device) -> Grid:
    """The grid, limited to passes whose KV fits beside the model."""
    free, _ = torch.cuda.mem_get_info(device)
    room = int(ROOM * free) - activation_bytes(info, GPU_GRID.chunks[-1] + GPU_GRID.requests[-1], GPU_GRID.requests[-1])
    most = min(GPU_GRID.most_tokens, room // info.geometry(BLOCK_SIZE).token_bytes)
    if most < LEAST_BLOCKS * BLOCK_SIZE:
        raise ResourceError(
            f"{describe_bytes(free)} of {device} are free beside {info.name}: too little to profile passes; stop "
            "other processes that use it, or choose a smaller model.dtype"
        )
    return replace(GPU_GRID, most_tokens=most)


def _hardware(
    config: Config, info: ModelInfo, memory_bytes: int, device_bytes: int, links: Sequence[LinkFigures]
) -> dict[str, float]:
    """Fields of the simulator's Hardware. `links`: as `device_copies` returns them."""
    roles = (PREFILL, DECODE)
    devices = [(role, DeviceMemory(f"{role}-0", f"a GPU for {role}", device_bytes, device_bytes)) for role in roles]
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
