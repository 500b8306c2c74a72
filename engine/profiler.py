"""`alignedserve profile`: this machine and a model as a cost model's file."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from alignedserve.config import Config
from alignedserve.engine import host
from alignedserve.engine.inspect import inspect_model
from alignedserve.engine.loader import LoadedModel, load_model
from alignedserve.engine.profile import PassBench, copy_bandwidth, measure, plan_measurements
from alignedserve.engine.profile_fit import Profiled, fit_profile
from alignedserve.memory import available_memory_bytes
from alignedserve.model import ModelInfo, resolve_model
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.sizing import plan_stores


def profile(config: Config, device: str, limit_s: float) -> dict[str, Any]:
    """Load the configured model on `device`, measure for about `limit_s` seconds, fit. Raises ModelError."""
    memory_bytes = available_memory_bytes()
    host.prepare_process(config)
    path = resolve_model(config.model.path, config.model.trust_remote_code)
    trusted = config.model.trust_remote_code
    info = inspect_model(config.served_model_name, path, config.model.dtype, device, trusted)
    loaded = load_model(info, device, trusted)
    plan = plan_measurements(info.max_positions)
    bench = PassBench(loaded, plan)
    rounds = measure(bench.run, plan, limit_s, time.monotonic)
    profiled = Profiled(
        name=f"{info.name}-{loaded.device.type}",
        model=info.name,
        device=_device_name(loaded.device),
        shape=_shape(info, path, trusted),
        sm_count=_workers(loaded.device),
        measurements=plan,
        hardware=_hardware(config, loaded, memory_bytes),
        hardware_note="the stores that `alignedserve serve` would plan now; copies measured",
    )
    content = fit_profile(profiled)
    content["fit"]["rounds"] = rounds
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
    stores = plan_stores(config, info, memory_bytes, on_gpu=on_gpu)
    geometry = info.geometry(stores.block_size)
    cache = stores.decode_cache
    if on_gpu:
        cache = torch.cuda.mem_get_info(loaded.device)[0] * 9 // 10 // geometry.block_bytes
    from_host, between = copy_bandwidth(loaded.device)
    return {
        "kv_tokens": cache * stores.block_size,
        "kv_bytes_per_token": geometry.token_bytes,
        "pool_tokens": stores.pool * stores.block_size,
        "block_size": stores.block_size,
        "pool_bandwidth": round(from_host),
        "peer_bandwidth": round(between),
    }
