"""Runs packed forward passes of one model over one paged store."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from alignedserve.engine import attention
from alignedserve.engine.attention import ActiveForward, Place
from alignedserve.engine.backends.choice import Agree, open_backend
from alignedserve.engine.batch import DecodeTable, ForwardItem, PackedBatch, build_batch
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.threads import PassThreads
from alignedserve.errors import GeometryMismatchError, ResourceError, UnsupportedModelError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.metrics import Page
from alignedserve.ranks.now import BARRIERS
from alignedserve.transfer.handles import slice_block_bytes

__all__ = ["ForwardItem", "ModelRunner", "allocate_cache"]


def allocate_cache(
    geometry: KvGeometry,
    num_blocks: int,
    device: str | torch.device,
    buffer: memoryview | None = None,
    part: StoreSlice | None = None,
) -> torch.Tensor:
    """A block store `[num_blocks, layers, kv_heads, 2, block_size, head_dim]`, contiguous, on `device`.

    `part`: with these layers and heads only.

    If `buffer` is given (writable shared memory, on CPU), the tensor uses it and keeps it alive; nothing is copied or
    cleared. Raises ResourceError if there is no room.
    """
    held = part or StoreSlice.whole(geometry)
    shape = (num_blocks, *held.shape, *geometry.block_shape[2:])
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    needed = num_blocks * slice_block_bytes(geometry, held)
    if buffer is not None:
        if torch.device(device).type != "cpu":
            raise ResourceError(f"a store in shared memory must be on the CPU, not on {device}")
        if buffer.nbytes < needed:
            raise ResourceError(f"{num_blocks} blocks need {needed} bytes; the buffer has {buffer.nbytes}")
        return torch.frombuffer(buffer, dtype=dtype, count=needed // dtype.itemsize).view(shape)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ResourceError(f"no room for {num_blocks} blocks ({needed} bytes) on {device}") from error


class ModelRunner:
    """One model, one store, one attention backend. Not thread-safe: one thread calls `forward`.

    `backend` is the value of `engine.attention`. On a GPU it is tested, and for `auto` timed, in the store, whose
    content is lost. `place`: the part of the store's heads that this process computes. `agree`: has ranks choose the
    same backend. Raises ConfigError and UnsupportedModelError if it cannot serve the model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: torch.Tensor,
        backend: str = "torch",
        place: Place | None = None,
        agree: Agree | None = None,
    ) -> None:
        info = loaded.info
        if cache.dim() != 6 or not cache.is_contiguous():
            raise GeometryMismatchError(
                f"a block store is a contiguous tensor of 6 dimensions, not {tuple(cache.shape)}"
            )
        self._place = place or Place()
        layers, heads = (info.layers, info.kv_heads) if self._place.held is None else self._place.held.shape
        if (cache.shape[1], cache.shape[2], cache.shape[3], cache.shape[5]) != (layers, heads, 2, info.head_dim):
            raise GeometryMismatchError(
                f"the store {tuple(cache.shape)} does not fit {info.name}: {layers} layers, {heads} KV heads of "
                f"{info.head_dim}"
            )
        if cache.dtype != getattr(torch, info.dtype):
            raise GeometryMismatchError(f"the store is {cache.dtype}, but {info.name} is served in {info.dtype}")
        self.loaded = loaded
        self.cache = cache
        self.block_size = cache.shape[4]
        with self._scope():
            self._backend = open_backend(backend, self._place.view(cache), loaded.needs, agree)
        parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
        on_cpu = loaded.device.type == "cpu"
        self._threads = PassThreads(parameters, len(loaded.layers), info.kv_heads * info.head_dim) if on_cpu else None

    @torch.inference_mode()
    def forward(self, items: Sequence[ForwardItem], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Compute `items` in one packed pass, writing their keys and values to the store.

        Returns fp32 logits `[rows, vocab_size]` on the model's device, rows in item order (an item with logits `all`
        gives one row for each new token, `none` gives none). Items of one call must not write the same block.
        `on_layer` is called with the number of each layer once the device has the work that writes its keys and values.
        """
        if not items:
            return torch.empty(0, self.loaded.info.vocab_size, device=self.loaded.device)
        batch = build_batch(items, self.block_size, self.cache.shape[0], self.loaded.device)
        return self.forward_batch(batch, on_layer)

    @property
    def depth(self) -> int:
        """How many passes are computed at the same time, each by another stage."""
        return 1

    @property
    def driven(self) -> bool:
        """Whether other ranks compute each pass, too, and are told its tokens before."""
        return False

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank waited for others."""
        return 0.0

    @property
    def barrier_idle_s(self) -> Mapping[str, float]:
        """Of ranks that share experts: seconds in which all together waited for the last one's attention, or results of
        experts, as of the layer before the last one computed. NaN where not known."""
        return dict.fromkeys(BARRIERS, 0.0)

    def show_metrics(self, page: Page) -> None:
        meaning = "of ranks that share experts: seconds in which all together waited for the last one of each layer"
        for barrier, idle_s in self.barrier_idle_s.items():
            if not math.isnan(idle_s):
                page.counter("rank_barrier_idle_seconds_total", meaning, idle_s, waits_for=barrier)

    def begin(
        self, items: Sequence[ForwardItem], on_layer: Callable[[int], None] | None = None
    ) -> Callable[[], torch.Tensor]:
        """Begin `forward`. What is returned waits for its logits, and is to be called in the order of passes."""
        logits = self.forward(items, on_layer)
        return lambda: logits

    @torch.inference_mode()
    def forward_batch(self, batch: PackedBatch, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """`forward` for a batch that is already built."""
        loaded = self.loaded
        kwargs = {"logits_to_keep": batch.logit_rows} if loaded.keeps_logits else {}
        threads = contextlib.nullcontext() if self._threads is None else self._threads.held(batch)
        with self._scope():
            self._backend.begin(batch)
            with threads:
                logits = self._logits(batch.input_ids, batch.position_ids, on_layer, **kwargs)
        if not loaded.keeps_logits:
            logits = logits[batch.logit_rows]
        return logits.float()

    @property
    def captures(self) -> bool:
        """Whether the backend allows the capture of `forward_table` in a CUDA graph."""
        return self._backend.captures

    @torch.inference_mode()
    def forward_table(self, input_ids: torch.Tensor, position_ids: torch.Tensor, table: DecodeTable) -> torch.Tensor:
        """A pass of one new token a row, whose inputs (both int64 `[1, rows]`) keep their addresses, for a graph.

        Returns logits in the model's dtype, `[rows, vocab_size]`.
        """
        with self._scope():
            self._backend.begin_table(table)
            return self._logits(input_ids, position_ids)

    @property
    def row_width(self) -> int:
        """The values of a row that `forward_table` returns."""
        return self.loaded.info.vocab_size

    def tell_capture(self, sizes: Sequence[int]) -> None:
        """`forward_table` is about to be captured for batches of these sizes, the last one first."""

    @contextlib.contextmanager
    def captured_everywhere(self) -> Iterator[None]:
        """Around the capture: it fails where it has failed in another rank."""
        yield

    @contextlib.contextmanager
    def replaying(self, size: int, sent: torch.Tensor) -> Iterator[None]:
        """Around a replay. `sent`: its inputs (`StepBuffers.send`), which may change later."""
        yield

    def begin_replay(
        self, rows: int, sent: torch.Tensor, replay: Callable[[], None], results: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """`begin` of a captured pass of so many rows, for several stages: what is returned waits for their logits.

        `replay` computes the first stage, and leaves its hidden states in `results` `[rows and padding, row_width]`.
        `sent`: as in `replaying`.
        """
        raise UnsupportedModelError(f"{self.loaded.info.name} is computed in one stage")

    def _logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
        **kwargs: torch.Tensor,
    ) -> torch.Tensor:
        loaded = self.loaded
        with attention.active(ActiveForward(self._backend, on_layer=on_layer, place=self._place)) as forward:
            output = loaded.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **kwargs)
        if len(forward.layers) != len(loaded.layers):
            raise UnsupportedModelError(
                f"{loaded.info.name} called attention {len(forward.layers)} times for {len(loaded.layers)} layers"
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def device_fault(self) -> Exception | None:
        """The error that permanently keeps this process from using its GPU; None if the next pass may succeed.

        To be called after a pass has failed; it waits for the device. For example, an invalid address ends the
        process's whole context, and every later call fails with the same error.
        """
        device = self.loaded.device
        if device.type != "cuda":
            return None
        try:
            torch.cuda.current_stream(device).synchronize()
        except Exception as error:
            return error
        return None

    def _scope(self) -> contextlib.AbstractContextManager[object]:
        """Make the model's device this thread's current one; a new thread starts with the first visible device."""
        device = self.loaded.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def threads(self, items: Sequence[ForwardItem]) -> int:
        """The number of CPU threads that compute the pass of `items`; 0 on a GPU."""
        if self._threads is None:
            return 0
        return self._threads.choose(build_batch(items, self.block_size, self.cache.shape[0], self.loaded.device))

    def warm_up(self) -> None:
        """Run a forward pass of a prefill chunk and one of a decode row. It overwrites block 0."""
        tokens = min(4, self.block_size)
        self.forward([ForwardItem([0] * tokens, 0, [0])])
        self.forward([ForwardItem([0], tokens - 1, [0])])
