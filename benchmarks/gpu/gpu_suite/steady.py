"""A batch that decodes without end, each iteration launched while the previous one runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from alignedserve.engine.decoding import DecodeEngine, DecodeItem, DecodeStep
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.runner import allocate_cache
from alignedserve.engine.sampling.sampler import SampleRow
from gpu_suite.offline import GREEDY, decode_engine, fill, new_runner

BLOCK_SIZE = 16


@dataclass(slots=True)
class Steady:
    """Requests with random KV, initially `lengths[i]` tokens long."""

    engine: DecodeEngine
    lengths: list[int]
    blocks: list[list[int]]
    attention: str
    """The class name of the attention backend."""
    rows: list[SampleRow] = field(init=False)
    tokens: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [[1] for _ in self.lengths]
        self.rows = [SampleRow(GREEDY, [1], tokens) for tokens in self.tokens]

    def run(self, iterations: int, within: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[float]:
        """Seconds between the tokens of consecutive iterations. `within` is entered around each launch."""
        stamps: list[float] = []
        with within():
            flight = self._launch(ahead=False)
        for number in range(iterations):
            follows = number + 1 < iterations
            after: DecodeStep | None = None
            if follows and self.engine.overlaps and self.engine.ahead(self.rows):
                with within():
                    after = self._launch(ahead=True)
            for tokens, token in zip(self.tokens, flight.tokens(), strict=True):
                if isinstance(token, Exception):
                    raise token
                tokens.append(token.token_id)
            stamps.append(time.perf_counter())
            if follows:
                if after is None:
                    with within():
                        after = self._launch(ahead=False)
                flight = after
        return [later - sooner for sooner, later in itertools.pairwise(stamps)]

    def _launch(self, *, ahead: bool) -> DecodeStep:
        items = [
            DecodeItem(row, None if ahead else tokens[-1], index, length, blocks, len(tokens) + ahead)
            for index, (row, tokens, length, blocks) in enumerate(
                zip(self.rows, self.tokens, self.lengths, self.blocks, strict=True)
            )
        ]
        self.lengths = [length + 1 for length in self.lengths]
        return self.engine.launch(items)


def make_steady(loaded: LoadedModel, lengths: Sequence[int], room: int, seed: int, backend: str = "auto") -> Steady:
    """A batch of `lengths` on `loaded`, in scattered blocks, with room for `room` more tokens each.

    `backend`: the attention backend's name, or auto.
    """
    counts = [-(-(length + room) // BLOCK_SIZE) for length in lengths]
    cache = allocate_cache(loaded.info.geometry(BLOCK_SIZE), sum(counts) + 1, loaded.device)
    order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    runner = new_runner(loaded, cache, backend)
    attention = type(runner._backend).__name__
    engine = decode_engine(runner, len(lengths))
    fill(cache, seed)
    return Steady(engine, list(lengths), blocks, attention)
