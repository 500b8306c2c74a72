"""Two backends over one store: one for passes of decode rows only, the other for passes with prompt chunks.

Nearly all passes of an instance are of one kind, so each pass is served as a whole by one of the two.
"""

from __future__ import annotations

import torch

from alignedserve.engine.backends.base import AttentionBackend, AttentionOptions
from alignedserve.engine.batch import DecodeTable, PackedBatch


class CompositeBackend(AttentionBackend):
    """See the module and AttentionBackend. Both backends were created over the same store."""

    def __init__(self, decode: AttentionBackend, prefill: AttentionBackend) -> None:
        super().__init__(decode.cache)
        self._decode, self._prefill = decode, prefill
        self._active = decode

    @property
    def captures(self) -> bool:  # type: ignore[override]  # it depends on the pair
        """Whether the decode backend can be captured."""
        return self._decode.captures

    def begin(self, batch: PackedBatch) -> None:
        self._active = self._prefill if batch.spans else self._decode
        self._active.begin(batch)

    def begin_table(self, table: DecodeTable) -> None:
        self._active = self._decode
        self._active.begin_table(table)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return self._active.attend(layer, query, key, value, options)
