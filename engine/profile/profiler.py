"""`alignedserve profile`: measures this machine with a model, as a cost model's file."""

from __future__ import annotations

import contextlib
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from alignedserve.config import Config
from alignedserve.engine.model import host
from alignedserve.engine.model.inspect import inspect_model
from alignedserve.engine.model.loader import load_model
from alignedserve.engine.profile.copies import host_copies
from alignedserve.engine.profile.fit import Profiled, fit_profile
from alignedserve.engine.profile.other_work import QUIET_SHARE, OtherWork
from alignedserve.engine.profile.passes import Measurement, PassBench, measure, plan_measurements
from alignedserve.engine.profile.role_benches import ROLES, Arranged, LoadedRole, RoleBenches, in_order
from alignedserve.engine.runner import ModelRunner
from alignedserve.errors import ConfigError
from alignedserve.memory import available_memory_bytes
from alignedserve.model import ModelInfo, resolve_model
from alignedserve.scheduler.cost.parts import ModelShape
from alignedserve.sizing import StorePlan, plan_stores

HOST_REQUESTS = (1, 4, 16, 64)  # numbers of requests for which the engine's overhead is measured
HostOverhead = Callable[[ModelRunner, int, int], float]


def profile(
    config: Config, device: str, limit_s: float, host_overhead_s: HostOverhead, arranged: Arranged = in_order
) -> dict[str, Any]:
    """Load the configured model on `device`, measure for about `limit_s` seconds, fit.

    Raises ModelError, and ConfigError if the device is CUDA and torch has none.

    `host_overhead_s(runner, blocks of its store, requests)`: seconds that an engine adds to a pass of that many
    requests. `arranged`: as for `RoleBenches`.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu")
    memory_bytes = available_memory_bytes()
    host.prepare_process(config)
    path = resolve_model(config.model.path, config.model.trust_remote_code)
    trusted = config.model.trust_remote_code
    info = inspect_model(config.served_model_name, path, config.model.dtype, device, trusted)
    shape = _shape(info, path, trusted)
    if device == "cuda":
        from alignedserve.engine.profile.profiler_gpu import profile_gpu, profile_gpus  # needs Triton

        if all(config.degrees(role).ranks == 1 for role in ROLES):
            loaded = load_model(info, "cuda:0", trusted)
            return profile_gpu(config, loaded, shape, memory_bytes, limit_s, host_overhead_s)
        gpus = torch.cuda.device_count()
        return profile_gpus(config, info, shape, memory_bytes, limit_s, host_overhead_s, gpus, arranged)
    plan, threads = plan_measurements(info.max_positions), torch.get_num_threads()
    made: RoleBenches[PassBench] = RoleBenches(config, info)
    with contextlib.closing(made) as benches:
        benches.open(lambda part: _bench(config, plan, part))
        others = OtherWork(benches.other_pids)
        rounds = measure(benches.run, plan, limit_s, time.monotonic)
        decode = benches.decode
        host_s = {requests: host_overhead_s(decode.runner, decode.blocks, requests) for requests in HOST_REQUESTS}
        other_share = others.share()
    torch.set_num_threads(threads)
    profiled = Profiled(
        name=f"{info.name}-{device}",
        model=info.name,
        device=_processor(),
        shape=shape,
        sm_count=torch.get_num_threads(),  # number of (request, head) jobs that run at once
        measurements=plan,
        hardware=_hardware(config, info, memory_bytes),
        hardware_note="the stores that `alignedserve serve` would plan now; copies and overheads measured",
        host_s=host_s,
    )
    content = fit_profile(profiled)
    clocks: Counter[str] = sum((bench.clocks for bench in benches.benches), Counter())
    content["fit"] |= {"rounds": rounds, "passes_by_clock": dict(clocks)}
    content["degrees"] = {role: asdict(degrees) for role, degrees in benches.degrees.items()}
    content["dtype"] = info.dtype
    return with_other_work(content, other_share)


def _bench(config: Config, plan: Sequence[Measurement], part: LoadedRole) -> PassBench:
    return PassBench(part.loaded, plan, config.engine.attention, ranks=part.ranks, experts=part.degrees.experts)


def with_other_work(content: dict[str, Any], busy: float) -> dict[str, Any]:
    """`content` with the share of the processors that other work used, in `fit`."""
    content["fit"] |= {"other_work_share": round(busy, 3), "quiet": busy <= QUIET_SHARE}
    return content


def _shape(info: ModelInfo, path: Path, trusted: bool) -> ModelShape:
    text = AutoConfig.from_pretrained(path, trust_remote_code=trusted).get_text_config(decoder=True)
    itemsize = getattr(torch, info.dtype).itemsize
    return ModelShape(info.layers, int(text.num_attention_heads), info.kv_heads, info.head_dim, itemsize)


def _processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def _hardware(config: Config, info: ModelInfo, memory_bytes: int) -> dict[str, float]:
    """Fields of the simulator's Hardware: sizes of the stores, and rates of copies."""
    stores = plan_stores(config, info, memory_bytes)
    bandwidth, latency_s = host_copies(info.geometry(stores.block_size))
    return {
        **store_fields(stores, info),
        "pool_bandwidth": round(bandwidth),
        "peer_bandwidth": round(bandwidth),
        "copy_latency_s": round(latency_s, 9),
    }


def store_fields(stores: StorePlan, info: ModelInfo) -> dict[str, float]:
    """The fields of the simulator's Hardware that the plan decides."""
    return {
        "kv_tokens": stores.decode_cache * stores.block_size,
        "kv_bytes_per_token": info.geometry(stores.block_size).token_bytes,
        "pool_tokens": stores.pool * stores.block_size,
        "block_size": stores.block_size,
    }
