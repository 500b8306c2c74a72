"""The contract of a paged attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from alignedserve.engine.batch import PackedBatch


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How one layer attends. `sliding_window` counts the tokens seen, the query's own included; None sees all."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


class AttentionBackend(ABC):
    """Writes keys and values to a paged store, and attends over it.

    A backend belongs to one runner and one store, `cache`, of shape
    `[num_blocks, layers, kv_heads, 2, block_size, head_dim]`, contiguous. One thread calls it: `begin` once for each
    forward pass, then `attend` once for each layer. A backend that lacks what `options` ask for raises
    UnsupportedModelError; it never ignores an option. Offsets into the store exceed 32 bits.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache = cache

    @abstractmethod
    def begin(self, batch: PackedBatch) -> None:
        """Prepare what all layers of the forward pass of `batch` share."""

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Store the new tokens' `key` and `value`, then attend to each token's own request, up to itself.

        `query` is `[tokens, heads, head_dim]`, `key` and `value` `[tokens, kv_heads, head_dim]`, in any strides and
        in the store's dtype. Returns `[tokens, heads, head_dim]`. Softmax and its sums are computed in fp32.
        """
