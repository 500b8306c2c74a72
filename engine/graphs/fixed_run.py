"""Decodes one batch of given lengths for a number of iterations, without a cluster, and measures idle GPU time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.engine.decoding import DecodeItem, DecodeStep
from alignedserve.engine.graphs.decode import GraphDecode
from alignedserve.engine.sampling.sampler import SampleRow
from alignedserve.errors import AccountingError
from alignedserve.request import SamplingParams

_UNTIMED = 4  # untimed iterations before the timed ones


@dataclass(frozen=True, slots=True)
class FixedRun:
    """`iteration_s`: wall clock, launched ahead as the decode loop does.

    `replay_s`: the same graphs one after another, without host work between them.
    """

    iterations: int
    iteration_s: float
    replay_s: float

    @property
    def idle_share(self) -> float:
        """Share of an iteration's time in which the device computes nothing of it; copies of inputs count as idle."""
        return max(0.0, 1.0 - self.replay_s / self.iteration_s)


def run_fixed(
    engine: GraphDecode,
    lengths: Sequence[int],
    iterations: int,
    sampling: SamplingParams,
    *,
    block_size: int,
    num_blocks: int,
) -> FixedRun:
    """Decode requests with `lengths` tokens of KV each, with arbitrary content, in a store of `num_blocks` blocks.

    Each grows by a token an iteration. Raises AccountingError if the store has no room for them, NumericsError if the
    store contains NaN.
    """
    steps = _UNTIMED + iterations
    blocks, used = [], 0
    for length in lengths:
        needed = -(-(length + steps) // block_size)
        blocks.append(range(used, used + needed))
        used += needed
    if used > num_blocks:
        raise AccountingError(f"{used} blocks are needed, but the store has {num_blocks}")
    rows = [SampleRow(sampling, [0], [0]) for _ in lengths]
    before: DecodeStep | None = None
    begun = 0.0
    for number in range(steps):
        token = 0 if before is None else None
        step = engine.launch(
            [
                DecodeItem(row, token, index, length + number, held, 1 + number)
                for index, (row, length, held) in enumerate(zip(rows, lengths, blocks, strict=True))
            ]
        )
        if before is not None:
            _require(before)
        if number == _UNTIMED - 1:
            _require(step)
            begun = time.perf_counter()
        before = step
    assert before is not None
    _require(before)
    iteration_s = (time.perf_counter() - begun) / iterations
    return FixedRun(iterations, iteration_s, engine.replay_seconds(len(lengths), not sampling.greedy, iterations))


def _require(step: DecodeStep) -> None:
    """Raise the error of a row without a token."""
    for result in step.tokens():
        if isinstance(result, Exception):
            raise result
