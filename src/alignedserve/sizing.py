"""How many blocks each store gets: decided once for the cluster, from model, memory and configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from alignedserve.config import Config
from alignedserve.device_memory import DeviceMemory, RoleMemory, plan_devices
from alignedserve.errors import ResourceError
from alignedserve.geometry import KvGeometry
from alignedserve.memory import describe_bytes
from alignedserve.model import ModelInfo

GIB = 1 << 30
SPARE_BYTES = 400 << 20  # torch, transformers and all of ours, imported


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Capacities in blocks. `devices`: what an instance of each role may use of its GPU; empty on CPUs."""

    block_size: int
    pool: int
    prefill_cache: int
    decode_cache: int
    batch_buffer: int
    requests_buffer: int
    devices: dict[str, RoleMemory] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StorePlan:
        raw = json.loads(text)
        devices = {role: RoleMemory(**memory) for role, memory in raw.pop("devices", {}).items()}
        return cls(**raw, devices=devices)


def plan_stores(
    config: Config, model: ModelInfo, memory_bytes: int, devices: Sequence[tuple[str, DeviceMemory]] = ()
) -> StorePlan:
    """Divide memory. `memory_bytes` is what the node with the pool had free before any weights were loaded.

    Caches and buffers on a CPU are touched only as they fill, so they are sized for work, within a share of memory:
    a decode cache holds four requests of the longest kind (32,768 tokens at least), a prefill cache two. `devices`: the
    role and the GPU of every instance, where they have one; then only the pool lies in host memory, and the rest is
    planned by `device_memory`.

    Raises ResourceError, with the figures, where what is asked for does not fit or the pool cannot hold two blocks.
    """
    geometry = model.geometry(config.kv_pool.block_size)
    instances = max(1, config.cluster.prefill + config.cluster.decode)
    weights = 0 if devices else instances * model.weight_bytes
    available_bytes = max(0, memory_bytes - weights - config.supervisor.spares * SPARE_BYTES)
    pool = (int(config.kv_pool.size_gib * GIB) or available_bytes // 4) // geometry.block_bytes
    if devices:
        found = plan_devices(config, model, devices)
        plan = StorePlan(
            block_size=config.kv_pool.block_size,
            pool=pool,
            prefill_cache=found.prefill_cache,
            decode_cache=found.decode_cache,
            batch_buffer=found.batch_buffer,
            requests_buffer=found.requests_buffer,
            devices=found.roles,
        )
    else:
        plan = _plan_on_cpu(config, geometry, geometry.blocks_for(model.max_positions) + 1, pool, available_bytes)
    _require_room(config, plan, geometry.block_bytes, memory_bytes, 0 if devices else model.weight_bytes)
    return plan


def _plan_on_cpu(config: Config, geometry: KvGeometry, longest: int, pool: int, available_bytes: int) -> StorePlan:
    """`longest`: blocks of a request of as many positions as the model has, and one to grow."""
    instances = max(1, config.cluster.prefill + config.cluster.decode)
    per_instance = available_bytes // (8 * instances)

    def own(configured: int, requests: int, least_tokens: int) -> int:
        wanted = max(requests * longest, geometry.blocks_for(least_tokens))
        return configured or max(2, min(wanted, per_instance // geometry.block_bytes))

    decode_cache = own(config.decode.cache_blocks, 4, 32768)
    prefill_cache = own(config.prefill.cache_blocks, 2, 16384)
    largest = min(longest, decode_cache)
    share = config.scheduler.max_batch_blocks or int(decode_cache * config.scheduler.max_batch_share)
    served = -(-config.cluster.decode // config.cluster.prefill)  # decode instances that share one's buffers
    batch_buffer = config.prefill.batch_buffer_blocks or served * max(share, largest)
    # A decode instance leases room for its largest request there, to evict without asking; the rest is for late joins.
    requests_buffer = config.prefill.requests_buffer_blocks or served * largest + batch_buffer // 2
    return StorePlan(
        block_size=config.kv_pool.block_size,
        pool=pool,
        prefill_cache=prefill_cache,
        decode_cache=decode_cache,
        batch_buffer=batch_buffer,
        requests_buffer=requests_buffer,
    )


def _require_room(config: Config, plan: StorePlan, block_bytes: int, memory_bytes: int, weight_bytes: int) -> None:
    """Raises ResourceError where the stores (and weights, where those lie there too) are more than host memory has."""
    prefill, decode = config.cluster.prefill, config.cluster.decode
    parts = {"the KV pool": plan.pool * block_bytes}
    if config.supervisor.spares:
        parts[f"{config.supervisor.spares} warm spare(s)"] = config.supervisor.spares * SPARE_BYTES
    if weight_bytes:
        parts[f"the weights of {prefill + decode} workers"] = (prefill + decode) * weight_bytes
        parts[f"{decode} decode cache(s)"] = decode * plan.decode_cache * block_bytes
        parts[f"{prefill} prefill cache(s)"] = prefill * plan.prefill_cache * block_bytes
        if config.cluster.prefetch:
            buffers = plan.batch_buffer + plan.requests_buffer
            parts[f"the candidate buffers of {prefill} prefill instance(s)"] = prefill * buffers * block_bytes
    needed = sum(parts.values())
    if needed > memory_bytes:
        figures = ", ".join(f"{describe_bytes(size)} for {name}" for name, size in parts.items())
        raise ResourceError(
            f"this cluster needs {describe_bytes(needed)} of host memory, but only {describe_bytes(memory_bytes)} are "
            f"available: {figures}; lower kv_pool.size_gib, decode.cache_blocks or prefill.cache_blocks, or ask for "
            "fewer instances"
        )
    if plan.pool < 2:
        raise ResourceError(
            f"a pool of {describe_bytes(parts['the KV pool'])} holds {plan.pool} blocks of "
            f"{describe_bytes(block_bytes)}; set kv_pool.size_gib higher"
        )
