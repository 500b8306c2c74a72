"""Passes that all ranks of an instance compute together. Rank 0 drives: it decides, and the others follow.

Ranks share one store, in which each reads and writes its own KV heads of its layers, or each has a store of its own for
them. Nothing else of the cluster sees that there are several. Rank 0 has all logits in the end, when every rank has
written its KV.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from alignedserve.engine.attention import Place
from alignedserve.engine.batch import DecodeTable, ForwardItem, PackedBatch, build_batch
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.parallel.backends import agreed
from alignedserve.engine.parallel.cuts import Ranks
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.steps import from_words, to_words
from alignedserve.engine.runner import ModelRunner
from alignedserve.errors import RankLostError, UnsupportedModelError
from alignedserve.geometry import StoreSlice
from alignedserve.ranks.degrees import RankPlace

if TYPE_CHECKING:
    from alignedserve.engine.graphs.device import GraphDevice
    from alignedserve.engine.graphs.follower import GraphFollower
    from alignedserve.engine.parallel.stages import Pipe

logger = logging.getLogger(__name__)

# What rank 0 tells the others: one of these with values, or the size of a captured pass, with its inputs.
_END, _ITEMS, _CAPTURE = 0, -1, -2


class DrivenRunner(ModelRunner):
    """What passes of several ranks have in common. `loaded`: a rank's part of the model.

    `cache`: the store of all, or one of the rank's own (`held_by`).
    """

    def __init__(
        self, loaded: LoadedModel, cache: torch.Tensor, place: RankPlace, groups: Groups, backend: str
    ) -> None:
        super().__init__(loaded, cache, backend, _place_in(cache, loaded, place), partial(agreed, groups.waits))
        self._at, self._groups = place, groups
        self._lost: RankLostError | None = None
        self.lost_elsewhere: Callable[[], RankLostError | None] = lambda: None
        """For rank 0: why ranks on other nodes are of no use any more, if so. Asked before each pass."""

    @property
    def depth(self) -> int:
        return self._at.degrees.stages

    @property
    def driven(self) -> bool:
        return True

    @property
    def waited_s(self) -> float:
        return self._groups.waited_s

    def _batch(self, items: Sequence[ForwardItem]) -> PackedBatch:
        return build_batch(items, self.block_size, self.cache.shape[0], self.loaded.device)

    @torch.inference_mode()
    def follow(self, note: Callable[[float], None] = lambda waited_s: None) -> None:
        """Compute what rank 0 computes until it ends. For the other ranks. `note` is called after each pass."""
        graphs: GraphFollower | None = None
        while (told := self._groups.waits.told())[0] != _END:
            kind, message = told[0], told[1].view(torch.int32 if told[0] > 0 else torch.int64)
            if kind == _ITEMS:
                self.follow_pass(from_words(message.numpy()))
            elif kind == _CAPTURE:
                graphs = self._captured(message.tolist())
            elif graphs is None:
                raise RankLostError(f"rank {self._at.rank} has captured no passes, and rank 0 replays one")
            else:
                self.follow_replay(kind, message, graphs)
            note(self.waited_s)
        self._groups.waits.meet()

    def _captured(self, sizes: list[int]) -> GraphFollower | None:
        """Passes captured with rank 0; None if they cannot be, in any rank."""
        try:
            with self.captured_everywhere():  # before the first pass, in which others would wait
                graphs = self._new_follower(sizes)
            with self.captured_everywhere():
                graphs.capture()
        except RankLostError:
            raise
        except Exception as error:  # rank 0 says so, too
            logger.warning("rank %d captures no pass: %s", self._at.rank, error)
            return None
        return graphs

    def _new_follower(self, sizes: list[int]) -> GraphFollower:
        from alignedserve.engine.graphs.follower import GraphFollower  # torch for CPUs comes without Triton

        return GraphFollower(self, self.new_graph_device(), sizes)

    def follow_replay(self, size: int, sent: torch.Tensor, graphs: GraphFollower) -> None:
        """This rank's part of a captured pass."""
        graphs.replay(size, sent)

    def new_graph_device(self) -> GraphDevice:
        from alignedserve.engine.graphs.device import CudaGraphs

        return CudaGraphs(self.loaded.device)

    def follow_pass(self, items: Sequence[ForwardItem]) -> None:
        """This rank's part of a pass. For the other ranks."""
        self.forward_batch(self._batch(items))

    def end(self) -> None:
        """Let the other ranks end. For rank 0."""
        self._groups.waits.tell(_END, torch.empty(0))
        self._groups.waits.meet()

    def device_fault(self) -> Exception | None:
        return self._lost or super().device_fault()

    @contextlib.contextmanager
    def _noting_a_loss(self) -> Iterator[None]:
        """After any error within a pass the ranks do not agree where they are: the group is of no use then."""
        try:
            yield
        except Exception as error:
            self._lost = self._lost or (error if isinstance(error, RankLostError) else _disagreeing(error))
            raise

    def _tell(self, items: Sequence[ForwardItem]) -> None:
        self._groups.waits.tell(_ITEMS, torch.from_numpy(to_words(items)))

    def _require_all(self) -> None:
        """Raises the error of a pass after which the group is of no use, or of a copy that may still write to it."""
        if self._lost is None:
            self._lost = self.lost_elsewhere()
        if self._lost is not None:
            raise self._lost


def held_by(loaded: LoadedModel, place: RankPlace) -> StoreSlice:
    """The layers and KV heads of the rank at `place`. `loaded`: its part of the model."""
    ranks = Ranks(loaded.info, place.part, place.degrees.tensor)
    return StoreSlice(loaded.layers.start, loaded.layers.stop, ranks.kv_begin, ranks.kv_begin + ranks.kv_heads)


def _place_in(cache: torch.Tensor, loaded: LoadedModel, place: RankPlace) -> Place:
    info, held = loaded.info, held_by(loaded, place)
    if (cache.shape[1], cache.shape[2]) != (info.layers, info.kv_heads):
        return Place(held=held)
    heads = held.head_end - held.head_begin
    return Place(info.kv_heads // heads, held.head_begin // heads)


class RankRunner(DrivenRunner):
    """One rank's passes, where ranks share layers or are stages."""

    @property
    def captures(self) -> bool:
        """Not where ranks sum in host memory."""
        return super().captures and self._groups.sums.in_graphs

    @property
    def row_width(self) -> int:
        return self.loaded.info.vocab_size if self._pipe is None or self._at.is_last_stage else self._pipe.width

    @property
    def _pipe(self) -> Pipe | None:
        return self.loaded.pipe

    def forward_batch(self, batch: PackedBatch, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """The logits; in a stage before the last, something else."""

        def after_all_ranks(layer: int) -> None:
            """All ranks have written the layer before: this one attends after the sum that ended it."""
            if layer:
                on_layer(layer - 1)  # type: ignore[misc]

        with self._noting_a_loss():
            logits = super().forward_batch(batch, None if on_layer is None else after_all_ranks)
            if self.depth > 1 and self._at.is_last_stage and self._at.part == 0:
                self._answer(logits)
        if on_layer is not None:
            on_layer(self.loaded.info.layers - 1)
        return logits

    @torch.inference_mode()
    def forward(self, items: Sequence[ForwardItem], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """For rank 0."""
        if not items:
            return super().forward(items)
        if self.depth > 1:
            return self.begin(items, on_layer)()
        self._require_all()
        batch = self._batch(items)
        with self._noting_a_loss():
            self._tell(items)
        return self.forward_batch(batch, on_layer)

    @torch.inference_mode()
    def begin(
        self, items: Sequence[ForwardItem], on_layer: Callable[[int], None] | None = None
    ) -> Callable[[], torch.Tensor]:
        """With several stages: returns when the first has computed its part. `on_layer` is called at the end."""
        if self.depth == 1:
            return super().begin(items, on_layer)
        self._require_all()
        batch = self._batch(items)
        with self._noting_a_loss():
            self._tell(items)
            self.forward_batch(batch)
            rows = batch.logit_rows.numel()
            wait = self._answered(rows)

        def logits() -> torch.Tensor:
            self._require_all()
            with self._noting_a_loss():
                found = wait()[:rows].to(self.loaded.device)
            for layer in range(self.loaded.info.layers if on_layer is not None else 0):
                on_layer(layer)  # type: ignore[misc]
            return found

        return logits

    @torch.inference_mode()
    def forward_table(self, input_ids: torch.Tensor, position_ids: torch.Tensor, table: DecodeTable) -> torch.Tensor:
        """For each rank. The tokens are those of rank 0. A stage before the last returns its hidden states."""
        if self._pipe is None:
            return super().forward_table(self._groups.sums.spread(input_ids), position_ids, table)
        with self._pipe.captured():  # the host knows the tokens, and has told them to all
            return super().forward_table(input_ids, position_ids, table)

    def _new_follower(self, sizes: list[int]) -> GraphFollower:
        if self._pipe is not None and self._at.stage:
            self._pipe.hold(sizes[-1])
        return super()._new_follower(sizes)

    def follow_replay(self, size: int, sent: torch.Tensor, graphs: GraphFollower) -> None:
        if self._pipe is None:
            super().follow_replay(size, sent, graphs)
            return
        last = self._at.is_last_stage
        self._pipe.replay(size, lambda: graphs.replay(size, sent), None if last else graphs.results(size))
        if last and self._at.part == 0:
            self._answer(graphs.results(graphs.rows_in(sent)).clone())  # the next pass writes there

    @torch.inference_mode()
    def begin_replay(
        self, rows: int, sent: torch.Tensor, replay: Callable[[], None], results: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        if self._pipe is None:
            return super().begin_replay(rows, sent, replay, results)
        size = len(results)
        with self.replaying(size, sent):
            self._pipe.replay(size, replay, results)
            wait = self._answered(rows)

        def logits() -> torch.Tensor:
            self._require_all()
            with self._noting_a_loss():
                return wait()[:rows].to(self.loaded.device)

        return logits

    def tell_capture(self, sizes: Sequence[int]) -> None:
        with self._noting_a_loss():
            self._groups.waits.tell(_CAPTURE, torch.tensor(sizes))

    @contextlib.contextmanager
    def captured_everywhere(self) -> Iterator[None]:
        failed: Exception | None = None
        try:
            yield
        except RankLostError:
            raise
        except Exception as error:  # foreign model code: mostly in all ranks
            failed = error
        count = int(self._groups.waits.sum(torch.tensor([float(failed is not None)])))
        if failed is not None:
            raise failed
        if count:
            raise UnsupportedModelError(f"{count} of {self._groups.waits.size} ranks could not be captured")

    @contextlib.contextmanager
    def replaying(self, size: int, sent: torch.Tensor) -> Iterator[None]:
        self._require_all()
        with self._noting_a_loss():
            self._groups.waits.tell(size, sent.clone())
            yield

    def _answered(self, rows: int) -> Callable[[], torch.Tensor]:
        """Begin to receive the logits of so many rows from the last stage. What is returned waits for them."""
        assert self._groups.pipe is not None
        answer = torch.empty((max(1, rows), self.loaded.info.vocab_size))
        return self._groups.pipe.receiving(answer, self._at.degrees.ranks - self._at.degrees.tensor)

    def _answer(self, logits: torch.Tensor) -> None:
        """Give rank 0 the logits. A pass without any ends with a sign, too: then all KV is written."""
        assert self._groups.pipe is not None
        self._groups.pipe.send(logits.contiguous() if logits.shape[0] else logits.new_zeros((1, logits.shape[1])), 0)

    def _logits(self, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        own = super()._logits(*inputs, **kwargs)
        if not self._at.is_last_stage:
            return own
        return self._groups.sums.concatenated(own)[..., : self.loaded.info.vocab_size]


def _disagreeing(error: Exception) -> RankLostError:
    return RankLostError(f"a pass failed in one rank, and not in the others: {error}")
