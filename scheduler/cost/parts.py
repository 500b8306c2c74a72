"""The parts of a step cost: the model's shape, and measured or fitted times of the parts of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.errors import ConfigError
from alignedserve.scheduler.cost.grid import Curve, Grid4, Surface
from alignedserve.scheduler.cost.skew import SkewTable
from alignedserve.scheduler.cost.step import ChunkShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The model as one device sees it: with tensor parallelism, its share of the heads.

    `itemsize`: bytes of a KV element. `hidden` and `vocab`: width of the residual stream and number of logits of the
    whole model; 0: not known.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2
    hidden: int = 0
    vocab: int = 0

    def part(self, degree: int) -> ModelShape:
        """The share of one of `degree` devices. KV heads are repeated where there are fewer than devices."""
        if self.heads % degree or (self.kv_heads % degree and degree % self.kv_heads):
            raise ConfigError(f"{self.heads} heads and {self.kv_heads} KV heads cannot be divided by {degree} devices")
        hidden = self.hidden or self.heads * self.head_dim
        return replace(self, heads=self.heads // degree, kv_heads=max(1, self.kv_heads // degree), hidden=hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        """In all layers, on this device."""
        return self.layers * self.kv_heads * self.head_bytes_per_token

    @property
    def head_bytes_per_token(self) -> int:
        """Key and value of one token, one head, one layer."""
        return 2 * self.head_dim * self.itemsize


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
    `experts_each`: experts of a mixture that a token activates in a layer; 0: not known.
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
    experts_each: int = 0
    hardware: Mapping[str, float] = field(default_factory=dict)
    source: Mapping[str, object] = field(default_factory=dict)
