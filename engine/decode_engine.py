"""Which engine decodes: graphs on a GPU whose attention can be captured, else one kernel after another."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.config import Config
from alignedserve.engine.decoding import DecodeEngine
from alignedserve.engine.eager import EagerDecode
from alignedserve.engine.runner import ModelRunner
from alignedserve.graph_sizes import graph_sizes


def decode_engine(runner: ModelRunner, config: Config, progress: Callable[[int, int], None]) -> DecodeEngine:
    """For `runner`; nothing is captured before its `warm_up`, which calls `progress(done, all)`, sizes of batches."""
    eager, device = EagerDecode(runner), runner.loaded.device
    if device.type != "cuda" or config.decode.graphs == "off" or not runner.captures:
        return eager
    # Not above: torch for a CPU comes without Triton.
    from alignedserve.engine.graphs.decode import GraphDecode
    from alignedserve.engine.graphs.device import CudaGraphs

    sizes = graph_sizes(config.decode.graph_sizes, config.decode.max_running)
    return GraphDecode(runner, eager, CudaGraphs(device), sizes, progress)
