"""Passes of ranks that share a mixture's experts: each computes its own requests, and rank 0 has all logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from alignedserve.engine.batch import ForwardItem
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.parallel.experts import exchanges_of
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.runner import DrivenRunner
from alignedserve.errors import AccountingError
from alignedserve.ranks.degrees import RankPlace


class ExpertRunner(DrivenRunner):
    """One rank's passes. An item is computed by its `rank`: over the store that all share, or over the rank's own.

    There are no CUDA graphs, since the numbers of rows that ranks exchange differ from pass to pass.
    """

    def __init__(
        self, loaded: LoadedModel, cache: torch.Tensor, place: RankPlace, groups: Groups, backend: str, *, own: bool
    ) -> None:
        """`own`: `cache` is this rank's range of the instance's blocks: as many as the others have, in their order."""
        super().__init__(loaded, cache, place, groups, backend)
        assert groups.pipe is not None
        self._each = cache.shape[0] if own else 0  # blocks of each rank; 0: one store
        self._all = groups.pipe
        self._exchanges = list(exchanges_of(loaded.model))

    @property
    def captures(self) -> bool:
        return False

    @torch.inference_mode()
    def forward(self, items: Sequence[ForwardItem], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """For rank 0. `on_layer` is called at the end. Raises AccountingError for an item whose rank is not there, or
        does not have its blocks.
        """
        if not items:
            return super().forward(items)
        self._require_all()
        if max(item.rank for item in items) >= self._all.size:
            raise AccountingError(f"there are {self._all.size} ranks, and a request is for another one")
        if self._each and any(item.block_ids[0] // self._each != item.rank for item in items):
            raise AccountingError(f"each of {self._all.size} ranks has {self._each} blocks; a request is for another's")
        with self._noting_a_loss():
            self._tell(items)
            found = self._pass(items)
        for layer in range(self.loaded.info.layers if on_layer is not None else 0):
            on_layer(layer)  # type: ignore[misc]
        return found

    def _pass(self, items: Sequence[ForwardItem]) -> torch.Tensor:
        counts = [{"all": len(item.token_ids), "last": 1, "none": 0}[item.logits] for item in items]
        owners = np.repeat([item.rank for item in items], counts)
        vocab = self.loaded.info.vocab_size
        logits = torch.empty((len(owners), vocab))
        logits[torch.from_numpy(owners == 0)] = self._own(items).cpu()
        coming = []  # after the messages of this pass's layers
        for rank in sorted({item.rank for item in items} - {0}):
            where = torch.from_numpy(owners == rank)
            rows = int(where.sum())
            coming.append((where, rows, self._all.receiving(torch.empty((max(1, rows), vocab)), rank)))
        for where, rows, wait in coming:
            logits[where] = wait()[:rows]
        return logits.to(self.loaded.device)

    def _own(self, items: Sequence[ForwardItem]) -> torch.Tensor:
        """This rank's part of a pass: the logits of its rows."""
        own = [self._translated(item) for item in items if item.rank == self._at.rank]
        if own:
            return self.forward_batch(self._batch(own))
        for exchange in self._exchanges:
            exchange.step_along()
        return torch.empty((0, self.loaded.info.vocab_size))

    def _translated(self, item: ForwardItem) -> ForwardItem:
        """The item with its blocks as `cache` numbers them."""
        first = self._at.rank * self._each
        return replace(item, block_ids=[block - first for block in item.block_ids]) if first else item

    def follow_pass(self, items: Sequence[ForwardItem]) -> None:
        logits = self._own(items)
        if any(item.rank == self._at.rank for item in items):  # without rows as a sign that its KV is written
            self._all.send(logits.contiguous() if len(logits) else logits.new_zeros((1, logits.shape[1])), 0)

    @property
    def barrier_idle_s(self) -> Mapping[str, float]:
        return self._all.idle_s
