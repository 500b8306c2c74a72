"""Decode iterations over the stages of a pipeline, of which each replays its part of a pass from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from alignedserve.engine.decoding import DecodeItem, DecodeStep
from alignedserve.engine.eager import StagedDecode
from alignedserve.engine.graphs.buffers import StepBuffers
from alignedserve.engine.graphs.captured import CapturedPasses, Progress
from alignedserve.engine.graphs.decode import GraphCounts
from alignedserve.engine.graphs.device import GraphDevice
from alignedserve.engine.runner import ModelRunner
from alignedserve.metrics import Page


class StagedGraphDecode(StagedDecode):
    """Hidden states and logits travel between the graphs, and the Sampler chooses tokens from the logits.

    Larger batches, and models that cannot be captured, are computed without graphs.
    """

    def __init__(self, runner: ModelRunner, device: GraphDevice, sizes: Sequence[int], progress: Progress) -> None:
        """As for `GraphDecode`."""
        super().__init__(runner)
        with torch.inference_mode(), device.scope():
            self._buffers = StepBuffers.of(runner, device, sizes[-1])
        self._passes = CapturedPasses(runner, self._buffers, device, sizes)
        self._device, self._progress = device, progress
        self._turn = 0
        self.counts = GraphCounts()
        self.sizes: tuple[int, ...] = ()
        """Batch sizes that are captured."""

    def warm_up(self) -> None:
        with torch.inference_mode(), self._device.scope():
            super().warm_up()
            if self._passes.capture_if_possible(self._progress, chooses=False):
                self.sizes = self._passes.sizes

    @property
    def graph_memory_bytes(self) -> int:
        """As of `GraphDecode`."""
        return self._buffers.nbytes + self._passes.memory_bytes

    def show_metrics(self, page: Page) -> None:
        super().show_metrics(page)
        self.counts.show(page, self.sizes, self.graph_memory_bytes)

    def launch(self, items: Sequence[DecodeItem]) -> DecodeStep:
        if not self.sizes:
            return super().launch(items)
        if len(items) > self.sizes[-1]:
            self.counts.eager += 1
            return super().launch(items)
        return self._begun(items, lambda: self._begin(items))

    def _begin(self, items: Sequence[DecodeItem]) -> Callable[[], torch.Tensor]:
        buffers, rows = self._buffers, len(items)
        size = self._passes.size_for(rows)
        self._turn = (self._turn + 1) % len(buffers.staging)
        with torch.inference_mode(), self._device.scope():
            try:
                sent = buffers.send(items, self._runner.block_size, buffers.staging[self._turn])
                replay, results = (lambda: self._passes.forward(size)), buffers.results[:size]
                logits = self._runner.begin_replay(rows, sent, replay, results)
            except Exception:
                buffers.forget()
                raise
        self.counts.replays += 1
        self.counts.padded_rows += size - rows
        return logits
