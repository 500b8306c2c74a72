"""Writes new keys and values to a paged store, in Triton."""

from __future__ import annotations

import torch

from alignedserve.engine.backends.triton_tuning import padded_dim, power_of_two
from alignedserve.engine.backends.triton_write_kernels import write_kernel
from alignedserve.engine.batch import DecodeTable
from alignedserve.errors import AlignedServeError

_WRITTEN_AT_ONCE = 4096  # elements of keys that a program writes at once, and as many of values


class PagedWrite:
    """Writes to one store (see AttentionBackend for its shape).

    Call `begin` or `begin_table` for a pass, then `write` for each layer.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache
        self._slots: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
        self._table: DecodeTable | None = None

    def begin(self, slot_block: torch.Tensor, slot_offset: torch.Tensor) -> None:
        """Set the block of each new token, and its place there, int64 `[tokens]` each."""
        self._slots, self._table = (slot_block, slot_offset), None

    def begin_table(self, table: DecodeTable) -> None:
        """Use the last token of each row as its new token. A padding row has none."""
        self._slots, self._table = (None, None), table

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """`key` and `value` are `[tokens, kv_heads, head_dim]`; the elements of a head are contiguous."""
        table = self._table
        if table is None and self._slots[0] is None:
            raise AlignedServeError("keys and values were written before begin()")
        _, _, kv_heads, _, block_size, head_dim = self._cache.shape
        at_once = min(power_of_two(kv_heads), max(1, _WRITTEN_AT_ONCE // padded_dim(head_dim)))
        write_kernel[(key.shape[0], -(-kv_heads // at_once))](
            key, value, self._cache, *self._slots,
            None if table is None else table.lengths, None if table is None else table.block_table,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1), self._cache.stride(0),
            0 if table is None else table.block_table.stride(0), layer, kv_heads=kv_heads, head_dim=head_dim,
            dim_pad=padded_dim(head_dim), block_size=block_size, heads_at_once=at_once, num_warps=4,
        )  # fmt: skip
