"""Passes that all ranks of an instance compute together. Rank 0 drives: it decides, and the others follow.

Ranks on CPUs share one store, in which each reads and writes its own KV heads of every layer, so nothing else of the
cluster sees that there are several. Rank 0 has all logits in the end, when every rank has written its KV.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from alignedserve.engine.attention import Place
from alignedserve.engine.batch import ForwardItem, PackedBatch
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.parallel.cuts import Ranks
from alignedserve.engine.parallel.group import RankGroup
from alignedserve.engine.parallel.steps import from_words, to_words
from alignedserve.engine.runner import ModelRunner
from alignedserve.errors import RankLostError

_END = 0  # the length of the message after which the other ranks end


class RankRunner(ModelRunner):
    """One rank's passes. `loaded`: its part of the model. `cache`: the store of all ranks.

    `waits`: a group in which a rank may be silent for as long as there is nothing to do. `sums`: the group of the
    passes.
    """

    def __init__(
        self, loaded: LoadedModel, cache: torch.Tensor, ranks: Ranks, waits: RankGroup, sums: RankGroup, backend: str
    ) -> None:
        parts = loaded.info.kv_heads // ranks.kv_heads
        super().__init__(loaded, cache, backend, Place(parts, ranks.kv_begin // ranks.kv_heads))
        self._ranks, self._waits, self._sums = ranks, waits, sums
        self._lost: RankLostError | None = None

    def forward_batch(self, batch: PackedBatch, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        def after_all_ranks(layer: int) -> None:
            """All ranks have written the layer before: this one attends after the sum that ended it."""
            if layer:
                on_layer(layer - 1)  # type: ignore[misc]

        with self._noting_a_loss():
            logits = super().forward_batch(batch, None if on_layer is None else after_all_ranks)
        if on_layer is not None:
            on_layer(self.loaded.info.layers - 1)
        return logits

    def forward(self, items: Sequence[ForwardItem], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        if items and self._ranks.rank == 0:
            with self._noting_a_loss():
                self._tell(to_words(items))
        return super().forward(items, on_layer)

    def follow(self) -> None:
        """Compute what rank 0 computes until it ends. For the other ranks."""
        length = torch.zeros(1, dtype=torch.int64)
        while int(self._waits.from_first(length)) != _END:
            words = self._waits.from_first(torch.zeros(int(length), dtype=torch.int64))
            super().forward(from_words(words.numpy()))

    def end(self) -> None:
        """Let the other ranks end. For rank 0."""
        self._waits.from_first(torch.tensor([_END]))

    def device_fault(self) -> Exception | None:
        return self._lost or super().device_fault()

    @contextlib.contextmanager
    def _noting_a_loss(self) -> Iterator[None]:
        try:
            yield
        except RankLostError as error:
            self._lost = error
            raise

    def _tell(self, words: np.ndarray) -> None:
        self._waits.from_first(torch.tensor([len(words)]))
        self._waits.from_first(torch.from_numpy(words))

    def _logits(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        own = super()._logits(*inputs, **kwargs)
        return self._sums.concatenated(own)[..., : self.loaded.info.vocab_size]
