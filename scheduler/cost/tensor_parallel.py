"""Collectives of instances that have several devices.

Tensor parallelism: each device of an instance computes a share of the heads, and collectives add the shares up.

In every layer the hidden states of a pass are reduced twice over all devices, after attention and after the
feed-forward part. A ring of N devices moves 2 (N - 1) / N of their bytes over each device's link (Patarasuk and Yuan,
2009). The logits of the divided vocabulary are gathered: (N - 1) / N of their bytes.

Ranks that share experts: in every layer the states of each token go to the ranks of the experts that it activates, once
for each expert, and come back. All but one Nth of the rows leave their rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.grid import Curve
from alignedserve.scheduler.cost.known import GIB, Device, known_device, weight_bytes
from alignedserve.scheduler.cost.parts import CostParts, ModelShape

USABLE = 0.9  # of a device's memory
ACTIVATIONS_GIB = 1.5
POOL_GIB = 512
REACHED = 0.8  # of a link's data-sheet rate
LATENCY_S = 20e-6
REDUCES_PER_LAYER = 2
EXCHANGES_PER_LAYER = 2  # of tokens: to the experts, and back
BLOCK_TOKENS = 16
_SUFFIX = re.compile(r"-tp(\d+)$")


@dataclass(frozen=True, slots=True)
class Collectives:
    """`bandwidth`: bytes/s of one device's link, in each direction, as collectives reach it."""

    bandwidth: float
    latency_s: float

    def gather_us(self, degree: int, total_bytes: float) -> float:
        return 1e6 * (self.latency_s + (degree - 1) / degree * total_bytes / self.bandwidth)

    def reduce_us(self, degree: int, total_bytes: float) -> float:
        return self.gather_us(degree, 2 * total_bytes)


def named_degree(folder: Path) -> int | None:
    """The degree that a folder's name tells (`-tp2`); None if it tells none."""
    found = _SUFFIX.search(folder.resolve().name)
    return int(found[1]) if found else None


def degree_of(folder: Path) -> int:
    """The degree that a folder's name tells, else 1. Raises ConfigError for `-tp0`."""
    found = named_degree(folder)
    if found == 0:
        raise ConfigError(
            f"{folder}: -tp0 is no degree of tensor parallelism, which is 1 or more; rename the folder, or give "
            "--tensor-parallel"
        )
    return found or 1


def with_collectives(parts: CostParts, degree: int, collectives: Collectives) -> CostParts:
    """The parts of one device's share with the time of the collectives of a pass, which depends on its tokens."""
    if degree == 1:
        return parts
    shape = parts.shape
    hidden_bytes, logits_bytes = shape.hidden * shape.itemsize, shape.vocab * shape.itemsize

    def of_tokens(tokens: float) -> float:
        return REDUCES_PER_LAYER * shape.layers * collectives.reduce_us(degree, hidden_bytes * tokens)

    def of_requests(requests: float) -> float:
        return collectives.gather_us(degree, logits_bytes * requests)

    source = {**parts.source, "tensor_parallel": degree, **asdict(collectives)}
    dense, sequences = _with(parts.dense, of_tokens), _with(parts.sequences, of_requests)
    return replace(parts, dense=dense, sequences=sequences, source=source)


def with_exchange(parts: CostParts, ranks: int, collectives: Collectives) -> CostParts:
    """The parts of one of `ranks` ranks that share experts, with the time of the exchange, by the tokens of a rank."""
    if ranks == 1 or not parts.experts_each:
        return parts
    row_bytes = parts.experts_each * parts.shape.hidden * parts.shape.itemsize

    def of_tokens(tokens: float) -> float:
        return EXCHANGES_PER_LAYER * parts.shape.layers * collectives.gather_us(ranks, row_bytes * tokens)

    source = {**parts.source, "exchange": True, **asdict(collectives)}
    return replace(parts, dense=_with(parts.dense, of_tokens), source=source)


def _with(curve: Curve, more: Callable[[float], float]) -> Curve:
    return Curve(curve.xs, [us + more(x) for x, us in zip(curve.xs, curve.values, strict=True)])


def instance_hardware(shape: ModelShape, model: str, device: Device | None, degree: int) -> Mapping[str, float]:
    """Hardware of an instance of `degree` devices, as far as names tell it. `shape`: of one device's share."""
    token_bytes = degree * shape.kv_bytes_per_token
    found: dict[str, float] = {"kv_bytes_per_token": token_bytes, "pool_tokens": POOL_GIB * GIB // token_bytes}
    if device is None:
        return found
    found |= {"collective_bandwidth": REACHED * device.link, "collective_latency_s": LATENCY_S}
    weights = weight_bytes(model, shape.itemsize)
    free = _usable_bytes(device, degree) - weights
    if weights and free >= token_bytes * BLOCK_TOKENS:
        found["kv_tokens"] = int(free / token_bytes) // BLOCK_TOKENS * BLOCK_TOKENS
    return found


def check_weights_fit(parts: CostParts, degree: int) -> None:
    """Raises ConfigError if the weights leave no room for KV on `degree` devices, as far as names tell it."""
    model, gpu = (str(parts.source.get(name, "")) for name in ("model", "gpu"))
    device, weights = known_device(gpu), weight_bytes(model, parts.shape.itemsize)
    if device is None or not weights:
        return
    usable = _usable_bytes(device, degree)
    if usable - weights < degree * parts.shape.kv_bytes_per_token * BLOCK_TOKENS:
        raise ConfigError(
            f"the weights do not fit {degree} device{'s' * (degree > 1)}: {model} has {weights / GIB:.0f} GiB, and "
            f"{usable / GIB:.0f} GiB are usable on {degree} x {gpu}; give tables of a higher degree "
            "(--tensor-parallel), or the KV capacity (kv_tokens, a key of --hardware)"
        )


def _usable_bytes(device: Device, degree: int) -> float:
    return degree * (USABLE * device.memory_gib - ACTIVATIONS_GIB) * GIB
