"""Paged attention by torch's own `varlen_attn`, if it takes a block table.

In torch 2.10 and 2.11 the function takes none. From 2.12 on it takes one, but the flash-attention 2 built into torch
refuses it: flash-attention 3 or 4 must be installed, and activated (`activate_flash_attention_impl`).
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from alignedserve.engine.backends.base import AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.flash_rows import Chunks, FlashBackend, half_precision_refusal, library_window
from alignedserve.engine.batch import DecodeTable

BLOCK_MULTIPLE = 16
WANTED = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table")


class VarlenBackend(FlashBackend):
    """See the module and AttentionBackend."""

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        reason = half_precision_refusal(needs, BLOCK_MULTIPLE) or missing_function()
        return reason or ("the model caps its scores (softcap)" if needs.softcap else None)

    def lacking(self, options: AttentionOptions) -> str | None:
        return super().lacking(options) or (None if options.softcap is None else "a soft-cap")

    def decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: DecodeTable,
        options: AttentionOptions,
    ) -> torch.Tensor:
        starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        width = table.block_table.shape[1] * keys.shape[1]
        return self._call(query, keys, values, starts, 1, width, table.lengths, table.block_table, options)

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunks: Chunks, options: AttentionOptions
    ) -> torch.Tensor:
        sizes = (chunks.query_starts, chunks.most_query, chunks.most_kv, chunks.lengths, chunks.block_table)
        return self._call(query, keys, values, *sizes, options)

    def _call(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        most_query: int,
        most_kv: int,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        left, _ = library_window(options)
        out: torch.Tensor = varlen_function()(
            query,
            keys,
            values,
            starts,
            None,  # a block table and cumulative lengths of keys are mutually exclusive
            most_query,
            most_kv,
            scale=options.scaling,
            window_size=(left, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=lengths,
            block_table=block_table,
        )
        return out


def varlen_function() -> Callable[..., Any]:
    """torch's `varlen_attn`. Raises ImportError if this torch has none."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def missing_function() -> str | None:
    """Why this torch cannot be used; None: it can."""
    try:
        found = inspect.signature(varlen_function()).parameters
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    lacking = [name for name in WANTED if name not in found]
    if lacking:
        return f"varlen_attn of torch {torch.__version__} does not take {', '.join(lacking)}"
    if active_implementation() is None:
        return "varlen_attn takes a block table only if flash-attention 3 or 4 is activated in torch"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which writes the keys and values, is not installed"
    return None


def active_implementation() -> str | None:
    """The flash-attention implementation that was activated in torch in place of its own."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return current() if current is not None else None
