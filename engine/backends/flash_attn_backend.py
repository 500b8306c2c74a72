"""Paged attention with the package flash-attn (2.8 or newer), whose paged kernel needs multiples of 256 tokens."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

from alignedserve.engine.backends.base import AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.flash_rows import Chunks, FlashBackend, half_precision_refusal, library_window
from alignedserve.engine.batch import DecodeTable

BLOCK_MULTIPLE = 256
OLDEST = (2, 8)


class FlashAttnBackend(FlashBackend):
    """See the module and AttentionBackend."""

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        return missing_package() or half_precision_refusal(needs, BLOCK_MULTIPLE)

    def decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: DecodeTable,
        options: AttentionOptions,
    ) -> torch.Tensor:
        from flash_attn import flash_attn_with_kvcache

        out: torch.Tensor = flash_attn_with_kvcache(
            query.unsqueeze(1),
            keys,
            values,
            cache_seqlens=table.lengths,
            block_table=table.block_table,
            softmax_scale=options.scaling,
            causal=True,
            window_size=library_window(options),
            softcap=options.softcap or 0.0,
        )
        return out.squeeze(1)

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunks: Chunks, options: AttentionOptions
    ) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        out: torch.Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            chunks.query_starts,
            chunks.kv_starts,
            chunks.most_query,
            chunks.most_kv,
            softmax_scale=options.scaling,
            causal=True,
            window_size=library_window(options),
            softcap=options.softcap or 0.0,
            block_table=chunks.block_table,
        )
        return out


def missing_package() -> str | None:
    """Why flash-attn is unusable here; None: it is usable."""
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    version = importlib.metadata.version("flash-attn")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"the package flash-attn is {version}; it must be 2.8 or newer"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which writes the keys and values, is not installed"
    return None
