"""Where decode passes are captured and replayed: a contract, and CUDA's side of it.

The twins that run the same engine on a CPU are tests' (`support.graph_twins`).
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

_cuda: Any = torch.cuda  # most of it has no types
WARM_UPS = 2
MEASURED_CALLS = 20

Replay = Callable[[], None]


class Mark(ABC):
    """A point in the device's work."""

    @abstractmethod
    def wait(self) -> None:
        """Until the device has come so far; for nothing that was asked for later. Raises what its work failed by."""


class GraphDevice(ABC):
    """Captures work on static buffers. One thread captures, one replays; all of it in the current stream's order."""

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """In which the device is this thread's current one."""

    @abstractmethod
    def prepare(self) -> None:
        """Before the first capture: give back what memory is held for nothing."""

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Replay:
        """What repeats the device's work of `run`, on what its buffers hold by then, with nothing of Python's.

        `run` is called a few times first: what is compiled or allocated once is no part of it.
        """

    @abstractmethod
    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros `[size]` in host memory that the device copies from and to while the host does other things."""

    @abstractmethod
    def mark(self) -> Mark:
        """After all work of the current stream so far."""

    @abstractmethod
    def seconds(self, replay: Replay, count: int) -> float:
        """What the device takes for one of `count` replays, one after another."""

    @abstractmethod
    def seconds_of(self, run: Callable[[], object]) -> float:
        """What the device takes for `run` as a part of a graph."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Of the device, in use by whomever."""


class _EventMark(Mark):
    def __init__(self) -> None:
        self._event = _cuda.Event(blocking=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaGraphs(GraphDevice):
    """CUDA graphs of one device, captured on a stream of their own, all in one memory pool.

    Graphs that share a pool write over each other's intermediate tensors: what is to outlive a replay is copied to a
    buffer from outside of it.
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
            # thread_local: other threads may allocate and page-lock memory meanwhile.
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
        """End a capture that has failed, and what torch 2.11 leaves of it (pytorch/pytorch#180395, mended in 2.12).

        Its allocator believes that the capture goes on, so that `empty_cache` fails, and the device's generator that it
        is part of it, so that nothing can be drawn any more.
        """
        with contextlib.suppress(RuntimeError):  # it says again what has failed
            graph.capture_end()
        index = torch.cuda.current_device()
        library: Any = torch._C
        with contextlib.suppress(RuntimeError):  # the capture's end has done it
            library._cuda_endAllocateToPool(index, pool)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(torch.Generator(self._device).manual_seed(generator.initial_seed()))

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the capturing stream, in order with the current one."""
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

        # A pool of its own: one whose last graph is gone is not to be captured into again.
        return self.seconds(self._captured(several, _cuda.graph_pool_handle()), count=5) / MEASURED_CALLS

    def memory_bytes(self) -> int:
        free, total = _cuda.mem_get_info(self._device)
        return int(total - free)
