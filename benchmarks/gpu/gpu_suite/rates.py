"""Timing on a device, and the two reference rates: of a device copy and of a matrix product."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_cuda: Any = torch.cuda  # most of it has no types


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str, repeat: int, warm_up: int = 3) -> list[float]:
    """Seconds of each of `repeat` calls, by CUDA events on a GPU, by the clock on a CPU."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    if device == "cpu":
        return [_clocked(work) for _ in range(repeat)]
    events = [(_cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for begun, ended in events:
        begun.record()
        work()
        ended.record()
    synchronize(device)
    return [begun.elapsed_time(ended) / 1e3 for begun, ended in events]


def _clocked(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def copy_rate(device: str, repeat: int = 20) -> float:
    """Bytes read plus bytes written a second: the median of device copies much larger than the L2 cache."""
    count = 1 << 18
    if device != "cpu":
        count = min(2 << 30, torch.cuda.mem_get_info()[0] // 8)
    source = torch.empty(count // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(seconds_of(lambda: target.copy_(source), device, repeat))


def matrix_rate(device: str, dtype: torch.dtype = torch.bfloat16, repeat: int = 20) -> float:
    """Floating-point operations a second of a large matrix product on random values."""
    size = 128 if device == "cpu" else 8192
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, dtype=dtype, device=device)
    return 2 * size**3 / statistics.median(seconds_of(lambda: torch.mm(left, right, out=product), device, repeat))


@dataclass(slots=True)
class Rate:
    """A reference rate, measured in the same process right before and right after a measurement."""

    before: float = 0.0
    after: float = 0.0
    values: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return (self.before + self.after) / 2

    def detail(self) -> dict[str, float]:
        return {"before": self.before, "after": self.after, "change": self.after / self.before - 1.0}


@contextlib.contextmanager
def around(measure: Callable[[], float]) -> Iterator[Rate]:
    """Measures the rate on entering and on leaving. Its `mean` is valid after that."""
    rate = Rate(before=measure())
    yield rate
    release()
    rate.after = measure()


def release() -> None:
    """Give unused device memory back to the driver."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
