"""From which length on layer-wise offload pays, by what passes and copies take here.

Without it, all of a prompt's KV is copied once its last pass is over. With it, only what its last pass left of it; but
each copy that is begun costs the compute thread a moment, which short prompts do not win back.
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
"""Host memory, page-locked on a GPU, that `measure` has for a moment."""
REPEATED = 5
LOCK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """What was measured. Times in seconds."""

    token_s: float  # of a pass, for each of its tokens
    bytes_per_s: float  # of large copies
    copy_s: float  # of a copy beyond its bytes
    call_s: float  # that asking for a copy keeps the compute thread

    def gain_s(self, tokens: int, token_bytes: int, layers: int, budget: int) -> float:
        """How much earlier a prompt of `tokens` tokens lies in the pool, computed in passes of `budget` tokens."""
        last = (tokens - 1) % budget + 1
        passes = -(-tokens // budget)
        copies = -(-layers // layers_of_a_copy(layers, last * token_bytes // layers))
        computing = last * self.token_s / copies
        copying = last * token_bytes / copies / self.bytes_per_s + self.copy_s
        # The copies run one after the other behind the layers: the last alone is left, or all that they lag behind.
        left = copying + (copies - 1) * max(0.0, copying - computing)
        whole = tokens * token_bytes / self.bytes_per_s + self.copy_s
        return whole - left - passes * copies * self.call_s

    def threshold_tokens(self, token_bytes: int, layers: int, budget: int, block_size: int) -> int:
        """From how many tokens on at least `MIN_GAIN_S` are gained, in whole blocks; 0: never."""
        tokens = block_size
        while tokens <= LONGEST_TOKENS:
            if all(self.gain_s(tokens * more, token_bytes, layers, budget) >= MIN_GAIN_S for more in (1, 2)):
                return tokens
            tokens += max(block_size, tokens // 4 // block_size * block_size)
        return 0


def measure(
    runner: ModelRunner, cache: BlockStore, connect: Callable[[BlockStore, BlockStore], Channel], budget: int
) -> OffloadCosts:
    """Before anything is served: blocks of `cache` are overwritten.

    A pass of as many tokens as a chunk may have, and copies to page-locked host memory over a channel like that to the
    pool. Raises TransferError where that memory cannot be had.
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
    """Bytes a second, seconds of a copy beyond its bytes, and seconds of asking for one."""
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
