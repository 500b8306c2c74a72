"""Decode attention over a `DecodeTable` in plain PyTorch, with shapes that do not depend on the table's contents.

Every row reads all blocks of its table, whatever its length. It is correct but slow, for tests of graph replay.
"""

from __future__ import annotations

import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.batch import DecodeTable


class TableAttention:
    """Attention over one store (see AttentionBackend for its shape)."""

    def __init__(self, cache: torch.Tensor, table: DecodeTable) -> None:
        self._cache = cache
        self._table = table

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Like `AttentionBackend.attend`. Padding rows get zeros."""
        block_size = self._cache.shape[4]
        lengths = self._table.lengths.to(torch.int64)
        places = torch.arange(self._table.block_table.shape[1] * block_size, device=lengths.device)
        visible = places < lengths[:, None]
        held = visible[:, ::block_size]
        blocks = torch.where(held, self._table.block_table, 0).to(torch.int64)
        self._write(layer, key, value, lengths, blocks)
        if options.sliding_window is not None:
            visible = visible & (places >= lengths[:, None] - options.sliding_window)
        stored = self._cache[:, layer].index_select(0, blocks.flatten())
        stored = stored.unflatten(0, blocks.shape).permute(3, 0, 2, 1, 4, 5).flatten(3, 4)
        keys, values = torch.where(visible[:, None, :, None], stored, 0.0)  # [rows, kv_heads, tokens, head_dim] each
        rows, heads, head_dim = query.shape
        grouped = query.float().reshape(rows, keys.shape[1], -1, head_dim) * options.scaling
        scores = torch.matmul(grouped, keys.float().transpose(-1, -2))
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
        if options.sinks is not None:
            sinks = options.sinks.float().view(1, keys.shape[1], -1, 1).expand(rows, -1, -1, -1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(places)]
        output = torch.matmul(weights.to(values.dtype), values).reshape(rows, heads, head_dim)
        return torch.where(lengths[:, None, None] > 0, output, 0.0).to(query.dtype)

    def _write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, blocks: torch.Tensor
    ) -> None:
        """A padding row repeats the write of the longest row. If all are padding, the present content is rewritten."""
        block_size = self._cache.shape[4]
        longest = lengths.max()
        source = torch.where(lengths > 0, torch.arange(len(lengths), device=lengths.device), lengths.argmax())
        place = (lengths[source] - 1).clamp(min=0)
        block = blocks[source].gather(1, (place // block_size)[:, None])[:, 0]
        for part, new in enumerate((key, value)):
            stored = self._cache[:, layer, :, part]
            kept = stored[block, :, place % block_size]
            stored[block, :, place % block_size] = torch.where(longest > 0, new[source], kept)
