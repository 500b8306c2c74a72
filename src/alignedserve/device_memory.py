"""What an instance needs of a GPU's memory, part by part, and what is left of it for KV blocks. Without torch.

budget       = cluster.gpu_memory_share of the device, and what of it was free, divided among those that share it
fixed parts  = weights, activations of the largest pass, CUDA graphs, transfer buffers, CUDA and its libraries
decode       : the rest is the cache
prefill      : of the rest a quarter at most is the cache; then the batch buffer, then the requests buffer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alignedserve.config import Config
from alignedserve.errors import ResourceError
from alignedserve.geometry import DTYPE_BYTES
from alignedserve.graph_sizes import graph_sizes
from alignedserve.memory import GIB, describe_bytes
from alignedserve.model import ModelInfo

TOTAL_GAUGE, FREE_GAUGE = "device_total_bytes", "device_free_bytes"  # of a worker's heartbeat

# Reserves that nothing here measures before the start: upper figures of what others report.
CONTEXT_BYTES = 768 << 20  # context, modules, workspaces of cuBLAS, and what the allocator cannot use
PAIR_BYTES = 100 << 20  # NCCL takes 52 to 100 MB for a pair of ranks
NCCL_CHANNELS = ("auto", "nccl")  # settings of cluster.channel by which it may be NCCL
STAGING_BYTES = 64 << 20  # of copies that are packed on the device
GRAPH_LAYER_BYTES = 256 << 10  # one layer's kernels in one captured graph

SAMPLED_COPIES = 8  # of a row of fp32 logits, while its token is drawn
LEAST_TOKENS = 2048  # a store of fewer serves nobody
DECODE, PREFILL = "decode", "prefill"
KEYS = {
    PREFILL: "prefill.token_budget, prefill.max_requests, prefill.cache_blocks or the blocks of its buffers",
    DECODE: "decode.max_running or decode.cache_blocks",
}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One instance's device as it was before anything was loaded."""

    instance: str
    device: str
    total_bytes: int
    free_bytes: int
    node_id: str = ""

    def gauges(self) -> dict[str, float]:
        return {TOTAL_GAUGE: float(self.total_bytes), FREE_GAUGE: float(self.free_bytes)}

    def budget(self, config: Config, sharers: int) -> int:
        """Bytes that one of `sharers` instances may use."""
        return min(int(self.total_bytes * config.cluster.gpu_memory_share), self.free_bytes) // sharers


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """What each instance of a role has of its device, and for what, in bytes."""

    budget: int
    parts: Mapping[str, int]

    @property
    def used(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        """`25.13 GiB of 125.83: weights 12.55, activations 1.02, ...`."""
        return f"{self.used / GIB:.2f} GiB of {self.budget / GIB:.2f}: {_figures(self.parts)}"

    def measured(self, weights: int, activations: int) -> RoleMemory:
        """With what was found after loading, where that is more than was planned for it."""
        found = {"weights": weights, "activations": activations}
        return replace(self, parts={name: max(size, found.get(name, 0)) for name, size in self.parts.items()})

    def require_room(self, role: str, memory: DeviceMemory) -> None:
        """Raises ResourceError, with every part, where they are more than the budget."""
        if self.used > self.budget:
            raise ResourceError(lack(role, memory, self) + advice([role]))


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Blocks of the stores on devices, and what they lie beside by role."""

    prefill_cache: int
    decode_cache: int
    batch_buffer: int
    requests_buffer: int
    roles: dict[str, RoleMemory]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks that would be of use on devices of any size. `largest`: of the longest request, its growth included."""

    least: int
    largest: int
    served: int  # decode instances that share a prefill instance's buffers
    block_bytes: int


def activation_bytes(model: ModelInfo, tokens: int, rows: int) -> int:
    """An upper estimate of what a pass of `tokens`, of which `rows` are sampled, takes beside weights and KV.

    The most that is alive at once: the residual and its norm in fp32, and either queries, keys and values before and
    after the rotation with attention's output, or the MLP's gate, product and their activation; then fp32 logits and
    what sampling makes of them; and for attention one request's keys and values side by side, or its partial outputs.
    """
    size = DTYPE_BYTES[model.dtype]
    heads = model.heads or model.kv_heads
    hidden = model.hidden_size or heads * model.head_dim
    attention = (3 * (heads + 2 * model.kv_heads) + 2 * heads) * model.head_dim * size
    mlp = 4 * (model.mlp_width or 4 * hidden) * size
    token_bytes = 4 * hidden * size + 2 * hidden * 4 + max(attention, mlp)
    row_bytes = model.vocab_size * (size + 4 * (1 + SAMPLED_COPIES))
    gathered = 2 * model.max_positions * model.kv_heads * model.head_dim * size
    partial = 16 * rows * heads * (model.head_dim + 2) * 4
    return tokens * token_bytes + rows * row_bytes + max(gathered, partial)


def fixed_parts(config: Config, model: ModelInfo, role: str) -> dict[str, int]:
    """Everything of an instance but its blocks."""
    if role == PREFILL:
        tokens = config.prefill.pass_tokens
        rows = min(config.prefill.max_requests, tokens)
    else:
        tokens = rows = config.decode.max_running
    activations = activation_bytes(model, tokens, rows)
    parts = {"weights": model.weight_bytes, "activations": activations}
    if role == DECODE and config.decode.graphs != "off":  # their memory is a pool of its own
        graphs = len(graph_sizes(config.decode.graph_sizes, config.decode.max_running))
        parts["CUDA graphs"] = activations + graphs * model.layers * GRAPH_LAYER_BYTES
    others = config.cluster.decode if role == PREFILL else config.cluster.prefill
    parts["transfer buffers"] = STAGING_BYTES + (others * PAIR_BYTES if config.cluster.channel in NCCL_CHANNELS else 0)
    parts["CUDA and libraries"] = CONTEXT_BYTES
    return parts


def plan_devices(config: Config, model: ModelInfo, memories: Sequence[tuple[str, DeviceMemory]]) -> DevicePlan:
    """Blocks of every store on devices. `memories`: of each (role, instance); both roles are among them.

    The caches of a role are equal, so the device with the least decides for all of them.
    Raises ResourceError, with all parts of every instance that cannot hold them, what is missing, and what to change.
    """
    geometry = model.geometry(config.kv_pool.block_size)
    longest = geometry.blocks_for(model.max_positions) + 1
    wanted = Wanted(
        least=min(longest, geometry.blocks_for(LEAST_TOKENS)),
        largest=longest,
        served=-(-config.cluster.decode // config.cluster.prefill),
        block_bytes=geometry.block_bytes,
    )
    budgets = _budgets(config, memories)
    tightest: dict[str, DeviceMemory] = {}
    for role, memory in memories:
        if role not in tightest or budgets[memory.instance] < budgets[tightest[role].instance]:
            tightest[role] = memory
    roles: dict[str, RoleMemory] = {}
    stores: dict[str, dict[str, int]] = {}
    for role in (DECODE, PREFILL):
        budget, fixed = budgets[tightest[role].instance], fixed_parts(config, model, role)
        rest = (budget - sum(fixed.values())) // wanted.block_bytes
        if role == DECODE:
            stores[role] = _decode_blocks(config, wanted, rest)
        else:
            stores[role] = _prefill_blocks(config, wanted, rest, stores[DECODE]["cache"])
        held = {name: count * wanted.block_bytes for name, count in stores[role].items() if count}
        roles[role] = RoleMemory(budget, fixed | held)
    short = [
        lack(role, memory, replace(roles[role], budget=budgets[memory.instance]))
        for role, memory in memories
        if roles[role].used > budgets[memory.instance]
    ]
    if short:
        raise ResourceError("; ".join(short) + advice(sorted({role for role in roles if _lacks(roles[role])})))
    return DevicePlan(
        prefill_cache=stores[PREFILL]["cache"],
        decode_cache=stores[DECODE]["cache"],
        batch_buffer=stores[PREFILL]["batch buffer"],
        requests_buffer=stores[PREFILL]["requests buffer"],
        roles=roles,
    )


def describe_plan(
    config: Config, roles: Mapping[str, RoleMemory], memories: Sequence[tuple[str, DeviceMemory]]
) -> list[str]:
    """A line for each role, and one for each instance whose device has more than is used there."""
    lines = [f"memory of each {role} instance: {roles[role].describe()} GiB" for role in sorted(roles)]
    if not memories:
        return lines
    budgets = _budgets(config, memories)
    for role, memory in memories:
        unused = budgets[memory.instance] - roles[role].budget
        if unused:
            lines.append(
                f"{memory.instance} on {memory.device} could use {describe_bytes(unused)} more: stores of a role are "
                "equal, so the smallest device decides"
            )
    return lines


def lack(role: str, memory: DeviceMemory, found: RoleMemory) -> str:
    """`prefill-0 on cuda:0 (139.80 GiB) lacks 3.20 GiB: weights 12.55, ...; it may use ...`."""
    missing = describe_bytes(found.used - found.budget)
    return (
        f"{memory.instance} on {memory.device} ({memory.total_bytes / GIB:.2f} GiB) lacks {missing}: "
        f"{_figures(found.parts)} GiB, of which it may use {found.budget / GIB:.2f}"
    )


def advice(roles: Sequence[str]) -> str:
    keys = "; ".join(f"for {role}: {KEYS[role]}" for role in roles)
    return (
        f" - ask for less ({keys}), let fewer instances share a GPU, end what else uses it, raise "
        "cluster.gpu_memory_share, or take a smaller model.dtype"
    )


def _lacks(memory: RoleMemory) -> bool:
    return memory.used > memory.budget


def _figures(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())


def _budgets(config: Config, memories: Sequence[tuple[str, DeviceMemory]]) -> dict[str, int]:
    """By instance. Of those that share a device, the first to look saw what was free before all of them."""
    on: dict[tuple[str, str], list[DeviceMemory]] = {}
    for _, memory in memories:
        on.setdefault((memory.node_id, memory.device), []).append(memory)
    found: dict[str, int] = {}
    most = max(len(sharers) for sharers in on.values())
    for sharers in on.values():
        first = max(sharers, key=lambda memory: memory.free_bytes)
        # As many as on the fullest device: the cluster may grow to that without anybody's share changing.
        found |= {memory.instance: first.budget(config, most) for memory in sharers}
    return found


def _decode_blocks(config: Config, wanted: Wanted, rest: int) -> dict[str, int]:
    """More than every running request at its longest is of no use."""
    most = config.decode.max_running * wanted.largest
    return {"cache": config.decode.cache_blocks or max(wanted.least, min(most, rest))}


def _prefill_blocks(config: Config, wanted: Wanted, rest: int, decode_cache: int) -> dict[str, int]:
    """The cache is for prompts that are computed now; the buffers take what is left, up to what is of use."""
    settings, least = config.prefill, wanted.least
    two_prompts = 2 * max(wanted.largest, settings.queued_tokens // config.kv_pool.block_size)
    if not config.cluster.prefetch:
        cache = settings.cache_blocks or max(least, min(two_prompts, rest))
        return {"cache": cache, "batch buffer": 0, "requests buffer": 0}
    buffers = (settings.batch_buffer_blocks or least) + (settings.requests_buffer_blocks or least)
    # No prompt is served that it cannot hold, so the longest has room, if that leaves the buffers half.
    part = max(rest // 4, min(wanted.largest, rest // 2))
    cache = settings.cache_blocks or max(least, min(two_prompts, part, rest - buffers))
    rest -= cache
    share = config.scheduler.max_batch_blocks or int(decode_cache * config.scheduler.max_batch_share)
    batch = settings.batch_buffer_blocks
    if not batch:
        whole = wanted.served * max(share, min(wanted.largest, decode_cache))
        after = settings.requests_buffer_blocks or max(least, rest // 3)
        batch = max(least, min(whole, rest - after))
    requests = settings.requests_buffer_blocks or max(least, min(wanted.served * decode_cache, rest - batch))
    return {"cache": cache, "batch buffer": batch, "requests buffer": requests}
