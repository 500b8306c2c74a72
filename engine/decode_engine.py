"""Chooses the decode engine: CUDA graphs on a GPU if the attention can be captured, else one kernel after another."""

from __future__ import annotations

import logging
from collections.abc import Callable

from alignedserve.batch_size import LEAST
from alignedserve.config import Config
from alignedserve.engine.decoding import DecodeEngine
from alignedserve.engine.eager import EagerDecode, StagedDecode
from alignedserve.engine.runner import ForwardItem, ModelRunner
from alignedserve.graph_sizes import graph_sizes

logger = logging.getLogger(__name__)

TUNED_ROWS = 64  # compiled parts are timed for a batch of this many rows


def decode_engine(runner: ModelRunner, config: Config, progress: Callable[[int, int], None]) -> DecodeEngine:
    """The engine for `runner`.

    Nothing is captured before its `warm_up`, which calls `progress(done, all)` for each size.
    """
    device = runner.loaded.device
    graphs = device.type == "cuda" and config.decode.graphs != "off" and runner.captures
    if runner.depth > 1 and not graphs:
        return StagedDecode(runner)
    # Other ranks are told the tokens of a pass, so it begins when the host knows them; a captured one spreads its own.
    eager = EagerDecode(runner, overlaps=False if runner.driven else None)
    if not graphs:
        return eager
    # Imported here: torch for CPUs comes without Triton.
    from alignedserve.engine.graphs.decode import GraphDecode
    from alignedserve.engine.graphs.device import CudaGraphs
    from alignedserve.engine.graphs.staged import StagedGraphDecode

    sizes = graph_sizes(config.decode.graph_sizes, config.decode.max_running or LEAST)
    device_graphs = CudaGraphs(device)
    if runner.depth > 1:
        return StagedGraphDecode(runner, device_graphs, sizes, progress)

    def tune() -> None:
        from alignedserve.engine.model.fused import fuse

        rows = min(TUNED_ROWS, sizes[-1])
        item = ForwardItem([0], runner.block_size - 1, [0])  # in block 0, which no request uses
        kept = fuse(runner.loaded.model, lambda: runner.forward([item] * rows), device_graphs.seconds_of)
        logger.info("compiled for %d rows: %s", rows, ", ".join(kept) or "nothing")

    tunes = config.engine.compile == "auto" and not runner.driven
    return GraphDecode(runner, eager, device_graphs, sizes, progress, tune if tunes else None)
