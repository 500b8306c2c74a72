"""Sizes of all stores in blocks, planned once for the cluster from model, memory and configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from alignedserve.batch_size import LEAST
from alignedserve.config import Config
from alignedserve.device_memory import DeviceMemory, RoleMemory, plan_devices
from alignedserve.errors import ResourceError
from alignedserve.geometry import KvGeometry
from alignedserve.memory import describe_bytes
from alignedserve.model import ModelInfo
from alignedserve.prefix_marks import TOKEN_BYTES

GIB = 1 << 30
DISK_INDEX_BYTES = 300  # of a block on disk, in the shard's process
SPARE_BYTES = 400 << 20  # a process that has imported torch, transformers and this package
RANK_BYTES = 300 << 20  # a further rank's process, beside its weights
INDEX_BYTES = 128  # of the prefix index for each block, beside the block's tokens (ADR 66)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """One node's free memory before any weights were loaded, and the processes planned there.

    `prefill`, `decode`: instances; of one that is spread over nodes, the most that may be there. `buffers`:
    prefill instances whose candidate buffers are there, by default all. `shard`: whether a shard of the pool is there.
    """

    node_id: str
    available_bytes: int
    prefill: float
    decode: float
    spares: int
    buffers: int = -1
    shard: bool = True

    @property
    def with_buffers(self) -> int:
        return self.buffers if self.buffers >= 0 else math.ceil(self.prefill)

    @property
    def instances(self) -> float:
        return max(1.0, self.prefill + self.decode)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Capacities of the stores in blocks. `pool` is the capacity of each shard. `max_running`: the most requests in an
    iteration of a decode instance. `devices` holds the GPU memory of the instances of each role; it is empty on CPUs.
    """

    block_size: int
    pool: int
    prefill_cache: int
    decode_cache: int
    batch_buffer: int
    requests_buffer: int
    max_running: int = LEAST
    devices: dict[str, RoleMemory] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StorePlan:
        raw = json.loads(text)
        devices = {role: RoleMemory(**memory) for role, memory in raw.pop("devices", {}).items()}
        return cls(**raw, devices=devices)


def instance_bytes(config: Config, role: str, model: ModelInfo) -> int:
    """Bytes of host memory of the weights of an instance of this role on CPUs, and of its further ranks' processes.

    Ranks that share experts have all other weights each. The embedding that is the head, too, is in two stages.
    """
    degrees = config.degrees(role)
    weights = degrees.experts * (model.weight_bytes - model.expert_bytes) + model.expert_bytes
    return weights + (model.tied_bytes if degrees.stages > 1 else 0) + (degrees.ranks - 1) * RANK_BYTES


def plan_stores(
    config: Config,
    model: ModelInfo,
    memory: int | Sequence[HostMemory],
    devices: Sequence[tuple[str, DeviceMemory]] = (),
) -> StorePlan:
    """Divide memory between the stores.

    `memory` is the free memory of each node with a shard, before any weights were loaded; for a single node its bytes
    suffice. All shards have equal capacity, and so have all stores of a kind: the node with the least memory decides.

    Memory of a store on a CPU is touched only as it fills, so caches and buffers are sized for work, within a share of
    memory: a decode cache holds four requests of the greatest length (at least 32,768 tokens), a prefill cache two.
    `devices` gives the role and the GPU of every instance, if they have GPUs. Then only the pool is in host memory, and
    `device_memory` plans the other stores.

    Raises ResourceError, with the figures, if the stores do not fit or a shard cannot hold two blocks.
    """
    geometry = model.geometry(config.kv_pool.block_size)
    hosts = [_only(config, memory)] if isinstance(memory, int) else memory
    own = {role: 0 if devices else instance_bytes(config, role, model) for role in ("prefill", "decode")}
    available = [max(0, host.available_bytes - _taken(host, own)) for host in hosts]
    pool = (int(config.kv_pool.size_gib * GIB) or _least_with_shard(hosts, available) // 4) // geometry.block_bytes
    if devices:
        found = plan_devices(config, model, devices)
        plan = StorePlan(
            block_size=config.kv_pool.block_size,
            pool=pool,
            prefill_cache=found.prefill_cache,
            decode_cache=found.decode_cache,
            batch_buffer=found.batch_buffer,
            requests_buffer=found.requests_buffer,
            max_running=found.max_running,
            devices=found.roles,
        )
    else:
        per_instance = min(int(free / (8 * host.instances)) for free, host in zip(available, hosts, strict=True))
        plan = _plan_on_cpu(config, geometry, geometry.blocks_for(model.max_positions) + 1, pool, per_instance)
    for host in hosts:
        where = f" on node {host.node_id}" if len(hosts) > 1 else ""
        _require_room(config, plan, geometry.block_bytes, host, own, where)
    if pool < 2:
        raise ResourceError(
            f"a shard of {describe_bytes(pool * geometry.block_bytes)} holds {pool} blocks of "
            f"{describe_bytes(geometry.block_bytes)}; set kv_pool.size_gib higher"
        )
    return plan


def _least_with_shard(hosts: Sequence[HostMemory], available: Sequence[int]) -> int:
    return min(free for free, host in zip(available, hosts, strict=True) if host.shard)


def _only(config: Config, memory_bytes: int) -> HostMemory:
    """A single node that runs all processes."""
    return HostMemory("", memory_bytes, config.cluster.prefill, config.cluster.decode, config.supervisor.spares)


def _taken(host: HostMemory, own: Mapping[str, int]) -> int:
    """Bytes that instances' weights and ranks, and spares, take on a node. `own`: of an instance, by role."""
    return int(host.prefill * own["prefill"] + host.decode * own["decode"]) + host.spares * SPARE_BYTES


def _plan_on_cpu(config: Config, geometry: KvGeometry, longest: int, pool: int, per_instance: int) -> StorePlan:
    """`longest`: blocks of a request that uses all positions of the model, and one more to grow. `per_instance`: the
    maximum bytes of a cache that is not configured."""

    def own(configured: int, requests: int, least_tokens: int) -> int:
        wanted = max(requests * longest, geometry.blocks_for(least_tokens))
        return configured or max(2, min(wanted, per_instance // geometry.block_bytes))

    decode_cache = own(config.decode.cache_blocks, 4, 32768)
    prefill_cache = own(config.prefill.cache_blocks, 2, 16384)
    largest = min(longest, decode_cache)
    share = config.scheduler.max_batch_blocks or int(decode_cache * config.scheduler.max_batch_share)
    # Decode instances that share the buffers of a prefill instance.
    served = -(-config.cluster.decode // config.cluster.prefill)
    batch_buffer = config.prefill.batch_buffer_blocks or served * max(share, largest)
    # Each decode instance leases room for its largest request there for evictions; the rest is for late candidates.
    requests_buffer = config.prefill.requests_buffer_blocks or served * largest + batch_buffer // 2
    return StorePlan(
        block_size=config.kv_pool.block_size,
        pool=pool,
        prefill_cache=prefill_cache,
        decode_cache=decode_cache,
        batch_buffer=batch_buffer,
        requests_buffer=requests_buffer,
        max_running=config.decode.max_running or LEAST,  # its iterations are long enough
    )


def _require_room(
    config: Config, plan: StorePlan, block_bytes: int, host: HostMemory, own: Mapping[str, int], where: str
) -> None:
    """Raises ResourceError if the stores, and the weights if they are in host memory too, do not fit the node."""
    prefill, decode = host.prefill, host.decode
    parts: dict[str, float] = {}
    if host.shard:
        parts["the pool's shard"] = plan.pool * block_bytes
    if host.shard and config.kv_pool.prefix_cache:
        parts["the shard's prefix index"] = plan.pool * (INDEX_BYTES + TOKEN_BYTES * plan.block_size)
    if host.spares:
        parts[f"{host.spares} warm spare(s)"] = host.spares * SPARE_BYTES
    if host.shard and config.kv_pool.disk_gib:
        parts["the index of the disk tier"] = int(config.kv_pool.disk_gib * GIB) // block_bytes * DISK_INDEX_BYTES
    if any(own.values()):
        ranks = round(prefill * config.degrees("prefill").ranks + decode * config.degrees("decode").ranks)
        of_ranks = f" of {ranks} ranks" if ranks > prefill + decode else ""
        parts[f"the weights of {prefill + decode:g} workers{of_ranks}"] = _taken(replace(host, spares=0), own)
        parts[f"{decode:g} decode cache(s)"] = decode * plan.decode_cache * block_bytes
        parts[f"{prefill:g} prefill cache(s)"] = prefill * plan.prefill_cache * block_bytes
        if config.cluster.prefetch and (count := host.with_buffers):
            buffers = plan.batch_buffer + plan.requests_buffer
            parts[f"the candidate buffers of {count} prefill instance(s)"] = count * buffers * block_bytes
    needed = int(sum(parts.values()))
    if needed > host.available_bytes:
        figures = ", ".join(f"{describe_bytes(int(size))} for {name}" for name, size in parts.items() if size)
        raise ResourceError(
            f"this cluster needs {describe_bytes(needed)} of host memory{where}, but only "
            f"{describe_bytes(host.available_bytes)} is available: {figures}; lower kv_pool.size_gib, "
            "decode.cache_blocks or prefill.cache_blocks, or use fewer instances"
        )
