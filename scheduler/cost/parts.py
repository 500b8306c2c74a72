"""The parts of a step cost: the model's shape, and measured or fitted times of the parts of a pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alignedserve.scheduler.cost.grid import Curve, Grid4, Surface
from alignedserve.scheduler.cost.skew import SkewTable
from alignedserve.scheduler.cost.step import ChunkShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The model as one device sees it: with tensor parallelism, its share of the heads.

    `itemsize`: bytes of a KV element.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """In all layers, on this device."""
        return self.layers * self.kv_heads * self.head_bytes_per_token

    @property
    def head_bytes_per_token(self) -> int:
        """Key and value of one token, one head, one layer."""
        return 2 * self.head_dim * self.itemsize


# By the last part of the model's name, lower case: layers, heads, KV heads, head width (from their config.json).
KNOWN_SHAPES: dict[str, ModelShape] = {
    "llama-2-7b": ModelShape(32, 32, 32, 128),
    "llama-2-13b": ModelShape(40, 40, 40, 128),
    "llama-2-70b": ModelShape(80, 64, 8, 128),
    "llama-3-8b": ModelShape(32, 32, 8, 128),
    "llama-3-70b": ModelShape(80, 64, 8, 128),
    "llama-3.1-8b": ModelShape(32, 32, 8, 128),
    "llama-3.1-70b": ModelShape(80, 64, 8, 128),
    "llama-3.1-405b": ModelShape(126, 128, 8, 128),
    "llama-3.2-1b": ModelShape(16, 32, 8, 64),
    "llama-3.2-3b": ModelShape(28, 24, 8, 128),
    "llama-3.3-70b": ModelShape(80, 64, 8, 128),
    "mistral-7b": ModelShape(32, 32, 8, 128),
    "qwen2.5-7b": ModelShape(28, 28, 4, 128),
    "qwen2.5-14b": ModelShape(48, 40, 8, 128),
    "qwen2.5-32b": ModelShape(64, 40, 8, 128),
    "qwen2.5-72b": ModelShape(80, 64, 8, 128),
    "qwen3-0.6b": ModelShape(28, 16, 8, 128),
    "qwen3-1.7b": ModelShape(28, 16, 8, 128),
    "qwen3-4b": ModelShape(36, 32, 8, 128),
    "qwen3-8b": ModelShape(36, 32, 8, 128),
    "qwen3-14b": ModelShape(40, 40, 8, 128),
    "qwen3-32b": ModelShape(64, 64, 8, 128),
    "opt-1.3b": ModelShape(24, 32, 32, 64),
    "opt-2.7b": ModelShape(32, 32, 32, 80),
    "opt-6.7b": ModelShape(32, 32, 32, 128),
    "opt-13b": ModelShape(40, 40, 40, 128),
    "opt-30b": ModelShape(48, 56, 56, 128),
    "opt-66b": ModelShape(64, 72, 72, 128),
    "opt-175b": ModelShape(96, 96, 96, 128),
}
_VARIANTS = re.compile(r"(-(instruct|chat|base|hf|it|v\d+(\.\d+)*|\d{4}))+$")  # suffixes of names with the same shape
# Streaming multiprocessors (vendor data sheets), by a part of the device's name; the first match counts.
KNOWN_SMS: dict[str, int] = {
    "rtx pro 6000": 188,
    "b200": 148,
    "h100": 132,
    "h200": 132,
    "a100": 108,
    "l40s": 142,
    "l40": 142,
    "l4": 58,
    "rtx 5090": 170,
    "rtx 4090": 128,
    "rtx 3090": 82,
    "a6000": 84,
    "a40": 84,
    "a30": 56,
    "a10": 72,
    "v100": 80,
}


def known_shape(model: str) -> ModelShape | None:
    """The shape of `ORGANISATION/NAME` in any variant; None if it is not known."""
    name = model.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    return KNOWN_SHAPES.get(_VARIANTS.sub("", name))


def known_sm_count(device: str) -> int:
    """0 if the device is not known."""
    lower = device.lower()
    return next((count for name, count in KNOWN_SMS.items() if name in lower), 0)


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Attention of one prompt chunk in one layer, µs: a surface over (tokens, cached tokens), a polynomial, or both.

    `token_us`: for each new token. `pair_us`: for each pair of a new token and a token that it attends to.
    """

    surface: Surface | None = None
    token_us: float = 0.0
    pair_us: float = 0.0

    def at(self, tokens: float, cached: float) -> float:
        total = self.token_us * tokens + self.pair_us * tokens * (cached + tokens / 2.0)
        if self.surface is None:
            return total
        # A chunk wider than the grid is computed in pieces, each after the previous ones.
        widest = self.surface.x.points[-1]
        while tokens > widest:
            total += self.surface.at(widest, cached) - self.surface.least
            tokens, cached = tokens - widest, cached + widest
        return total + self.surface.at(tokens, cached)

    def of_all(self, chunks: Sequence[ChunkShape]) -> float:
        """Several chunks are one launch: the time of an almost empty launch counts once."""
        floor = self.surface.least if self.surface is not None else 0.0
        return floor + sum(self.at(chunk.tokens, chunk.cached_tokens) - floor for chunk in chunks)

    @property
    def widest(self) -> float | None:
        return None if self.surface is None else self.surface.x.points[-1]


@dataclass(frozen=True, slots=True)
class CostParts:
    """Times in µs. `dense`: all that depends on the tokens of a pass, by their number, all layers together.

    `dense_decode`: the same for passes with decodes only, if that differs. `sequences`: the part that depends on the
    number of requests. Attention is of one layer: `decode` over (requests, mean length), `chunk`, and `mixed` over
    (chunk tokens, cached tokens, requests, length) for passes with a chunk and decodes (absent: their sum). `hardware`:
    fields of the simulator's Hardware that come with the measurement. `sm_count` 0: not known. `no_split`: `decode` of
    that mode's kernel. `block_bandwidth`: bytes/s that one of its thread blocks reads. None and 0: not measured.
    """

    name: str
    shape: ModelShape
    dense: Curve
    sequences: Curve
    decode: Surface
    chunk: ChunkAttention
    skew: SkewTable
    mixed: Grid4 | None = None
    dense_decode: Curve | None = None
    sm_count: int = 0
    no_split: Surface | None = None
    block_bandwidth: float = 0.0
    hardware: Mapping[str, float] = field(default_factory=dict)
    source: Mapping[str, object] = field(default_factory=dict)
