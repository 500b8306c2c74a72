"""`alignedserve profile`: this machine and a model as a cost model's file."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from alignedserve.config import Config
from alignedserve.device_memory import DECODE, PREFILL, DeviceMemory
from alignedserve.engine import host
from alignedserve.engine.copies import copy_bandwidth, host_copies
from alignedserve.engine.inspect import inspect_model
from alignedserve.engine.loader import LoadedModel, load_model
from alignedserve.engine.other_work import QUIET_SHARE, OtherWork
from alignedserve.engine.profile import PassBench, measure, plan_measurements
from alignedserve.engine.profile_fit import Profiled, fit_profile
from alignedserve.engine.runner import ModelRunner
from alignedserve.errors import ConfigError
from alignedserve.memory import available_memory_bytes
from alignedserve.model import ModelInfo, resolve_model
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.sizing import plan_stores

HOST_REQUESTS = (1, 4, 16, 64)  # at which the engine's own part of a pass is measured
HostOverhead = Callable[[ModelRunner, int, int], float]


def profile(config: Config, device: str, limit_s: float, host_overhead_s: HostOverhead) -> dict[str, Any]:
    """Load the configured model on `device`, measure for about `limit_s` seconds, fit.

    Raises ModelError, and ConfigError where the device is CUDA, and torch has none.

    `host_overhead_s(runner, blocks of its store, requests)`: seconds that an engine adds to a pass of so many requests.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch finds no CUDA device here; use --device cpu")
    memory_bytes = available_memory_bytes()
    host.prepare_process(config)
    path = resolve_model(config.model.path, config.model.trust_remote_code)
    trusted = config.model.trust_remote_code
    info = inspect_model(config.served_model_name, path, config.model.dtype, device, trusted)
    loaded = load_model(info, device, trusted)
    plan = plan_measurements(info.max_positions)
    bench = PassBench(loaded, plan, config.engine.attention)
    others = OtherWork()
    rounds = measure(bench.run, plan, limit_s, time.monotonic)
    host_s = {requests: host_overhead_s(bench.runner, bench.blocks, requests) for requests in HOST_REQUESTS}
    profiled = Profiled(
        name=f"{info.name}-{loaded.device.type}",
        model=info.name,
        device=_device_name(loaded.device),
        shape=_shape(info, path, trusted),
        sm_count=_workers(loaded.device),
        measurements=plan,
        hardware=_hardware(config, loaded, memory_bytes),
        hardware_note="the stores that `alignedserve serve` would plan now; copies and overheads measured",
        host_s=host_s,
    )
    content = fit_profile(profiled)
    busy = others.share()
    content["fit"] |= {"rounds": rounds, "passes_by_clock": dict(bench.clocks), "other_work_share": round(busy, 3)}
    content["fit"]["quiet"] = busy <= QUIET_SHARE
    content["dtype"] = info.dtype
    return content


def _shape(info: ModelInfo, path: Path, trusted: bool) -> ModelShape:
    text = AutoConfig.from_pretrained(path, trust_remote_code=trusted).get_text_config(decoder=True)
    itemsize = getattr(torch, info.dtype).itemsize
    return ModelShape(info.layers, int(text.num_attention_heads), info.kv_heads, info.head_dim, itemsize)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def _workers(device: torch.device) -> int:
    """How many (request, head) jobs run at once."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


def _hardware(config: Config, loaded: LoadedModel, memory_bytes: int) -> dict[str, float]:
    """Fields of the simulator's Hardware: what the stores would hold, and what copies reach."""
    on_gpu = loaded.device.type == "cuda"
    info = loaded.info
    stores = plan_stores(config, info, memory_bytes, _devices(loaded.device) if on_gpu else ())
    geometry = info.geometry(stores.block_size)
    cache = stores.decode_cache
    if on_gpu:
        (from_host, between), copies = copy_bandwidth(loaded.device), {}
    else:
        from_host, latency_s = host_copies(geometry)
        between, copies = from_host, {"copy_latency_s": round(latency_s, 9)}
    return {
        "kv_tokens": cache * stores.block_size,
        "kv_bytes_per_token": geometry.token_bytes,
        "pool_tokens": stores.pool * stores.block_size,
        "block_size": stores.block_size,
        "pool_bandwidth": round(from_host),
        "peer_bandwidth": round(between),
        **copies,
    }


def _devices(device: torch.device) -> list[tuple[str, DeviceMemory]]:
    """A GPU like this one for each role, with nothing on it."""
    _, total = torch.cuda.mem_get_info(device)
    return [(role, DeviceMemory(f"{role}-0", f"{device} for {role}", total, total)) for role in (PREFILL, DECODE)]
