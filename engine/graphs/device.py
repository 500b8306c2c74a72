"""Capture and replay of decode passes: the contract, and its CUDA implementation.

CPU substitutes for tests are in `support.graph_twins`.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

_cuda: Any = torch.cuda  # most of it is untyped
WARM_UPS = 2
MEASURED_CALLS = 20

Replay = Callable[[], None]


class Mark(ABC):
    """A point in the device's work."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the device has reached this point, but for no later work. Raises the error of failed work."""


class GraphDevice(ABC):
    """Captures work on static buffers. One thread captures, one replays. Replays run in the current stream's order."""

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the device is this thread's current one."""

    @abstractmethod
    def prepare(self) -> None:
        """Before the first capture: release unused memory."""

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Replay:
        """Capture the device's work of `run`. The result repeats it on the buffers' current contents, without Python.

        `run` is called a few times first, so that one-time compilation and allocation are not captured.
        """

    @abstractmethod
    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros `[size]` in host memory for asynchronous copies from and to the device."""

    @abstractmethod
    def mark(self) -> Mark:
        """A mark after all work of the current stream so far."""

    @abstractmethod
    def seconds(self, replay: Replay, count: int) -> float:
        """Device time of one of `count` consecutive replays."""

    @abstractmethod
    def seconds_of(self, run: Callable[[], object]) -> float:
        """Device time of `run` as a part of a graph."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory of the device in use by all processes."""


class _EventMark(Mark):
    def __init__(self) -> None:
        self._event = _cuda.Event(blocking=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaGraphs(GraphDevice):
    """CUDA graphs of one device, captured on their own stream, all in one memory pool.

    Graphs that share a pool overwrite each other's intermediate tensors: data that must outlive a replay is copied to a
    buffer outside of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with self.scope():
            self._stream = _cuda.Stream(device)
            self._pool = _cuda.graph_pool_handle()

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = _cuda.device(self._device)
        return scope

    def prepare(self) -> None:
        gc.collect()
        _cuda.empty_cache()

    def capture(self, run: Callable[[], None]) -> Replay:
        return self._captured(run, self._pool)

    def _captured(self, run: Callable[[], None], pool: Any) -> Replay:
        graph = _cuda.CUDAGraph()
        with self._beside():
            for _ in range(WARM_UPS):
                run()
            self._stream.synchronize()
            # thread_local: allows other threads to allocate and page-lock memory during the capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                self._give_up(graph, pool)
                raise
            graph.capture_end()
        replay: Replay = graph.replay
        return replay

    def _give_up(self, graph: Any, pool: Any) -> None:
        """End a failed capture, and clean up after torch 2.11 (pytorch/pytorch#180395, fixed in 2.12).

        There, the allocator still assumes a running capture, so that `empty_cache` fails. The device's generator also
        assumes it is part of it, so that nothing can be drawn any more.
        """
        with contextlib.suppress(RuntimeError):  # raises the same error again
            graph.capture_end()
        index = torch.cuda.current_device()
        library: Any = torch._C
        with contextlib.suppress(RuntimeError):  # the end of the capture has already done it
            library._cuda_endAllocateToPool(index, pool)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(torch.Generator(self._device).manual_seed(generator.initial_seed()))

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the capturing stream, in order with the current one."""
        current = _cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with _cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        return _EventMark()

    def seconds(self, replay: Replay, count: int) -> float:
        with self.scope():
            begun, over = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
            replay()
            begun.record()
            for _ in range(count):
                replay()
            over.record()
            over.synchronize()
            return float(begun.elapsed_time(over)) / 1000.0 / count

    def seconds_of(self, run: Callable[[], object]) -> float:
        def several() -> None:
            for _ in range(MEASURED_CALLS):
                run()

        # A separate pool: a pool whose last graph is gone must not be captured into again.
        return self.seconds(self._captured(several, _cuda.graph_pool_handle()), count=5) / MEASURED_CALLS

    def memory_bytes(self) -> int:
        free, total = _cuda.mem_get_info(self._device)
        return int(total - free)
