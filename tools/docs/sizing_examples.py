"""Examples of divided memory, computed by the code that divides it."""

from __future__ import annotations

from dataclasses import replace

from markdown_text import table

from alignedserve.config import ClusterConfig, Config, KvPoolConfig
from alignedserve.device_memory import DeviceMemory, RanksHere, fixed_parts
from alignedserve.errors import ResourceError
from alignedserve.memory import GIB
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees, device_of
from alignedserve.sizing import StorePlan, plan_stores

EIGHT_B = ModelInfo(
    name="llama-3.1-8b",
    path="",
    model_type="llama",
    dtype="bfloat16",
    layers=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_positions=131_072,
    eos_token_ids=(),
    generation_defaults={},
    weight_bytes=16_060_522_496,
    heads=32,
    hidden_size=4096,
    mlp_width=14_336,
)
SEVENTY_B = replace(
    EIGHT_B,
    name="llama-3.3-70b",
    layers=80,
    weight_bytes=141_107_412_992,
    heads=64,
    hidden_size=8192,
    mlp_width=28_672,
)
GPUS = 80 * GIB
POOL_GIB = 200.0
HOST_GIB = 400


def gpus() -> str:
    """One prefill and one decode instance with an 80 GiB GPU each."""
    config = Config(cluster=ClusterConfig(device="cuda"), kv_pool=KvPoolConfig(size_gib=POOL_GIB)).on_device("cuda")
    roles = ("prefill", "decode")
    memories = [(role, DeviceMemory(f"{role}-0", f"cuda:{number}", GPUS, GPUS)) for number, role in enumerate(roles)]
    plan = plan_stores(config, EIGHT_B, HOST_GIB * GIB, memories)
    lines = []
    for role in ("decode", "prefill"):
        memory = plan.devices[role]
        lines += [f"{role.capitalize()} instance, {memory.budget / GIB:.1f} of 80 GiB to divide:", ""]
        rows = [(name, f"{size / GIB:.2f}") for name, size in memory.parts.items()]
        lines += table(("part", "GiB"), [*rows, ("together", f"{memory.used / GIB:.2f}")])
    lines += ["", f"The decode instance runs at most {plan.max_running} requests at once.", ""]
    return "\n".join([*lines, *_stores(config, EIGHT_B, plan)])


def ranks() -> str:
    """A rank's GPU of 80 GiB at several tensor parallel degrees, with one prefill and one decode instance."""
    rows = [row for degree in (2, 4, 8) for row in _of_ranks(degree)]
    columns = ("degree", "role", "weights, GiB", "other fixed parts", "left for KV", "tokens of KV")
    return "\n".join(table(columns, rows))


def _of_ranks(degree: int) -> list[tuple[str, ...]]:
    config = Config(
        cluster=ClusterConfig(device="cuda", tensor_parallel=degree), kv_pool=KvPoolConfig(size_gib=POOL_GIB)
    )
    config = config.on_device("cuda")
    devices = {role: device_of(range(first, first + degree)) for role, first in (("decode", 0), ("prefill", degree))}
    memories = [(role, DeviceMemory(f"{role}-0", device, GPUS, GPUS)) for role, device in devices.items()]
    stores: dict[str, int] = {}
    try:
        plan = plan_stores(config, SEVENTY_B, HOST_GIB * GIB, memories)
    except ResourceError:
        parts = {role: fixed_parts(config, SEVENTY_B, role, RanksHere(1, Degrees(degree))) for role in devices}
    else:
        parts = {role: dict(memory.parts) for role, memory in plan.devices.items()}
        stores = {"decode": plan.decode_cache, "prefill": plan.prefill_cache + plan.batch_buffer + plan.requests_buffer}
    rows = []
    for role in devices:
        kv = sum(size for name, size in parts[role].items() if name in ("cache", "batch buffer", "requests buffer"))
        other = sum(parts[role].values()) - kv - parts[role]["weights"]
        left = (f"{kv / GIB:.1f}", f"{stores[role] * config.kv_pool.block_size:,}") if stores else ("refused", "–")
        rows.append((str(degree), role, f"{parts[role]['weights'] / GIB:.1f}", f"{other / GIB:.1f}", *left))
    return rows


def cpu() -> str:
    """The stores of the 8B model in fp32 on a machine without a GPU."""
    config = Config()
    model = EIGHT_B.from_json(
        EIGHT_B.to_json().replace('"bfloat16"', '"float32"').replace("16060522496", "32121044992")
    )
    return "\n".join(_stores(config, model, plan_stores(config, model, HOST_GIB * GIB)))


def _stores(config: Config, model: ModelInfo, plan: StorePlan) -> list[str]:
    geometry = model.geometry(config.kv_pool.block_size)
    stores = {
        "KV pool": plan.pool,
        "decode cache": plan.decode_cache,
        "prefill cache": plan.prefill_cache,
        "candidate batch buffer": plan.batch_buffer,
        "candidate request buffer": plan.requests_buffer,
    }
    rows = [
        (name, f"{blocks:,}", f"{blocks * geometry.block_size:,}", f"{blocks * geometry.block_bytes / GIB:.1f}")
        for name, blocks in stores.items()
    ]
    return table(("store", "blocks", "tokens", "GiB"), rows)
