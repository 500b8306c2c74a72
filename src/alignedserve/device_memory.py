"""Divides a GPU's memory between the fixed parts of an instance and its KV blocks. It does not import torch.

budget       = cluster.gpu_memory_share of the device, at most its free memory, divided by the instances that share it
fixed parts  = weights, activations of the largest pass, CUDA graphs, transfer buffers, CUDA and its libraries
decode       : the rest is the cache
prefill      : about a quarter of the rest is the cache; then candidate batch buffer and candidate request buffer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alignedserve.batch_size import LEAST, automatic_max_running, choices
from alignedserve.config import Config
from alignedserve.errors import ResourceError
from alignedserve.geometry import DTYPE_BYTES, KvGeometry
from alignedserve.graph_sizes import graph_sizes
from alignedserve.memory import GIB, describe_bytes
from alignedserve.model import ModelInfo
from alignedserve.ranks.degrees import Degrees, Spread, devices_in

TOTAL_GAUGE, FREE_GAUGE = "device_total_bytes", "device_free_bytes"  # in a worker's heartbeat

# Reserves that are not measured before the start: upper bounds of published figures.
CONTEXT_BYTES = 768 << 20  # context, modules, cuBLAS workspaces, and memory lost to fragmentation
PAIR_BYTES = 100 << 20  # NCCL takes 52 to 100 MB for a pair of ranks
GROUP_BYTES = 512 << 20  # NCCL's for the ranks of an instance: channels to each other
UNEQUAL = 0.02  # of a rank's weights: vocabularies and MLPs are filled up, and some are in each rank
RANK_EXTRA_BYTES = 8 << 20  # the same for small models
NCCL_CHANNELS = ("auto", "nccl")  # settings of cluster.channel that may select NCCL
STAGING_BYTES = 64 << 20  # for copies that are packed on the device
EXCHANGED_EXPERTS = 8  # that a token chooses, at most in known mixtures
GRAPH_LAYER_BYTES = 256 << 10  # one layer's kernels in one captured graph

SAMPLED_COPIES = 8  # of a row of fp32 logits, while its token is sampled
LEAST_TOKENS = 2048  # a smaller store is useless
DECODE, PREFILL = "decode", "prefill"
KEYS = {
    PREFILL: "prefill.token_budget, prefill.max_requests, prefill.cache_blocks or the blocks of its buffers",
    DECODE: "decode.max_running or decode.cache_blocks",
}


@dataclass(frozen=True, slots=True)
class RanksHere:
    """How many of an instance's ranks are on the device that has most of them. `stages`: on its first node."""

    number: int
    degrees: Degrees
    stages: int = 1

    @classmethod
    def of(cls, config: Config, role: str, device: str) -> RanksHere:
        """`device`: the devices of its first node."""
        degrees, ranks = config.degrees(role), len(config.spread(role).ranks(0))
        return cls(-(-ranks // len(devices_in(device))), degrees, min(degrees.stages, ranks // degrees.tensor))

    @property
    def captures(self) -> bool:
        """Whether decode iterations are CUDA graphs. They hold no sums by Gloo, nor what ranks that share experts
        exchange, which differs each time.
        """
        return self.degrees.experts == 1 and (self.degrees.tensor == 1 or self.number == 1)

    def weight_bytes(self, model: ModelInfo) -> int:
        """At most: what all ranks hold (norms, KV heads that are fewer than ranks), and a stage with both ends."""
        degrees, size = self.degrees, DTYPE_BYTES[model.dtype]
        if degrees.ranks == 1:
            return model.weight_bytes
        if degrees.experts > 1:  # equal shares of these, and all else
            return self.number * (model.weight_bytes - model.expert_bytes + model.expert_bytes // degrees.experts)
        hidden, end = _hidden(model), _end_bytes(model)
        rest = max(0, model.weight_bytes - 2 * end)
        share = self.layers(model) / model.layers / degrees.tensor
        held = share * rest + (2 * end / degrees.tensor if degrees.stages > 1 else (model.weight_bytes - rest) * share)
        twice = max(0.0, 1.0 / model.kv_heads - 1.0 / degrees.tensor)  # of the KV heads, beyond a rank's share
        held += self.layers(model) * 2 * model.kv_heads * model.head_dim * hidden * size * twice
        return self.number * int(held * (1.0 + UNEQUAL) + RANK_EXTRA_BYTES)

    def layers(self, model: ModelInfo) -> int:
        """At most, of one rank."""
        return most_layers(model, self.degrees)

    def block_bytes(self, model: ModelInfo, geometry: KvGeometry) -> int:
        """At most, of a block of the instance's cache. Ranks that share experts have equal parts of the blocks."""
        if self.degrees.experts > 1:
            return -(-self.number * geometry.block_bytes // self.degrees.experts)
        return self.number * self.layers(model) * self._layer_bytes(geometry)

    def buffer_block_bytes(self, geometry: KvGeometry) -> int:
        """Of a block of a candidate buffer, whose layers are divided among the stages of the first node."""
        return self.number * -(-geometry.layers // self.stages) * self._layer_bytes(geometry)

    def _layer_bytes(self, geometry: KvGeometry) -> int:
        """Of a block's layer, as far as a rank has it."""
        heads = max(1, geometry.kv_heads // self.degrees.tensor)
        return geometry.block_bytes // (geometry.layers * geometry.kv_heads) * heads


def most_layers(model: ModelInfo, degrees: Degrees) -> int:
    """The layers of a stage at most, whatever is measured: a quarter more than an equal share, and one.

    Less if the head, which the last stage has, has fewer weights than that.
    """
    stages = degrees.stages
    if stages == 1:
        return model.layers
    end = _end_bytes(model)
    least = max(1.0, (model.weight_bytes - model.expert_bytes - 2 * end) / model.layers)  # active ones of a layer
    by_head = int((model.layers + end / least) / stages) + 2
    return min(model.layers - stages + 1, by_head, math.ceil(1.25 * model.layers / stages) + 1)


def most_share(model: ModelInfo, spread: Spread, node: int) -> float:
    """Of an instance's layers, that its node of this number has at most."""
    if spread.nodes == 1:
        return 1.0
    stages = len(spread.ranks(node)) // spread.degrees.tensor
    return min(1.0, stages * most_layers(model, spread.degrees) / model.layers)


def _hidden(model: ModelInfo) -> int:
    return model.hidden_size or (model.heads or model.kv_heads) * model.head_dim


def _end_bytes(model: ModelInfo) -> int:
    """Bytes of the embedding, and of the head."""
    return model.vocab_size * _hidden(model) * DTYPE_BYTES[model.dtype]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one instance's device, measured before anything was loaded.

    Of several ranks, `device` names all devices ("cuda:0,1"), and the memory is that of the one with the least free.
    """

    instance: str
    device: str
    total_bytes: int
    free_bytes: int
    node_id: str = ""

    def gauges(self) -> dict[str, float]:
        return {TOTAL_GAUGE: float(self.total_bytes), FREE_GAUGE: float(self.free_bytes)}

    def budget(self, config: Config, sharers: int) -> int:
        """Bytes that each of the `sharers` instances on this device may use."""
        return min(int(self.total_bytes * config.cluster.gpu_memory_share), self.free_bytes) // sharers


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """The budget of each instance of a role on its device, and its parts, in bytes."""

    budget: int
    parts: Mapping[str, int]

    @property
    def used(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        """`25.13 GiB of 125.83: weights 12.55, activations 1.02, ...`."""
        return f"{self.used / GIB:.2f} GiB of {self.budget / GIB:.2f}: {_figures(self.parts)}"

    def measured(self, weights: int, activations: int) -> RoleMemory:
        """A copy with the sizes measured after loading, where they exceed the plan."""
        found = {"weights": weights, "activations": activations}
        return replace(self, parts={name: max(size, found.get(name, 0)) for name, size in self.parts.items()})

    def require_room(self, role: str, memory: DeviceMemory) -> None:
        """Raises ResourceError, which lists all parts, if their sum exceeds the budget."""
        if self.used > self.budget:
            raise ResourceError(lack(role, memory, self) + advice([role]))


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Blocks of each store on a device, and the memory of each role's instances. `max_running`: of decode instances."""

    prefill_cache: int
    decode_cache: int
    batch_buffer: int
    requests_buffer: int
    max_running: int
    roles: dict[str, RoleMemory]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks that are useful on a device of any size. `largest`: of the longest request, including its growth."""

    least: int
    largest: int
    served: int  # decode instances that share the buffers of one prefill instance


def activation_bytes(model: ModelInfo, tokens: int, rows: int) -> int:
    """An upper bound, in bytes, of a pass's memory besides weights and KV: `tokens` tokens, `rows` of them sampled.

    It covers the most that is live at once: the residual and its norm in fp32, and either queries, keys and values
    before and after the rotation with attention's output, or the MLP's gate, product and their activation; then fp32
    logits and the copies that sampling makes; and for attention one request's gathered keys and values, or its partial
    outputs.
    """
    size = DTYPE_BYTES[model.dtype]
    heads = model.heads or model.kv_heads
    hidden = _hidden(model)
    attention = (3 * (heads + 2 * model.kv_heads) + 2 * heads) * model.head_dim * size
    mlp = 4 * (model.mlp_width or 4 * hidden) * size
    token_bytes = 4 * hidden * size + 2 * hidden * 4 + max(attention, mlp)
    row_bytes = model.vocab_size * (size + 4 * (1 + SAMPLED_COPIES))
    gathered = 2 * model.max_positions * model.kv_heads * model.head_dim * size
    partial = 16 * rows * heads * (model.head_dim + 2) * 4
    return tokens * token_bytes + rows * row_bytes + max(gathered, partial)


def exchange_bytes(model: ModelInfo, tokens: int) -> int:
    """An upper bound, in bytes, of the rows that a rank exchanges with others in a layer of experts.

    All rows of all ranks may come to one: states, results, and what is sent and added up.
    """
    return tokens * EXCHANGED_EXPERTS * _hidden(model) * (4 * DTYPE_BYTES[model.dtype] + 4)


def fixed_parts(config: Config, model: ModelInfo, role: str, ranks: RanksHere | None = None) -> dict[str, int]:
    """All memory of an instance on its fullest device except KV blocks: bytes by part. `ranks`: by default all there.

    An automatic `decode.max_running` is the least.
    """
    ranks = ranks or RanksHere.of(config, role, "cuda:0")
    if role == PREFILL:
        tokens = config.prefill.pass_tokens
        rows = min(config.prefill.max_requests, tokens)
    else:
        tokens = rows = config.decode.max_running or LEAST
    activations = ranks.number * activation_bytes(model, tokens, rows)
    if ranks.degrees.experts > 1:
        activations += ranks.number * exchange_bytes(model, tokens)
    parts = {"weights": ranks.weight_bytes(model), "activations": activations}
    if role == DECODE and config.decode.graphs != "off" and ranks.captures:  # their memory is a pool of its own
        graphs = len(graph_sizes(config.decode.graph_sizes, rows))
        layers = min(model.layers, ranks.number * ranks.layers(model))
        parts["CUDA graphs"] = activations + graphs * layers * GRAPH_LAYER_BYTES
    others = config.cluster.decode if role == PREFILL else config.cluster.prefill
    parts["transfer buffers"] = STAGING_BYTES + (others * PAIR_BYTES if config.cluster.channel in NCCL_CHANNELS else 0)
    if ranks.degrees.tensor * ranks.degrees.experts > 1 and ranks.number == 1:
        parts["transfer buffers"] += GROUP_BYTES
    first = ranks.degrees.ranks > ranks.number  # the process of rank 0 has a context on each device, too
    parts["CUDA and libraries"] = (ranks.number + first) * CONTEXT_BYTES
    return parts


def plan_devices(config: Config, model: ModelInfo, memories: Sequence[tuple[str, DeviceMemory]]) -> DevicePlan:
    """Blocks of every store on devices. `memories`: a role and the memory of an instance of it; both roles occur.

    The stores of a role are equal, so its smallest device decides their size. An automatic `decode.max_running` takes
    memory from the cache that it depends on: it is the largest that the cache beside it still justifies.
    Raises ResourceError, which lists the parts of every instance that lacks memory, how much is missing, and the
    settings to change.
    """
    geometry = model.geometry(config.kv_pool.block_size)
    longest = geometry.blocks_for(model.max_positions) + 1
    wanted = Wanted(
        least=min(longest, geometry.blocks_for(LEAST_TOKENS)),
        largest=longest,
        served=-(-config.cluster.decode // config.cluster.prefill),
    )
    budgets = _budgets(config, memories)
    tightest: dict[str, DeviceMemory] = {}
    for role, memory in memories:
        if role not in tightest or budgets[memory.instance] < budgets[tightest[role].instance]:
            tightest[role] = memory
    ranks = {role: RanksHere.of(config, role, memory.device) for role, memory in tightest.items()}
    block_bytes = {role: ranks[role].block_bytes(model, geometry) for role in tightest}
    buffer_bytes = ranks[PREFILL].buffer_block_bytes(geometry)
    decode_budget = budgets[tightest[DECODE].instance]
    most = _max_running(config, model, wanted, decode_budget, ranks[DECODE], block_bytes[DECODE])
    config = replace(config, decode=config.decode.running(most))
    roles: dict[str, RoleMemory] = {}
    stores: dict[str, dict[str, int]] = {}
    for role in (DECODE, PREFILL):
        budget, fixed = budgets[tightest[role].instance], fixed_parts(config, model, role, ranks[role])
        size, rest = block_bytes[role], budget - sum(fixed.values())
        if role == DECODE:
            stores[role] = _decode_blocks(config, wanted, rest // size)
        else:
            stores[role] = _prefill_blocks(config, wanted, rest, size, buffer_bytes, stores[DECODE]["cache"])
        held = {
            name: count * (size if name == "cache" else buffer_bytes) for name, count in stores[role].items() if count
        }
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
        max_running=config.decode.max_running,
        roles=roles,
    )


def describe_plan(
    config: Config, roles: Mapping[str, RoleMemory], memories: Sequence[tuple[str, DeviceMemory]]
) -> list[str]:
    """A line for each role, and one for each instance whose device has unused memory."""
    lines = [f"memory of each {role} instance: {roles[role].describe()} GiB" for role in sorted(roles)]
    if not memories:
        return lines
    budgets = _budgets(config, memories)
    for role, memory in memories:
        unused = budgets[memory.instance] - roles[role].budget
        if unused:
            lines.append(
                f"{memory.instance} on {memory.device} leaves {describe_bytes(unused)} unused: the stores of a role "
                "are equal, so its smallest device decides their size"
            )
    return lines


def lack(role: str, memory: DeviceMemory, found: RoleMemory) -> str:
    """`prefill-0 on cuda:0 (139.80 GiB) lacks 3.20 GiB: it needs weights 12.55, ... GiB, and may use ... GiB`."""
    missing = describe_bytes(found.used - found.budget)
    return (
        f"{memory.instance} on {memory.device} ({memory.total_bytes / GIB:.2f} GiB) lacks {missing}: "
        f"it needs {_figures(found.parts)} GiB, and may use {found.budget / GIB:.2f} GiB"
    )


def advice(roles: Sequence[str]) -> str:
    keys = "; ".join(f"for {role}: {KEYS[role]}" for role in roles)
    return (
        f" - lower the settings ({keys}), let fewer instances share a GPU, end other programs that use it, raise "
        "cluster.gpu_memory_share, or use a smaller model.dtype"
    )


def _lacks(memory: RoleMemory) -> bool:
    return memory.used > memory.budget


def _figures(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())


def _budgets(config: Config, memories: Sequence[tuple[str, DeviceMemory]]) -> dict[str, int]:
    """Budgets in bytes, by instance. The instance of a device that measured first saw the most free memory."""
    on: dict[tuple[str, str], dict[DeviceMemory, int]] = {}  # ranks of each instance on a device
    for role, memory in memories:
        ranks = RanksHere.of(config, role, memory.device).number
        for device in devices_in(memory.device):
            on.setdefault((memory.node_id, device), {})[memory] = ranks
    found: dict[str, int] = {}
    most = max(sum(sharers.values()) for sharers in on.values())
    for sharers in on.values():
        first = max(sharers, key=lambda memory: memory.free_bytes)
        for memory, ranks in sharers.items():
            # Divided as on the fullest device, so that the cluster can grow without a change of any instance's share.
            budget = ranks * first.budget(config, most)
            found[memory.instance] = min(budget, found.get(memory.instance, budget))
    return found


def _max_running(
    config: Config, model: ModelInfo, wanted: Wanted, budget: int, ranks: RanksHere, block_bytes: int
) -> int:
    """`decode.max_running`, or the largest automatic value that fits `budget` bytes with the cache that it is for."""
    if config.decode.max_running:
        return config.decode.max_running
    for most in choices():
        tried = replace(config, decode=config.decode.running(most))
        rest = (budget - sum(fixed_parts(tried, model, DECODE, ranks).values())) // block_bytes
        cache = _decode_blocks(tried, wanted, rest)["cache"]
        if cache <= rest and automatic_max_running(cache * config.kv_pool.block_size) >= most:
            return most
    return LEAST


def _decode_blocks(config: Config, wanted: Wanted, rest: int) -> dict[str, int]:
    """At most room for `max_running` requests of the greatest length. Ranks that share experts have equal parts."""
    ranks = config.degrees("decode").experts
    most = max(config.decode.max_running, ranks) * wanted.largest
    return {"cache": config.decode.cache_blocks or max(ranks * wanted.least, min(most, rest) // ranks * ranks)}


def _prefill_blocks(
    config: Config, wanted: Wanted, rest_bytes: int, block_bytes: int, buffer_bytes: int, decode_cache: int
) -> dict[str, int]:
    """The cache holds the prompts being computed. The buffers take the rest, up to the size that is useful.

    `block_bytes`, `buffer_bytes`: of a block of either.
    """
    settings, least, rest = config.prefill, wanted.least, rest_bytes // block_bytes
    two_prompts = 2 * max(wanted.largest, settings.queued_tokens // config.kv_pool.block_size)
    if not config.cluster.prefetch:
        cache = settings.cache_blocks or max(least, min(two_prompts, rest))
        return {"cache": cache, "batch buffer": 0, "requests buffer": 0}
    buffers = (settings.batch_buffer_blocks or least) + (settings.requests_buffer_blocks or least)
    # A prompt must fit the cache to be served, so the longest gets room if that leaves half for the buffers.
    part = max(rest // 4, min(wanted.largest, rest // 2))
    kept = -(-buffers * buffer_bytes // block_bytes)
    cache = settings.cache_blocks or max(least, min(two_prompts, part, rest - kept))
    rest = (rest_bytes - cache * block_bytes) // buffer_bytes
    share = config.scheduler.max_batch_blocks or int(decode_cache * config.scheduler.max_batch_share)
    batch = settings.batch_buffer_blocks
    if not batch:
        whole = wanted.served * max(share, min(wanted.largest, decode_cache))
        after = settings.requests_buffer_blocks or max(least, rest // 3)
        batch = max(least, min(whole, rest - after))
    requests = settings.requests_buffer_blocks or max(least, min(wanted.served * decode_cache, rest - batch))
    return {"cache": cache, "batch buffer": batch, "requests buffer": requests}
