"""The geometry of KV blocks. Two stores must have the same geometry before blocks are copied between them.

A block is the KV of `block_size` consecutive tokens for all layers, laid out
`[block][layer][kv_head][k|v][token][head_dim]`, contiguous.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from alignedserve.errors import ConfigError, GeometryMismatchError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def require_degree(name: str, heads: int, kv_heads: int, ranks: int) -> None:
    """Raises ConfigError unless so many ranks can share a model's heads; the message has the numbers that can."""

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(ranks):
        fitting = ", ".join(str(size) for size in range(1, heads + 1) if fits(size))
        raise ConfigError(
            f"{name} has {heads} query heads and {kv_heads} KV heads: {ranks} ranks cannot share them (tensor parallel "
            f"degrees that fit: {fitting})"
        )


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Geometry of one model's KV blocks. All counts are of the whole model, not of one rank."""

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * self.kv_heads * 2 * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """`(layers, kv_heads, 2, block_size, head_dim)`."""
        return (self.layers, self.kv_heads, 2, self.block_size, self.head_dim)

    @property
    def fingerprint(self) -> str:
        text = f"{self.model}|{self.dtype}|{self.layers}|{self.kv_heads}|{self.head_dim}|{self.block_size}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def describe(self) -> str:
        return (
            f"{self.model} {self.dtype}, {self.layers} layers, {self.kv_heads} KV heads of {self.head_dim}, "
            f"blocks of {self.block_size}"
        )

    def require_same(self, other: KvGeometry) -> None:
        """Raises GeometryMismatchError, which names both geometries, unless they are equal."""
        if self != other:
            raise GeometryMismatchError(
                f"two stores hold blocks of different geometries: {self.describe()} and {other.describe()}"
            )


@dataclass(frozen=True, slots=True)
class StoreSlice:
    """The layers and KV heads that a store holds: all, unless it belongs to a tensor or pipeline parallel rank."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int

    @classmethod
    def whole(cls, geometry: KvGeometry) -> StoreSlice:
        return cls(0, geometry.layers, 0, geometry.kv_heads)

    def intersect(self, other: StoreSlice) -> StoreSlice | None:
        """The layers and heads that both slices hold; None if there are none."""
        cut = StoreSlice(
            max(self.layer_begin, other.layer_begin),
            min(self.layer_end, other.layer_end),
            max(self.head_begin, other.head_begin),
            min(self.head_end, other.head_end),
        )
        return cut if cut.layer_begin < cut.layer_end and cut.head_begin < cut.head_end else None

    @property
    def shape(self) -> tuple[int, int]:
        """`(layers, kv_heads)`."""
        return (self.layer_end - self.layer_begin, self.head_end - self.head_begin)
