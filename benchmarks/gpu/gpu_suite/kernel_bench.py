"""Times the decode attention kernel alone, over a store of several layers that exceeds the GPU's caches."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from alignedserve.engine.backends.base import AttentionOptions
from alignedserve.engine.backends.triton_decode import PagedDecode
from alignedserve.engine.backends.triton_tuning import DecodeSetting
from alignedserve.engine.batch import DecodeTable
from gpu_suite.offline import fill
from gpu_suite.rates import seconds_of

BLOCK_SIZE = 16


@dataclass(slots=True)
class KernelBench:
    """A store of random KV in scattered blocks for at most `most_tokens` tokens."""

    device: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    most_tokens: int
    seed: int
    cache: torch.Tensor = field(init=False)
    query: torch.Tensor = field(init=False)
    _order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.most_tokens // BLOCK_SIZE
        shape = (blocks, self.layers, self.kv_heads, 2, BLOCK_SIZE, self.head_dim)
        dtype = torch.bfloat16 if self.device != "cpu" else torch.float16  # the interpreter is slow in bf16
        self.cache = torch.empty(shape, dtype=dtype, device=self.device)
        fill(self.cache, self.seed)
        self._order = list(range(blocks))
        random.Random(self.seed).shuffle(self._order)

    def table(self, lengths: Sequence[int]) -> DecodeTable:
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        used = 0
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor(self._order[used : used + count], dtype=torch.int32)
            used += count
        rows = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        return DecodeTable(rows, table.to(self.device))

    def bytes_read(self, lengths: Sequence[int]) -> int:
        """Bytes of the keys and values of one layer."""
        return sum(lengths) * self.kv_heads * 2 * self.head_dim * self.cache.element_size()

    def seconds(
        self, lengths: Sequence[int], repeat: int, *, split: bool = True, setting: DecodeSetting | None = None
    ) -> list[float]:
        """Seconds of one layer: each value is the mean over a pass through all layers. A GPU replays a CUDA graph."""
        decode = PagedDecode(self.cache, split=split, setting=setting)
        query = torch.randn(len(lengths), self.heads, self.head_dim, device=self.device).to(self.cache.dtype)
        out = torch.empty_like(query)
        table = self.table(lengths)
        options = AttentionOptions(self.head_dim**-0.5)

        def layers() -> None:
            decode.begin(table)
            for layer in range(self.layers):
                decode.attend(layer, query, options, out)

        if self.device == "cpu":
            return [taken / self.layers for taken in seconds_of(layers, self.device, repeat, warm_up=0)]
        layers()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        taken = [seconds / self.layers for seconds in seconds_of(graph.replay, self.device, repeat, warm_up=5)]
        if not bool(out.isfinite().all()):
            raise ValueError("the kernel's output is not finite")
        return taken

    def rate(self, lengths: Sequence[int], seconds: Sequence[float]) -> float:
        """Bytes a second."""
        return self.bytes_read(lengths) / statistics.median(seconds)
