"""Paged attention in plain PyTorch: right on CPU and CUDA, and the truth that other backends are measured against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from alignedserve.engine.backends.base import AttentionBackend, AttentionOptions
from alignedserve.engine.batch import DecodeRows, PackedBatch, Span
from alignedserve.errors import AlignedServeError


class TorchBackend(AttentionBackend):
    """Decode rows of a batch attend together, block by block; each prefill chunk attends on its own."""

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__(cache)
        self._batch: PackedBatch | None = None

    def begin(self, batch: PackedBatch) -> None:
        self._batch = batch

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        batch = self._require_batch()
        store = self.cache[:, layer]  # [blocks, kv_heads, 2, block_size, head_dim]
        store[batch.slot_block, :, 0, batch.slot_offset] = key.to(store.dtype)
        store[batch.slot_block, :, 1, batch.slot_offset] = value.to(store.dtype)

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        batch = self._require_batch()
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for span in batch.spans:
            output[span.begin : span.end] = self._attend_span(layer, query[span.begin : span.end], span, options)
        if batch.decode is not None:
            rows = batch.decode.rows
            if rows is None:
                return self._attend_decode(layer, query, batch.decode, options)
            output[rows] = self._attend_decode(layer, query[rows], batch.decode, options)
        return output

    def _require_batch(self) -> PackedBatch:
        if self._batch is None:
            raise AlignedServeError("attention backend was used before begin()")
        return self._batch

    def _attend_span(self, layer: int, query: torch.Tensor, span: Span, options: AttentionOptions) -> torch.Tensor:
        """One prefill chunk, `[query_tokens, heads, head_dim]`, over its cached prefix and itself."""
        kv = self.cache[span.blocks, layer]  # [blocks, kv_heads, 2, block_size, head_dim]
        kv = kv.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, : span.kv_tokens]
        key, value = kv[0].to(query.dtype), kv[1].to(query.dtype)
        mask = _span_mask(span, options.sliding_window, query.device)
        if options.softcap is not None:
            return _attend_softcap(query, key, value, mask, options)
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.scaling,
            enable_gqa=query.shape[1] != key.shape[0],
        )
        return output[0].transpose(0, 1)

    def _attend_decode(
        self, layer: int, query: torch.Tensor, decode: DecodeRows, options: AttentionOptions
    ) -> torch.Tensor:
        """Rows of one token each, `[requests, heads, head_dim]`: scores per block, softmax per request."""
        requests, heads, head_dim = query.shape
        kv_heads, block_size = self.cache.shape[2], self.cache.shape[4]
        kv = self.cache[decode.blocks, layer]  # [blocks, kv_heads, 2, block_size, head_dim]
        grouped = query.view(requests, kv_heads, heads // kv_heads, head_dim).float()[decode.owner]
        scores = torch.matmul(grouped * options.scaling, kv[:, :, 0].float().transpose(-1, -2))
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        position = decode.first_token[:, None] + torch.arange(block_size, device=query.device)
        length = decode.lengths[decode.owner][:, None]
        visible = position < length
        if options.sliding_window is not None:
            visible &= position >= length - options.sliding_window
        scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
        groups = (requests, *scores.shape[1:3])
        top = torch.full(groups, float("-inf"), device=query.device)
        top.scatter_reduce_(0, _expand(decode.owner, scores.amax(-1)), scores.amax(-1), "amax")
        weights = torch.exp(scores - top[decode.owner].unsqueeze(-1))
        total = torch.zeros(groups, device=query.device).index_add_(0, decode.owner, weights.sum(-1))
        partial = torch.matmul(weights, kv[:, :, 1].float())
        output = torch.zeros((*groups, head_dim), device=query.device).index_add_(0, decode.owner, partial)
        return (output / total.unsqueeze(-1)).flatten(1, 2).to(query.dtype)


def _expand(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return index.view(-1, *([1] * (like.dim() - 1))).expand_as(like)


def _span_mask(span: Span, window: int | None, device: torch.device) -> torch.Tensor | None:
    """`[query_tokens, kv_tokens]`, True where visible; None where plain causal order from position 0 says it all."""
    if span.start == 0 and (window is None or window >= span.kv_tokens):
        return None
    query = torch.arange(span.start, span.kv_tokens, device=device)[:, None]
    key = torch.arange(span.kv_tokens, device=device)[None, :]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    return mask


def _attend_softcap(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    assert options.softcap is not None
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[0]
    grouped = query.transpose(0, 1).reshape(kv_heads, heads // kv_heads, tokens, head_dim)
    scores = torch.matmul(grouped, key.unsqueeze(1).transpose(-1, -2)).float() * options.scaling
    scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is None:
        mask = torch.ones(tokens, key.shape[1], dtype=torch.bool, device=query.device).tril_()
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1).to(query.dtype)
    output = torch.matmul(weights, value.unsqueeze(1))
    return output.reshape(heads, tokens, head_dim).transpose(0, 1)
