"""Chooses the number of threads for a forward pass on a CPU: one if waking the others would cost more than they save.

Waiting threads sleep (docs/adr/0012), so each parallel region of a pass pays for waking them: measured on two cores, 2
to 3 ms a layer. A pass with little work for each layer is faster on one thread, and leaves the other cores to other
processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from alignedserve.engine.batch import PackedBatch

# Multiply-adds of a layer that take as long as waking the threads (measurements: docs/adr/0012).
WAKE_UP_COST = 1e8
# Reading a weight or a cached value from memory takes as long as computing with it for this many tokens.
READ_COST = 8


class PassThreads:
    """Chooses for one model. A pass gets at most the value of `torch.get_num_threads` at creation."""

    def __init__(self, parameters: int, layers: int, head_width: int) -> None:
        """`head_width`: elements of keys and of values of one token and layer, for all KV heads."""
        self.most = torch.get_num_threads()
        self._layer_parameters = parameters / max(1, layers)
        self._head_width = head_width

    def choose(self, batch: PackedBatch) -> int:
        if self.most == 1:
            return 1
        attended = sum((span.query_tokens + READ_COST) * span.kv_tokens for span in batch.spans)
        if batch.decode is not None:
            attended += (1 + READ_COST) * int(batch.decode.table.lengths.sum())
        work = self._layer_parameters * (batch.tokens + READ_COST) + 2 * self._head_width * attended
        saved = work * (1 - 1 / self.most)
        return self.most if saved > WAKE_UP_COST else 1

    @contextlib.contextmanager
    def held(self, batch: PackedBatch) -> Iterator[None]:
        """Set the calling thread's number of threads during a pass."""
        threads = self.choose(batch)
        if threads == self.most:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(self.most)
