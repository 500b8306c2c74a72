"""CUDA graphs without a GPU. A replay repeats torch's recorded operations, or calls Python again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignedserve.engine.graphs.device import GraphDevice, Mark, Replay

aten = torch.ops.aten
# Operations for which the host waits for a GPU, and methods for them, which do not use these operations on a CPU.
WAITS = {aten.nonzero, aten.masked_select, aten.unique_consecutive, aten._unique2, aten.unique_dim, aten.bincount}
ASKS = {"item", "tolist", "numpy", "cpu", "__contains__", "__bool__", "__int__", "__float__", "__index__"}


class WaitsError(RuntimeError):
    """A captured pass asked for the contents of a tensor."""


class _NoQuestions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ASKS:
            raise WaitsError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            tensor.dtype == torch.bool for tensor in _tensors(args[1])
        )
        if masked or func.overloadpacket in WAITS:
            raise WaitsError(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def repeat(self) -> None:
        """Repeat every operation with its recorded input tensors, and write to its recorded output tensors."""
        for func, args, kwargs, result in self.calls:
            given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.untyped_storage().data_ptr() not in given:  # others were written in place, or are views
                    old.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn]


@contextlib.contextmanager
def _recording() -> Iterator[_Recorder]:
    """Make torch report that a graph is being captured: transformers then omits reads of tensor contents."""
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        _NoQuestions(),
        _Recorder() as recorder,
    ):
        yield recorder


class _DoneMark(Mark):
    def wait(self) -> None:
        pass


class TwinDevice(GraphDevice):
    """`records`: replays repeat torch's operations with the recorded arguments, as on a GPU, and reads of a tensor's
    contents fail. Otherwise replays call Python again, because Triton's interpreter cannot be recorded.
    """

    def __init__(self, *, records: bool = True) -> None:
        self._records = records
        self.captured = 0

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def prepare(self) -> None:
        pass

    def capture(self, run: Callable[[], None]) -> Replay:
        self.captured += 1
        run()
        if not self._records:
            return run
        with _recording() as recorder:
            run()
        return recorder.repeat

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def mark(self) -> Mark:
        return _DoneMark()

    def seconds(self, replay: Replay, count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            replay()
        return (time.perf_counter() - begun) / count

    def seconds_of(self, run: Callable[[], object]) -> float:
        return self.seconds(lambda: (run(), None)[1], 3)

    def memory_bytes(self) -> int:
        return 1000 * self.captured
