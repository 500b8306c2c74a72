"""The CUDA graphs of a rank that follows rank 0: forward passes of the same sizes, over inputs that rank 0 sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.engine.graphs.buffers import StepBuffers
from alignedserve.engine.graphs.captured import CapturedPasses
from alignedserve.engine.graphs.device import GraphDevice
from alignedserve.engine.runner import ModelRunner


class GraphFollower:
    """Rank 0 captures and replays the same sizes in the same order, since ranks sum within the graphs."""

    def __init__(self, runner: ModelRunner, device: GraphDevice, sizes: Sequence[int]) -> None:
        with torch.inference_mode(), device.scope():
            self._buffers = StepBuffers.of(runner, device, sizes[-1])
        self._passes = CapturedPasses(runner, self._buffers, device, sizes)
        self._device = device

    def capture(self) -> None:
        """Raises the error that prevents a capture."""
        with torch.inference_mode(), self._device.scope():
            self._passes.capture(lambda done, count: None, chooses=False)

    def replay(self, size: int, inputs: torch.Tensor) -> None:
        """`inputs`: what rank 0 has sent to its own device, int32, in host memory."""
        with torch.inference_mode(), self._device.scope():
            self._buffers.take(inputs)
            self._passes.forward(size)

    def results(self, rows: int) -> torch.Tensor:
        """The first rows of the last replay, fp32: logits, or the hidden states of a stage before the last."""
        return self._buffers.results[:rows]

    def rows_in(self, inputs: torch.Tensor) -> int:
        """How many rows are no padding."""
        return self._buffers.rows_in(inputs)
