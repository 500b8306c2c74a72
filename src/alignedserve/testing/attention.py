"""Reference for paged attention: fp64 attention over random requests in a poisoned store."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.batch import ForwardItem, PackedBatch, build_batch

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest error of an element, by dtype, of values with a standard deviation of a half.

With larger values the rounding of the result would exceed it: Triton's interpreter truncates bfloat16.
"""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "window_of_one": {"sliding_window": 1},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": 2.0},
    "all": {"sliding_window": 20, "softcap": 5.0, "sinks": 8.0},
}
"""Attention options of models, for `options_of`. `sinks` is the standard deviation of random sinks."""
INTERPRETER_WARNINGS = ("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
"""For pytest's `filterwarnings`: in Triton's interpreter NumPy also divides elements that a kernel masks."""


def options_of(values: dict[str, Any], heads: int, head_dim: int, device: str = "cpu") -> AttentionOptions:
    """The attention options for `values`, one of `OPTIONS`."""
    given = dict(values)
    if "sinks" in given:
        given["sinks"] = given["sinks"] * torch.randn(heads, generator=torch.Generator().manual_seed(3)).to(device)
    return AttentionOptions(scaling=head_dim**-0.5, **given)


@dataclass(slots=True)
class PagedCase:
    """A packed batch, and the tensors of one attention layer. Unowned blocks and rows not yet written hold NaN."""

    cache: torch.Tensor  # [num_blocks, layers, kv_heads, 2, block_size, head_dim], without the new tokens
    batch: PackedBatch
    query: torch.Tensor  # [tokens, heads, head_dim]
    key: torch.Tensor  # [tokens, kv_heads, head_dim] of the new tokens
    value: torch.Tensor
    keys: list[torch.Tensor]  # of each request: [start + new tokens, kv_heads, head_dim]
    values: list[torch.Tensor]
    items: list[ForwardItem]

    def write_new(self, layer: int) -> None:
        """Write the new tokens' keys and values to the store, as a backend does."""
        for kind, new in enumerate((self.key, self.value)):
            self.cache[self.batch.slot_block, layer, :, kind, self.batch.slot_offset] = new

    def expected(self, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
        """The fp64 output `[tokens, heads, head_dim]` and the log-sum-exp `[tokens, heads]`."""
        outputs, sizes, row = [], [], 0
        for item, key, value in zip(self.items, self.keys, self.values, strict=True):
            count = len(item.token_ids)
            output, size = attend_exactly(self.query[row : row + count], key, value, item.start, options)
            outputs.append(output)
            sizes.append(size)
            row += count
        return torch.cat(outputs), torch.cat(sizes)


def paged_case(
    spans: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    layer: int = 1,
    layers: int = 2,
    device: str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """Requests of `(new tokens, cached tokens)` in random blocks. Only `layer` holds their KV."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    counts = [-(-(new + start) // block_size) for new, start in spans]
    num_blocks = sum(counts) + 3
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    cache = torch.full(
        (num_blocks, layers, kv_heads, 2, block_size, head_dim), float("nan"), dtype=dtype, device=device
    )
    items, keys, values = [], [], []
    for (new, start), count in zip(spans, counts, strict=True):
        items.append(ForwardItem([0] * new, start, [free.pop() for _ in range(count)]))
        keys.append(draw(start + new, kv_heads, head_dim))
        values.append(draw(start + new, kv_heads, head_dim) / 2)
        position = torch.arange(start, device=device)
        block = torch.tensor(items[-1].block_ids, device=device)[position // block_size]
        for kind, past in enumerate((keys[-1], values[-1])):
            cache[block, layer, :, kind, position % block_size] = past[:start]
    return _packed(items, keys, values, cache, draw(sum(new for new, _ in spans), heads, head_dim))


def _packed(
    items: list[ForwardItem],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    cache: torch.Tensor,
    query: torch.Tensor,
) -> PagedCase:
    batch = build_batch(items, cache.shape[4], cache.shape[0], cache.device)
    key, value = (
        torch.cat([past[item.start :] for item, past in zip(items, pasts, strict=True)]) for pasts in (keys, values)
    )
    return PagedCase(cache, batch, query, key, value, keys, values, items)


def shared_case(
    spans: Sequence[tuple[int, int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> PagedCase:
    """`paged_case` of requests of `(new tokens, cached tokens, blocks shared)`: that many are those of the longest."""
    case = paged_case(
        [(new, start) for new, start, _ in spans],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    longest = max(range(len(spans)), key=lambda index: spans[index][2])
    for (_, _, blocks), item, key, value in zip(spans, case.items, case.keys, case.values, strict=True):
        item.block_ids[:blocks] = case.items[longest].block_ids[:blocks]
        tokens = blocks * block_size
        key[:tokens], value[:tokens] = case.keys[longest][:tokens], case.values[longest][:tokens]
    return _packed(case.items, case.keys, case.values, case.cache, case.query)


def attend_exactly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 attention of `query` `[tokens, heads, head_dim]`, from position `start`, over `[kv, kv_heads, head_dim]`.

    Returns the output and the log-sum-exp `[tokens, heads]`.
    """
    tokens, heads, _ = query.shape
    group = heads // key.shape[1]
    key, value = (part.double().repeat_interleave(group, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    at = torch.arange(start, start + tokens, device=query.device)[:, None]
    seen = torch.arange(key.shape[0], device=query.device)[None, :]
    hidden = seen > at
    if options.sliding_window is not None:
        hidden |= seen <= at - options.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.double()[:, None, None].expand(heads, tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    size = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores[..., : key.shape[0]] - size[..., None])
    return torch.einsum("hqk,khd->qhd", weights, value), size.T
