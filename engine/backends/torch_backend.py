"""Paged attention in plain PyTorch: correct on CPU and CUDA, fast on a CPU, and the reference for other backends.

Rows with one new token (decode) attend together, whatever their lengths; see `torch_decode`. Each prefill chunk attends
on its own, through `scaled_dot_product_attention`; a chunk without a cached prefix never reads the store. Blocks that
requests share are read once for all of them; see `sharing`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from alignedserve.engine.backends.base import AttentionBackend, AttentionOptions
from alignedserve.engine.backends.sharing import SharedPass, share
from alignedserve.engine.backends.torch_decode import DecodeAttention
from alignedserve.engine.backends.torch_shared import KeyTiles, Part, attend_to_all, merge
from alignedserve.engine.backends.torch_table import TableAttention
from alignedserve.engine.batch import DecodeTable, PackedBatch, Span
from alignedserve.errors import AlignedServeError

TILE_SCORES = 1 << 24  # of a chunk whose softmax is merged with another: 64 MiB in fp32


class TorchBackend(AttentionBackend):
    """See the module and AttentionBackend."""

    least_saved_bytes: float = 3 << 19  # measured with benchmarks/shared_attention.py --sweep (ADR 69)

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__(cache)
        _, layers, kv_heads, _, block_size, head_dim = cache.shape
        self._layers, self._kv_heads, self._block_size = layers, kv_heads, block_size
        self._layer_rows = kv_heads * 2 * block_size  # rows of head_dim elements of one layer in a block
        self._token_rows = cache.view(-1, head_dim)  # one row for each (block, layer, head, k|v, token)
        self._head_rows = cache.view(-1, block_size * head_dim)  # one row for each (block, layer, head, k|v)
        self._decode = DecodeAttention(cache)
        self._shared: SharedPass | None = None
        self._own_decode = DecodeAttention(cache)  # over what decode rows do not share
        self._batch: PackedBatch | None = None
        self._table: TableAttention | None = None
        self._key_slots = torch.empty(0, dtype=torch.int64)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def begin(self, batch: PackedBatch) -> None:
        heads = torch.arange(self._kv_heads, device=batch.slot_block.device)
        first = batch.slot_block[:, None] * (self._layers * self._layer_rows) + batch.slot_offset[:, None]
        self._key_slots = (first + heads * (2 * self._block_size)).flatten()
        self._masks.clear()
        self._decode.begin(None if batch.decode is None else batch.decode.table)
        self._batch, self._table = batch, None
        self._shared = share(batch, self.cache, self.least_saved_bytes)
        self._own_decode.begin(None if self._shared is None else self._shared.table)

    def begin_table(self, table: DecodeTable) -> None:
        self._table = TableAttention(self.cache, table)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if self._table is not None:
            return self._table.attend(layer, query, key, value, options)
        batch = self._batch
        if batch is None:
            raise AlignedServeError("the attention backend was used before begin()")
        self._write(layer, key, value)
        if self._shared is not None and self._shared.serves(options):
            return self._attend_shared(layer, query, key, value, replace(options, sliding_window=None), self._shared)
        if batch.decode is not None and batch.decode.rows is None:
            return self._decode.attend(layer, query, options)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for index, span in enumerate(batch.spans):
            rows, window = slice(span.begin, span.end), options.sliding_window
            past_key, past_value = self._past(layer, span, key, value, window)
            output[rows] = _attend_span(query[rows], past_key, past_value, self._mask(index, span, window), options)
        if batch.decode is not None:
            output[batch.decode.rows] = self._decode.attend(layer, query[batch.decode.rows], options)
        return output

    def _attend_shared(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        shared: SharedPass,
    ) -> torch.Tensor:
        out = torch.empty(query.shape, device=query.device)
        lse = torch.empty(query.shape[:2], device=query.device)
        for index, span in enumerate(shared.spans):
            rows = slice(span.begin, span.end)
            past = self._past(layer, span, key, value, None)
            mask = self._mask(index, span, None)
            if shared.alone[index]:
                out[rows] = _attend_span(query[rows], *past, mask, options)
            else:
                out[rows], lse[rows] = _attend_tiled(query[rows], *past, mask, options)
        if self._batch is not None and self._batch.decode is not None:
            places = self._batch.decode.rows
            if places is None:
                out, lse = self._own_decode.attend_part(layer, query, options)
            else:
                out[places], lse[places] = self._own_decode.attend_part(layer, query[places], options)
        for group in shared.groups:
            members = shared.rows[group.begin : group.end]
            tiles = KeyTiles(self.cache, layer, group.blocks)
            part = attend_to_all(query.index_select(0, members), tiles, options)
            own = Part(out.index_select(0, members), lse.index_select(0, members))
            out.index_copy_(0, members, merge(own, part))
        return out.to(query.dtype)

    def _past(
        self, layer: int, span: Span, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that `span` attends to, `[kv_heads, tokens, head_dim]` each. `key`, `value`: the pass's."""
        if span.start:
            return self._gather(layer, span, self._first_block(span, window))
        rows = slice(span.begin, span.end)
        return key[rows].transpose(0, 1), value[rows].transpose(0, 1)

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        head_dim = key.shape[-1]
        keys = self._token_rows[layer * self._layer_rows :]
        keys.index_copy_(0, self._key_slots, key.reshape(-1, head_dim))
        values = self._token_rows[layer * self._layer_rows + self._block_size :]
        values.index_copy_(0, self._key_slots, value.reshape(-1, head_dim))

    def _first_block(self, span: Span, window: int | None) -> int:
        """The first block of `span` that any of its queries attends to."""
        return 0 if window is None else max(0, span.start - window + 1) // self._block_size

    def _gather(self, layer: int, span: Span, first_block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a span from `first_block` on, `[kv_heads, tokens, head_dim]` each."""
        heads = torch.arange(self._kv_heads, device=span.blocks.device)[:, None] * 2 + layer * self._kv_heads * 2
        rows = (span.blocks[first_block:] * (self._layers * self._kv_heads * 2) + heads).flatten()
        shape = (self._kv_heads, -1, self._token_rows.shape[1])
        tokens = span.kv_tokens - first_block * self._block_size
        key = self._head_rows.index_select(0, rows).view(shape)[:, :tokens]
        value = self._head_rows.index_select(0, rows + 1).view(shape)[:, :tokens]
        return key, value

    def _mask(self, index: int, span: Span, window: int | None) -> torch.Tensor | None:
        """`[query_tokens, tokens]` for the keys that `attend` uses, True if visible.

        None if causal order from position 0 is sufficient.
        """
        if span.start == 0 and (window is None or window >= span.kv_tokens):
            return None
        if (index, window) not in self._masks:
            device = self.cache.device
            first = self._first_block(span, window) * self._block_size if span.start else 0
            query = torch.arange(span.start, span.kv_tokens, device=device)[:, None]
            key = torch.arange(first, span.kv_tokens, device=device)[None, :]
            mask = key <= query
            self._masks[index, window] = mask if window is None else mask.logical_and_(key > query - window)
        return self._masks[index, window]


def _attend_span(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """Attend from one chunk `[tokens, heads, head_dim]` to `[kv_heads, kv_tokens, head_dim]`. Returns its shape."""
    if options.softcap is not None or options.sinks is not None:
        return _attend_scores(query, key, value, mask, options)
    output = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=options.scaling,
        enable_gqa=query.shape[1] != key.shape[0],
    )
    return output[0].transpose(0, 1)


def _attend_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """The same with all scores in memory, for soft-cap and sinks, which `scaled_dot_product_attention` lacks."""
    weights = torch.softmax(_scores(query, key, mask, options), dim=-1)[..., : key.shape[1]].to(query.dtype)
    return torch.matmul(weights, value.unsqueeze(1)).flatten(0, 1).transpose(0, 1)


def _attend_tiled(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend_part` by rows of the query, so that at most `TILE_SCORES` scores are in memory."""
    tokens, heads = query.shape[:2]
    most = max(1, TILE_SCORES // (heads * key.shape[1]))
    if tokens <= most:
        return _attend_part(query, key, value, mask, options)
    if mask is None:
        mask = torch.ones(tokens, key.shape[1], dtype=torch.bool, device=query.device).tril_()
    tiles = zip(query.split(most), mask.split(most), strict=True)
    out, lse = zip(*(_attend_part(rows, key, value, visible, options) for rows, visible in tiles), strict=True)
    return torch.cat(out), torch.cat(lse)


def _attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in fp32, and the log-sum-exp of each softmax, sink included, fp32 `[tokens, heads]`."""
    scores = _scores(query, key, mask, options)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = (scores[..., : key.shape[1]] - lse).exp_()
    out = torch.matmul(weights, value.float().unsqueeze(1))
    return out.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1)[..., 0].T


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """fp32 `[kv_heads, group, tokens, kv_tokens]`; one more column for the sinks, if any."""
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[0]
    grouped = query.transpose(0, 1).reshape(kv_heads, heads // kv_heads, tokens, head_dim)
    scores = torch.matmul(grouped.float(), key.float().unsqueeze(1).transpose(-1, -2)).mul_(options.scaling)
    if options.softcap is not None:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if mask is None:
        mask = torch.ones(tokens, key.shape[1], dtype=torch.bool, device=query.device).tril_()
    scores.masked_fill_(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return scores
