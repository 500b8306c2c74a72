"""Shared parts of backends that call a flash-attention library: its views and tables, and the order of a pass.

Such a library reads keys and values as `[blocks, block_size, kv_heads, head_dim]`. Strides provide this view without a
copy.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from alignedserve.engine.backends.base import AttentionBackend, AttentionNeeds, AttentionOptions
from alignedserve.engine.batch import DecodeTable, PackedBatch, Span
from alignedserve.errors import AlignedServeError, UnsupportedModelError

HALF = ("float16", "bfloat16")
MOST_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Chunks:
    """The prefill chunks of a pass in the libraries' format. Tensors are int32 on the cache's device."""

    rows: torch.Tensor | None  # int64: packed rows; None: all rows of the pass, in order
    query_starts: torch.Tensor  # [chunks + 1] cumulative new tokens
    kv_starts: torch.Tensor  # [chunks + 1] cumulative tokens attended to
    lengths: torch.Tensor  # [chunks] tokens attended to
    block_table: torch.Tensor  # [chunks, width]
    most_query: int
    most_kv: int


def key_value_views(cache: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values `[blocks, block_size, kv_heads, head_dim]`: views of the store's memory."""
    part = cache[:, layer]
    return part[:, :, 0].transpose(1, 2), part[:, :, 1].transpose(1, 2)


def library_window(options: AttentionOptions) -> tuple[int, int]:
    """The library's window (left, right). Ours includes the query's own token, its left side does not."""
    return (-1, -1) if options.sliding_window is None else (options.sliding_window - 1, 0)


def half_precision_refusal(needs: AttentionNeeds, block_multiple: int) -> str | None:
    """Why no such library can serve `needs`, or why its paged kernel does not take the blocks; None: no objection."""
    if needs.device != "cuda":
        return f"its kernels run on a GPU, not on {needs.device!r}"
    if needs.dtype not in HALF:
        return f"KV is {needs.dtype}; it takes {' and '.join(HALF)}"
    if needs.head_dim > MOST_HEAD_DIM or needs.head_dim % 8:
        return f"heads have {needs.head_dim} elements; it takes multiples of 8 up to {MOST_HEAD_DIM}"
    if needs.block_size % block_multiple:
        return (
            f"blocks have {needs.block_size} tokens (kv_pool.block_size); its paged kernel takes multiples of "
            f"{block_multiple}"
        )
    return "the model has attention sinks" if needs.sinks else None


class FlashBackend(AttentionBackend):
    """Writes new keys and values, then calls the library once for decode rows and once for chunks."""

    captures: ClassVar[bool] = True

    def __init__(self, cache: torch.Tensor) -> None:
        from alignedserve.engine.backends.triton_write import PagedWrite

        super().__init__(cache)
        self._write = PagedWrite(cache)
        self._tokens = 0
        self._table: DecodeTable | None = None
        self._rows: torch.Tensor | None = None
        self._chunks: Chunks | None = None

    @abstractmethod
    def decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: DecodeTable,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend for decode rows: `query` `[rows, heads, head_dim]`, one row for each request. Returns its shape."""

    @abstractmethod
    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunks: Chunks, options: AttentionOptions
    ) -> torch.Tensor:
        """Attend for chunks: `query` `[rows, heads, head_dim]`, chunk after chunk. Returns its shape."""

    def lacking(self, options: AttentionOptions) -> str | None:
        """Which of these options the library does not support; None: it supports all."""
        return None if options.sinks is None else "attention sinks"

    def begin(self, batch: PackedBatch) -> None:
        self._tokens = batch.tokens
        self._write.begin(batch.slot_block, batch.slot_offset)
        self._table, self._rows = (None, None) if batch.decode is None else (batch.decode.table, batch.decode.rows)
        self._chunks = None
        if batch.spans:
            self._chunks = chunks_of(batch.spans, self.cache.shape[4], self.cache.device, whole=batch.decode is None)

    def begin_table(self, table: DecodeTable) -> None:
        self._tokens = len(table.lengths)
        self._write.begin_table(table)
        self._table, self._rows, self._chunks = table, None, None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if query.shape[0] != self._tokens:
            raise AlignedServeError(f"attention got {query.shape[0]} tokens, but begin() had {self._tokens}")
        lacking = self.lacking(options)
        if lacking:
            raise UnsupportedModelError(f"{type(self).__name__} does not support {lacking}")
        query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
        keys, values = key_value_views(self.cache, layer)
        with torch.cuda.device_of(self.cache):
            self._write.write(layer, key, value)
            if self._table is not None and self._rows is None:
                return self.decode(query, keys, values, self._table, options)
            if self._chunks is not None and self._chunks.rows is None:
                return self.prefill(query, keys, values, self._chunks, options)
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            if self._table is not None:
                out[self._rows] = self.decode(query[self._rows], keys, values, self._table, options)
            if self._chunks is not None:
                rows = self._chunks.rows
                out[rows] = self.prefill(query[rows], keys, values, self._chunks, options)
        return out


def chunks_of(spans: tuple[Span, ...], block_size: int, device: torch.device, *, whole: bool) -> Chunks:
    """Build the tables of `spans`. `whole`: they cover all rows of the pass."""
    new = [span.query_tokens for span in spans]
    attended = [span.kv_tokens for span in spans]
    starts = torch.zeros(2, len(spans) + 1, dtype=torch.int32)
    starts[:, 1:] = torch.tensor([new, attended], dtype=torch.int32).cumsum(1)
    table = torch.zeros(len(spans), max(len(span.blocks) for span in spans), dtype=torch.int32, device=device)
    for line, span in zip(table, spans, strict=True):
        line[: len(span.blocks)] = span.blocks
    starts = starts.to(device, non_blocking=True)
    rows = None if whole else torch.cat([torch.arange(span.begin, span.end) for span in spans]).to(device)
    lengths = torch.tensor(attended, dtype=torch.int32).to(device, non_blocking=True)
    return Chunks(rows, starts[0], starts[1], lengths, table, max(new), max(attended))
