"""Paged attention in Triton: decode rows with their KV split by work (or not), prefill chunks over the paged store.

New keys and values are written first. Then every row reads the store, so that cached and new tokens are treated alike.
Blocks that requests share are read once for all of them, but not in captured passes, whose groups change from replay to
replay.
"""

from __future__ import annotations

import importlib.util
from typing import ClassVar

import torch

from alignedserve.engine.backends.base import AttentionBackend, AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.sharing import SharedPass, share
from alignedserve.engine.batch import DecodeTable, PackedBatch
from alignedserve.errors import AlignedServeError


class TritonBackend(AttentionBackend):
    """See the module and AttentionBackend. Triton is imported when the first instance is created."""

    captures: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    least_saved_bytes: float = 16 << 20  # calculated: four more launches of some 2 µs, at 2 to 4 TB/s; not measured yet

    def __init__(self, cache: torch.Tensor) -> None:
        from alignedserve.engine.backends.triton_decode import PagedDecode
        from alignedserve.engine.backends.triton_prefill import PrefillAttention
        from alignedserve.engine.backends.triton_shared import SharedAttention
        from alignedserve.engine.backends.triton_write import PagedWrite

        super().__init__(cache)
        self._write = PagedWrite(cache)
        self._decode = PagedDecode(cache, split=self.splits)
        self._prefill = PrefillAttention(cache)
        self._over_shared = SharedAttention(cache, split=self.splits)
        self._shared: SharedPass | None = None
        self._tokens = 0  # of this pass
        self._decodes = False  # whether some of them are decode rows

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        if needs.device != "cuda":
            return f"Triton's kernels run on a GPU, not on {needs.device!r}"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        from alignedserve.engine.backends.triton_prefill import PrefillAttention

        return PrefillAttention.refusal(needs)

    def begin(self, batch: PackedBatch) -> None:
        self._tokens, self._decodes = batch.tokens, batch.decode is not None
        self._write.begin(batch.slot_block, batch.slot_offset)
        self._prefill.begin(batch.spans)
        if batch.decode is not None:
            self._decode.begin(batch.decode.table, batch.decode.rows)
        self._shared = share(batch, self.cache, self.least_saved_bytes)
        if self._shared is not None:
            self._over_shared.begin(self._shared, None if batch.decode is None else batch.decode.rows)

    def begin_table(self, table: DecodeTable) -> None:
        self._tokens, self._decodes, self._shared = len(table.lengths), True, None
        self._write.begin_table(table)
        self._prefill.begin(())
        self._decode.begin(table)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if query.shape[0] != self._tokens:
            raise AlignedServeError(f"attention got {query.shape[0]} tokens, but begin() had {self._tokens}")
        query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        with torch.cuda.device_of(self.cache):
            self._write.write(layer, key, value)
            if self._shared is not None and self._shared.serves(options):
                return self._over_shared.attend(layer, query, options).to(query.dtype)
            self._prefill.attend(layer, query, options, out)
            if self._decodes:
                self._decode.attend(layer, query, options, out)
        return out


class TritonNoSplitBackend(TritonBackend):
    """The same with one decode program for each request and KV head: the longest request determines the time."""

    splits: ClassVar[bool] = False
