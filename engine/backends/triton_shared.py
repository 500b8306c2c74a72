"""Attention over blocks that several requests share, in Triton: see `sharing`.

The queries of a group's members are stacked and attend to the shared keys as one chunk would, with the prefill kernel,
whose tiles read a key once for up to 128 rows. What each request has alone goes through the plain kernels, which keep
its log-sum-exp. A last kernel merges the two.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.backends.sharing import SharedPass
from alignedserve.engine.backends.triton_decode import PagedDecode
from alignedserve.engine.backends.triton_prefill import PrefillAttention
from alignedserve.engine.backends.triton_shared_kernels import merge_shared
from alignedserve.engine.backends.triton_tuning import padded_dim


class SharedAttention:
    """For one store (see AttentionBackend for its shape). The KV of all tokens is already in it."""

    def __init__(self, cache: torch.Tensor, *, split: bool) -> None:
        """`split`: of decode rows, as for PagedDecode."""
        self._decode = PagedDecode(cache, split=split)
        self._prefill = PrefillAttention(cache)
        self._groups = PrefillAttention(cache)
        self._rows: torch.Tensor | None = None  # packed tokens of all members
        self._decodes = False  # whether the pass has decode rows

    def begin(self, shared: SharedPass, decode_rows: torch.Tensor | None) -> None:
        """Serve this pass from now on. `decode_rows`: packed positions of its decode rows; None: all, in order."""
        self._rows, self._decodes = shared.rows, shared.table is not None
        self._groups.begin(shared.groups)
        self._prefill.begin(shared.spans)
        if shared.table is not None:
            self._decode.begin(shared.table, decode_rows)

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Like `AttentionBackend.attend`, for options that the SharedPass serves. Returns fp32."""
        assert self._rows is not None
        options = replace(options, sliding_window=None)
        out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        self._prefill.attend(layer, query, options, out, lse)
        if self._decodes:
            self._decode.attend(layer, query, options, out, lse)
        stacked = query.index_select(0, self._rows)
        part = torch.empty(stacked.shape, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(stacked.shape[:2], dtype=torch.float32, device=query.device)
        self._groups.attend(layer, stacked, replace(options, sinks=None), part, part_lse)  # a sink counts once
        _, heads, head_dim = stacked.shape
        merge_shared[(len(stacked),)](
            out, lse, part, part_lse, self._rows, heads, head_dim=head_dim, padded=padded_dim(head_dim), num_warps=4
        )
        return out
