"""The CUDA graphs of one model and store: for each batch size a forward pass, and two ways to choose tokens."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch

from alignedserve.engine.graphs.buffers import Column, StepBuffers
from alignedserve.engine.graphs.device import GraphDevice, Replay
from alignedserve.engine.graphs.drawing import draw
from alignedserve.engine.runner import ModelRunner
from alignedserve.errors import RankLostError
from alignedserve.graph_sizes import size_for

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class CapturedPasses:
    """Forward passes are one graph for each size. Choosing is one of two small graphs: greedy batches draw nothing."""

    def __init__(self, runner: ModelRunner, buffers: StepBuffers, device: GraphDevice, sizes: Sequence[int]) -> None:
        """`sizes`: ascending."""
        self.sizes = tuple(sizes)
        self.memory_bytes = 0
        self._runner, self._buffers, self._device = runner, buffers, device
        self._forward: dict[int, Replay] = {}
        self._choose: dict[tuple[int, bool], Replay] = {}

    def capture(self, progress: Progress, *, chooses: bool = True) -> None:
        """Capture all sizes, the largest first: the others' intermediate tensors then fit into its memory.

        `progress(done, all)` is called after each size. `chooses` False: only forward passes. Overwrites block 0.
        Raises the error that prevents a capture; graphs captured before it are discarded. To be called within
        `ModelRunner.captured_everywhere`.
        """
        device = self._device
        device.prepare()
        before = device.memory_bytes()
        self._buffers.fill_for_capture()
        try:
            for done, size in enumerate(reversed(self.sizes), start=1):
                self._forward[size] = device.capture(lambda size=size: self._run_forward(size))  # type: ignore[misc]
                progress(done, len(self.sizes))
            for size in reversed(self.sizes) if chooses else ():
                for drawn in (False, True):
                    self._choose[size, drawn] = device.capture(
                        lambda size=size, drawn=drawn: self._run_choose(size, drawn)  # type: ignore[misc]
                    )
        except BaseException:
            self.discard()
            raise
        finally:
            self._buffers.forget()
        self.memory_bytes = max(0, device.memory_bytes() - before)

    def capture_if_possible(self, progress: Progress, *, chooses: bool = True) -> bool:
        """As `capture`, in all ranks. False, with a warning, if this or another rank's model cannot be captured."""
        self._runner.tell_capture(self.sizes)
        try:
            with self._runner.captured_everywhere():  # the others have the memory for it
                pass
            with self._runner.captured_everywhere():
                self.capture(progress, chooses=chooses)
        except RankLostError:
            raise
        except Exception as error:  # foreign model code: anything in it may prevent a capture
            self.discard()
            logger.warning(
                "%s decodes without CUDA graphs, which is slower: a pass of %d rows could not be captured (%s: %s)",
                self._runner.loaded.info.name,
                self.sizes[-1],
                type(error).__name__,
                " ".join(str(error).split())[:300],
            )
            return False
        return True

    def discard(self) -> None:
        """Free the graphs."""
        self._forward.clear()
        self._choose.clear()
        self.memory_bytes = 0

    def size_for(self, rows: int) -> int:
        """How many rows a pass of `rows` computes, including padding."""
        size = size_for(self.sizes, rows)
        assert size is not None, "a batch of more rows than were captured"
        return size

    def replay(self, rows: int, drawn: bool, sent: torch.Tensor | None = None) -> int:
        """Compute the buffers' contents of `rows` rows; returns how many rows were computed, including padding.

        `sent`: what the buffers were filled with, for other ranks.
        """
        size = self.size_for(rows)
        with contextlib.nullcontext() if sent is None else self._runner.replaying(size, sent):
            self.forward(size)
        self._choose[size, drawn]()
        return size

    def forward(self, size: int) -> None:
        """Compute the results of the buffers' first `size` rows."""
        self._forward[size]()

    def _run_forward(self, size: int) -> None:
        buffers = self._buffers
        previous = buffers.column(Column.PREVIOUS, size)
        chosen_before = buffers.chosen.index_select(0, previous.clamp(min=0).to(torch.int64))
        token_ids = torch.where(previous >= 0, chosen_before, buffers.column(Column.TOKEN, size).to(torch.int64))
        table = buffers.table(size)
        positions = (table.lengths - 1).clamp(min=0).to(torch.int64)
        logits = self._runner.forward_table(token_ids.unsqueeze(0), positions.unsqueeze(0), table)
        buffers.results[:size].copy_(logits)

    def _run_choose(self, size: int, drawn: bool) -> None:
        """Choose tokens, and report -1 to the host for rows with logits that are not finite (a NaN is the maximum)."""
        buffers = self._buffers
        logits, chosen = buffers.results[:size], buffers.chosen[:size]
        top, best = logits.max(dim=-1)
        chosen.copy_(best)
        if drawn:
            draw(logits, top, buffers.draw_columns(size), chosen)
        buffers.reported[:size].copy_(torch.where(torch.isfinite(top), chosen, -1))
