"""Attention over blocks that several requests share, in plain PyTorch: see `sharing`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.engine.backends.base import AttentionOptions

_KEY_BYTES = 1 << 20  # keys of a tile in fp32, and its scores: what a core's cache holds beside the values

# What `scaled_dot_product_attention` calls on a CPU; the public function does not return the log-sum-exp. Twice as fast
# as tiles for many rows. None in a torch that has it no more: then tiles serve.
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


@dataclass(frozen=True, slots=True)
class Part:
    """Results of rows over some of their keys: `out` fp32 `[rows, heads, head_dim]`, `lse` fp32 `[rows, heads]`."""

    out: torch.Tensor
    lse: torch.Tensor


class KeyTiles:
    """The keys and values of some blocks of one layer, a tile at a time. `store`: see AttentionBackend."""

    def __init__(self, cache: torch.Tensor, layer: int, blocks: torch.Tensor) -> None:
        _, layers, kv_heads, _, self.block_size, self._head_dim = cache.shape
        self._rows = cache.view(-1, self.block_size * self._head_dim)  # one for each (block, layer, head, k|v)
        heads = torch.arange(kv_heads, device=blocks.device)[:, None] * 2 + layer * kv_heads * 2
        self._places = blocks * (layers * kv_heads * 2) + heads  # of keys, [kv_heads, blocks]
        self.blocks, self.kv_heads = len(blocks), kv_heads

    def read(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, fp32 `[kv_heads, tokens, head_dim]` each."""
        places = self._places[:, begin:end].flatten()
        shape = (self.kv_heads, -1, self._head_dim)
        keys, values = (self._rows.index_select(0, places + kind).float().view(shape) for kind in (0, 1))
        return keys, values


def attend_to_all(query: torch.Tensor, keys: KeyTiles, options: AttentionOptions) -> Part:
    """Attend from each row of `query` `[rows, heads, head_dim]` to every key, without sinks."""
    rows, heads, head_dim = query.shape
    stacked = query.transpose(0, 1).reshape(keys.kv_heads, -1, head_dim).float()  # heads of one key head side by side
    fused = _FUSED if options.softcap is None and query.device.type == "cpu" else None
    if fused is not None:
        key, value = keys.read(0, keys.blocks)
        out, lse = fused(stacked[None], key[None], value[None], scale=options.scaling)
    else:
        out, lse = _attend_by_tiles(stacked * options.scaling, keys, rows * heads, options.softcap)
    return Part(out.reshape(heads, rows, head_dim).transpose(0, 1), lse.reshape(heads, rows).T)


def _attend_by_tiles(
    query: torch.Tensor, keys: KeyTiles, rows: int, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """From `query` `[kv_heads, rows of a key head, head_dim]`, scaled: its result, and the log-sum-exp of each row."""
    step = max(1, _KEY_BYTES // (keys.block_size * 4 * max(keys.kv_heads * query.shape[-1], rows)))
    acc = torch.zeros(query.shape, device=query.device)
    top = torch.full(query.shape[:2], -torch.inf, device=query.device)
    total = torch.zeros(query.shape[:2], device=query.device)
    for begin in range(0, keys.blocks, step):
        key, value = keys.read(begin, begin + step)
        scores = torch.bmm(query, key.transpose(1, 2))
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        highest = torch.maximum(top, scores.amax(-1))
        weights = scores.sub_(highest.unsqueeze(-1)).exp_()
        shrink = (top - highest).exp_()
        total = total.mul_(shrink).add_(weights.sum(-1))
        acc = acc.mul_(shrink.unsqueeze(-1)).baddbmm_(weights, value)
        top = highest
    return acc.div_(total.unsqueeze(-1)), top.add_(total.log_())


def merge(own: Part, shared: Part) -> torch.Tensor:
    """Of the same rows: the result over the keys of both, fp32 `[rows, heads, head_dim]`."""
    weight = torch.sigmoid(shared.lse - own.lse).unsqueeze(-1)
    return torch.lerp(own.out, shared.out, weight)
