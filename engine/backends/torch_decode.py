"""Decode attention in plain PyTorch, for a batch of requests of any lengths, without padding or a loop over them.

For each layer, keys are gathered a few blocks at a time (so that the copy stays in cache) and multiplied with their
request's query. The scores of each (request, head) are then a segment of one flat vector, over which softmax is a
segmented reduction. Values are not gathered at all: `embedding_bag` sums the store's own rows with the softmax weights.
Indices are built once for each forward pass and window; a layer only shifts the start of its view.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.batch import DecodeTable
from alignedserve.errors import AlignedServeError

# Keys gathered at a time, in bytes of fp32. For one thread: within one core's cache. For several: enough that they
# rarely wait for each other (measured on two AMD cores: 0.5 and 2 MiB are best).
_CHUNK_BYTES = 1 << 19
_CHUNK_BYTES_THREADS = 1 << 21


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A decode table flattened over the blocks that its rows attend to. All tensors are int64."""

    lengths: torch.Tensor  # [requests] tokens attended to, including the new one
    blocks: torch.Tensor  # [blocks] block ids, request after request
    owner: torch.Tensor  # [blocks] index of the request that each block belongs to
    first_token: torch.Tensor  # [blocks] position of each block's first token


@dataclass(frozen=True, slots=True)
class _Plan:
    """Indices of one forward pass, for layer 0. A segment is one (request, query head), with its tokens in order."""

    owner: torch.Tensor  # [blocks] request of each block
    key_rows: torch.Tensor  # [blocks * kv_heads] rows of the store seen as [.., block_size * head_dim]
    score_index: torch.Tensor  # [tokens of all segments] place in scores [blocks, kv_heads, group, block_size]
    value_rows: torch.Tensor  # [tokens of all segments] rows of the store seen as [.., head_dim]
    segment: torch.Tensor  # [tokens of all segments] segment number
    offsets: torch.Tensor  # [segments + 1] start of each segment


class DecodeAttention:
    """Decode attention over one store (see AttentionBackend for its shape): each row has one new token."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache
        _, self._layers, self._kv_heads, _, self._block_size, self._head_dim = cache.shape
        self._token_rows = cache.view(-1, self._head_dim)
        self._head_rows = cache.view(-1, self._block_size * self._head_dim)
        block_bytes = self._kv_heads * self._block_size * self._head_dim * 4
        chunk_bytes = _CHUNK_BYTES if torch.get_num_threads() == 1 else _CHUNK_BYTES_THREADS
        self._chunk_blocks = max(1, chunk_bytes // block_bytes)
        self._decode: _Blocks | None = None
        self._plans: dict[tuple[int, int | None], _Plan] = {}

    def begin(self, table: DecodeTable | None) -> None:
        """Use the rows of `table`, without padding, from now on."""
        self._decode = None if table is None else _flatten(table, self._block_size)
        self._plans.clear()

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Attend from `query` `[requests, heads, head_dim]`. Returns its shape and dtype."""
        return self.attend_part(layer, query, options)[0].to(query.dtype)

    def attend_part(
        self, layer: int, query: torch.Tensor, options: AttentionOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in fp32, and the log-sum-exp of each softmax, sink included, fp32 `[requests, heads]`."""
        requests, heads, head_dim = query.shape
        plan = self._plan(heads, options.sliding_window)
        scores = self._scores(layer, query.float() * options.scaling, plan)
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        picked = scores.view(-1).index_select(0, plan.score_index)
        top = torch.segment_reduce(picked, "max", offsets=plan.offsets, unsafe=True)
        sinks = None if options.sinks is None else options.sinks.float().repeat(requests)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        weights = picked.sub_(top.index_select(0, plan.segment)).exp_().to(self._cache.dtype)
        total = torch.segment_reduce(weights.float(), "sum", offsets=plan.offsets, unsafe=True)
        if sinks is not None:
            total += (sinks - top).exp_()
        summed = functional.embedding_bag(
            plan.value_rows,
            self._token_rows[(layer * self._kv_heads * 2 + 1) * self._block_size :],
            plan.offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )
        out = (summed.float() / total.unsqueeze(1)).view(requests, heads, head_dim)
        return out, top.add_(total.log_()).view(requests, heads)

    def _scores(self, layer: int, query: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """fp32 `[blocks * kv_heads, group, block_size]`: products of each block's keys with its request's queries."""
        requests, heads, head_dim = query.shape
        group = heads // self._kv_heads
        spread = query.reshape(requests, -1).index_select(0, plan.owner).view(-1, group, head_dim)
        scores = torch.empty(len(spread), group, self._block_size, device=query.device)
        source = self._head_rows[layer * self._kv_heads * 2 :]
        step = self._chunk_blocks * self._kv_heads
        for begin in range(0, len(spread), step):
            rows = slice(begin, begin + step)
            keys = source.index_select(0, plan.key_rows[rows]).float().view(-1, self._block_size, head_dim)
            torch.bmm(spread[rows], keys.transpose(1, 2), out=scores[rows])
        return scores

    def _plan(self, heads: int, window: int | None) -> _Plan:
        plan = self._plans.get((heads, window))
        if plan is None:
            if self._decode is None:
                raise AlignedServeError("the batch has no decode rows")
            plan = self._plans[heads, window] = self._build(self._decode, heads, window)
        return plan

    def _build(self, decode: _Blocks, heads: int, window: int | None) -> _Plan:
        device = decode.blocks.device
        block_size, kv_heads = self._block_size, self._kv_heads
        blocks, owner, first_token = decode.blocks, decode.owner, decode.first_token
        if window is not None:
            near = first_token + block_size > decode.lengths[owner] - window
            blocks, owner, first_token = blocks[near], owner[near], first_token[near]
        lengths = decode.lengths[owner][:, None]
        position = first_token[:, None] + torch.arange(block_size, device=device)
        visible = position < lengths
        if window is not None:
            visible &= position >= lengths - window
        block, offset = visible.nonzero(as_tuple=True)  # place of each visible token, request after request
        tokens = torch.clamp(decode.lengths, max=window) if window is not None else decode.lengths
        # Each request's tokens are repeated for each of its heads: segments ordered by (request, head).
        segment_tokens = tokens.repeat_interleave(heads)
        offsets = functional.pad(segment_tokens.cumsum(0), (1, 0))
        segment = torch.repeat_interleave(segment_tokens)
        first = (tokens.cumsum(0) - tokens).repeat_interleave(heads) - offsets[:-1]
        token = torch.arange(segment.shape[0], device=device) + first[segment]
        head = segment % heads
        block, offset = block[token], offset[token]
        block_rows = self._layers * kv_heads * 2
        kv_head = head // (heads // kv_heads)
        return _Plan(
            owner=owner,
            key_rows=(blocks[:, None] * block_rows + torch.arange(kv_heads, device=device) * 2).flatten(),
            score_index=(block * heads + head) * block_size + offset,
            value_rows=(blocks[block] * block_rows + kv_head * 2) * block_size + offset,
            segment=segment,
            offsets=offsets,
        )


def _flatten(table: DecodeTable, block_size: int) -> _Blocks:
    lengths = table.lengths.long()
    width = torch.arange(table.block_table.shape[1], device=lengths.device)
    owner, place = (width < ((lengths + block_size - 1) // block_size)[:, None]).nonzero(as_tuple=True)
    return _Blocks(lengths, table.block_table[owner, place].long(), owner, place * block_size)
