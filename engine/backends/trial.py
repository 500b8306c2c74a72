"""Tests an attention backend over a real store: correctness, copies of the store, and time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from alignedserve.engine.backends.base import AttentionBackend, AttentionNeeds, AttentionOptions
from alignedserve.engine.backends.torch_backend import TorchBackend
from alignedserve.engine.batch import ForwardItem, PackedBatch, build_batch

DECODE, PREFILL = "decode", "prefill"
WINDOW, SOFTCAP, SINK = 100, 30.0, 1.5
"""Options of a trial. Their values need not be those of the model."""
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}
"""Largest error of an element against fp32, of values with a standard deviation of a half."""
ROUNDS = 8
FILLED_AT_ONCE = 256  # blocks
# A kernel may use this much for results and partial results, or a third of a layer's KV if that is more
WORKSPACE_BYTES = 64 << 20
SLEEP_CYCLES = 2_000_000  # about a millisecond: the host launches the timed work meanwhile


@dataclass(frozen=True, slots=True)
class TrialShape:
    """The requests of a pass, each as (new tokens, cached tokens)."""

    kind: str
    requests: tuple[tuple[int, int], ...]


RIGHT = TrialShape("right", ((1, 700), (150, 0), (40, 333), (1, 5), (2, 64)))
SHAPES = (
    TrialShape(DECODE, ((1, 1023),) * 64),
    TrialShape(DECODE, ((1, 255),) * 60 + ((1, 4095),) * 4),
    TrialShape(PREFILL, ((2048, 0),)),
    TrialShape(PREFILL, ((512, 3584),)),
)


class Trial:
    """Uses `cache`, a store that is not in use yet. As a context manager, it clears the blocks it wrote on exit."""

    def __init__(self, cache: torch.Tensor, needs: AttentionNeeds) -> None:
        self._cache, self._needs = cache, needs
        self._used: set[int] = set()
        self._generator = torch.Generator(cache.device).manual_seed(0)
        sinks = torch.full((needs.heads,), SINK, dtype=cache.dtype, device=cache.device) if needs.sinks else None
        self.options = AttentionOptions(
            scaling=needs.head_dim**-0.5,
            sliding_window=WINDOW if needs.sliding_window else None,
            softcap=SOFTCAP if needs.softcap else None,
            sinks=sinks,
        )

    @torch.inference_mode()
    def fault(self, backend: type[AttentionBackend]) -> str | None:
        """What is wrong with the backend on a batch of decode rows and chunks, or one that shares blocks; else None."""
        made = backend(self._cache)
        shares, made.least_saved_bytes = made.least_saved_bytes < math.inf, math.inf
        fault = self._fault(made, self._items(RIGHT), self.options)
        if fault is None and shares:
            made.least_saved_bytes = 0.0
            fault = self._fault(made, self._sharing(self._items(RIGHT)), replace(self.options, sliding_window=None))
            return fault and f"over blocks that requests share {fault}"
        return fault

    def _fault(self, made: AttentionBackend, items: list[ForwardItem], options: AttentionOptions) -> str | None:
        batch = self._batch(items)
        query, key, value = self._rows(batch.tokens)
        expected = self._expected(items, query, key, value, options)
        device = self._cache.device
        made.begin(batch)
        made.attend(0, query, key, value, options)  # compiles, and creates what is kept between passes
        on_gpu = device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        found = made.attend(0, query, key, value, options)
        extra = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
        layer_bytes = self._cache.nbytes // self._cache.shape[1]
        error = float((found.float() - expected).abs().nan_to_num(float("inf")).max())
        if not error <= TOLERANCE[self._needs.dtype]:
            return f"its result has an error of {error:.2g} ({self._needs.dtype})"
        if extra > max(WORKSPACE_BYTES, layer_bytes // 3):
            return f"it uses {extra >> 20} MiB beside the store for {batch.tokens} tokens: it copies the store"
        return None

    def _sharing(self, items: list[ForwardItem]) -> list[ForwardItem]:
        """The items, with those that have full cached blocks beginning like the first."""
        first, size = items[0], self._needs.block_size
        for item in items[1:]:
            shared = min(item.start, first.start) // size
            item.block_ids[:shared] = first.block_ids[:shared]
        return items

    @torch.inference_mode()
    def microseconds(self, backend: type[AttentionBackend], shape: TrialShape) -> float:
        """Time of one layer's `attend` on the device, averaged over consecutive calls; GPUs only."""
        batch = self._batch(self._items(shape))
        rows = self._rows(batch.tokens)
        made = backend(self._cache)
        made.begin(batch)
        for _ in range(2):
            made.attend(0, *rows, self.options)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device_of(self._cache):
            torch.cuda._sleep(SLEEP_CYCLES)
            begun.record()
            for _ in range(ROUNDS):
                made.attend(0, *rows, self.options)
            ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) * 1000.0 / ROUNDS

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._used:
            self._cache[sorted(self._used), 0] = 0

    def _items(self, shape: TrialShape) -> list[ForwardItem]:
        """Items of `shape`, shortened to the store's size, in shuffled blocks filled with noise."""
        size, blocks = self._needs.block_size, self._cache.shape[0]
        requests = shape.requests[: max(1, blocks // 2)]
        room = (blocks - len(requests)) * size  # the last block of each request may be nearly empty
        part = min(1.0, room / sum(new + start for new, start in requests))
        free = list(range(blocks))
        random.Random(0).shuffle(free)
        items = []
        for whole_new, whole_start in requests:
            new, start = max(1, int(whole_new * part)), int(whole_start * part)
            items.append(ForwardItem([0] * new, start, [free.pop() for _ in range(-(-(new + start) // size))]))
        fresh = [block for item in items for block in item.block_ids if block not in self._used]
        for at in range(0, len(fresh), FILLED_AT_ONCE):
            ids = fresh[at : at + FILLED_AT_ONCE]
            self._cache[ids, 0] = self._noise(len(ids), *self._cache.shape[2:]) / 2
        self._used.update(fresh)
        return items

    def _batch(self, items: list[ForwardItem]) -> PackedBatch:
        return build_batch(items, self._needs.block_size, self._cache.shape[0], self._cache.device)

    def _rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of the new tokens."""
        needs = self._needs
        key, value = (self._noise(tokens, needs.kv_heads, needs.head_dim) / 2 for _ in range(2))
        return self._noise(tokens, needs.heads, needs.head_dim), key, value

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=self._cache.dtype, device=self._cache.device)

    def _expected(
        self,
        items: list[ForwardItem],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """The result of the reference backend in fp32, over a copy of the blocks in use."""
        copied = self._cache[[block for item in items for block in item.block_ids], :1].float()
        at, moved = 0, []
        for item in items:
            moved.append(replace(item, block_ids=list(range(at, at + len(item.block_ids)))))
            at += len(item.block_ids)
        exact = TorchBackend(copied)
        exact.begin(build_batch(moved, self._needs.block_size, at, copied.device))
        return exact.attend(0, query.float(), key.float(), value.float(), options)
