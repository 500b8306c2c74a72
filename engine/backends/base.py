"""The contract of a paged attention backend."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from alignedserve.engine.batch import DecodeTable, PackedBatch
from alignedserve.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """The requirements of a model, its store and its device on a backend."""

    device: str  # "cpu" or "cuda"
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends. `sliding_window`: number of tokens seen, including the query's own; None: all.

    `sinks` `[heads]` is one more logit in the softmax of each query head, without a value (gpt-oss). It is neither
    scaled nor soft-capped.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(ABC):
    """Writes keys and values to a paged store, and attends over it.

    A backend belongs to one runner and one store, `cache`, of shape `[num_blocks, layers, kv_heads, 2, block_size,
    head_dim]`, contiguous. One thread calls it: `begin` once for each forward pass, then `attend` once for each layer.
    A backend without support for some of `options` raises UnsupportedModelError; it never ignores an option. Offsets
    into the store exceed 32 bits.
    """

    captures: ClassVar[bool] = False
    """Whether decode passes can be captured in a CUDA graph, from `begin_table` on."""

    least_saved_bytes: float = math.inf
    """Attention over blocks that requests of a pass share is computed once for them (`sharing.py`) if that saves
    reading this much of a layer's KV, which takes as long as the calls that it adds. Infinite: never.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache = cache

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve `needs` here, for the user; None: it can."""
        return None

    @abstractmethod
    def begin(self, batch: PackedBatch) -> None:
        """Prepare the data that all layers of the forward pass of `batch` share."""

    def begin_table(self, table: DecodeTable) -> None:
        """`begin` for a pass that a graph captures, of one new token a row.

        Called when the graph is captured and not when it is replayed. Everything that depends on the contents of
        `table` must be computed on the device, by captured work. Raises UnsupportedModelError unless `captures`.
        """
        raise UnsupportedModelError(f"{type(self).__name__} cannot be captured in a CUDA graph")

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Store the new tokens' `key` and `value`, then attend from each token to its own request, up to itself.

        `query` is `[tokens, heads, head_dim]`, `key` and `value` are `[tokens, kv_heads, head_dim]`, in any strides and
        in the store's dtype. Returns `[tokens, heads, head_dim]`. Softmax and its sums are computed in fp32.
        """
