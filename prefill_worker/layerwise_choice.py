"""Chooses the prompt length from which on layer-wise offload pays, from measured times of passes and copies.

Without layer-wise offload, all of a prompt's KV is copied after its last pass. With it, only the rest is copied then.
But the compute thread spends time on each copy that it begins, which is more than short prompts gain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from alignedserve.engine.runner import ForwardItem, ModelRunner
from alignedserve.prefill_worker.layerwise import layers_of_a_copy
from alignedserve.transfer.block_store import BlockStore, HostBlockStore
from alignedserve.transfer.channel import Channel, wait_page_locked

logger = logging.getLogger(__name__)

MIN_GAIN_S = 1e-3
LONGEST_TOKENS = 1 << 20
SCRATCH_BYTES = 256 << 20
"""Size of the host memory (page-locked with a GPU) that `measure` uses temporarily."""
REPEATED = 5
LOCK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """The measured costs. Times are in seconds."""

    token_s: float  # time of a pass for each of its tokens
    bytes_per_s: float  # rate of large copies
    copy_s: float  # fixed time of a copy
    call_s: float  # time of the compute thread to begin a copy

    def gain_s(self, tokens: int, token_bytes: int, layers: int, budget: int) -> float:
        """How many seconds earlier the KV of a prompt is in the pool. `budget` is the number of tokens of a pass."""
        last = (tokens - 1) % budget + 1
        passes = -(-tokens // budget)
        copies = -(-layers // layers_of_a_copy(layers, last * token_bytes // layers))
        computing = last * self.token_s / copies
        copying = last * token_bytes / copies / self.bytes_per_s + self.copy_s
        # Copies run one after another behind the layers. The last copy is left after the pass, and any lag.
        left = copying + (copies - 1) * max(0.0, copying - computing)
        whole = tokens * token_bytes / self.bytes_per_s + self.copy_s
        return whole - left - passes * copies * self.call_s

    def threshold_tokens(self, token_bytes: int, layers: int, budget: int, block_size: int) -> int:
        """The least number of tokens, in whole blocks, that gains `MIN_GAIN_S` or more; 0 if none does."""
        tokens = block_size
        while tokens <= LONGEST_TOKENS:
            if all(self.gain_s(tokens * more, token_bytes, layers, budget) >= MIN_GAIN_S for more in (1, 2)):
                return tokens
            tokens += max(block_size, tokens // 4 // block_size * block_size)
        return 0


def measure(
    runner: ModelRunner, cache: BlockStore, connect: Callable[[BlockStore, BlockStore], Channel], budget: int
) -> OffloadCosts:
    """Measure before anything is served, because blocks of `cache` are overwritten.

    Runs a pass of the largest chunk, and copies to page-locked host memory over a channel like the one to the pool.
    Raises TransferError if that memory cannot be allocated.
    """
    count = max(1, min(cache.capacity_blocks, SCRATCH_BYTES // cache.block_bytes))
    scratch = HostBlockStore.private(f"{cache.store_id}/scratch", cache.geometry, count, node_id=cache.handle().node_id)
    try:
        channel = connect(cache, scratch)
        try:
            wait_page_locked(channel, LOCK_TIMEOUT_S)
            return OffloadCosts(_token_s(runner, budget), *_copy_costs(channel, count))
        finally:
            channel.close()
    finally:
        scratch.close()


def _token_s(runner: ModelRunner, budget: int) -> float:
    tokens = min(budget, runner.loaded.info.max_positions, runner.cache.shape[0] * runner.block_size)
    items = [ForwardItem([0] * tokens, 0, list(range(-(-tokens // runner.block_size))), "last")]
    return _best(lambda: runner.forward(items).cpu()) / tokens


def _copy_costs(channel: Channel, count: int) -> tuple[float, float, float]:
    """The rate of copies in bytes/s, the fixed time of a copy in s, and the time to begin a copy in s."""
    layer = channel.source.slice.layer_begin
    ids = range(count)
    large_s = _best(lambda: channel.copy(ids, ids).wait())
    small_s = _best(lambda: channel.copy([0], [0], layers=(layer, layer + 1)).wait())
    begun = time.perf_counter()
    asked = [channel.copy(ids, ids, layers=(layer, layer + 1)) for _ in range(REPEATED)]
    call_s = (time.perf_counter() - begun) / REPEATED
    for copy in asked:
        copy.wait()
    return count * channel.source.block_bytes / large_s, small_s, call_s


def _best(work: Callable[[], bool | torch.Tensor]) -> float:
    seconds = []
    for _ in range(REPEATED):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
