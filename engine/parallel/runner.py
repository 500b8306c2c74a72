"""Passes that all ranks of an instance compute together. Rank 0 drives: it decides, and the others follow.

Ranks on CPUs share one store, in which each reads and writes its own KV heads of its layers, so nothing else of the
cluster sees that there are several. Rank 0 has all logits in the end, when every rank has written its KV.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from alignedserve.engine.attention import Place
from alignedserve.engine.batch import ForwardItem, PackedBatch, build_batch
from alignedserve.engine.model.loader import LoadedModel
from alignedserve.engine.parallel.cuts import Ranks
from alignedserve.engine.parallel.group import Groups
from alignedserve.engine.parallel.steps import from_words, to_words
from alignedserve.engine.runner import ModelRunner
from alignedserve.errors import RankLostError
from alignedserve.ranks.degrees import RankPlace

_END = 0  # the length of the message after which the other ranks end


class DrivenRunner(ModelRunner):
    """What passes of several ranks have in common. `loaded`: a rank's part of the model. `cache`: the store of all."""

    def __init__(
        self, loaded: LoadedModel, cache: torch.Tensor, place: RankPlace, groups: Groups, backend: str
    ) -> None:
        ranks = Ranks(loaded.info, place.part, place.degrees.tensor)
        parts = loaded.info.kv_heads // ranks.kv_heads
        super().__init__(loaded, cache, backend, Place(parts, ranks.kv_begin // ranks.kv_heads))
        self._at, self._groups = place, groups
        self._lost: RankLostError | None = None

    @property
    def depth(self) -> int:
        return self._at.degrees.stages

    @property
    def waited_s(self) -> float:
        return self._groups.waited_s

    def _batch(self, items: Sequence[ForwardItem]) -> PackedBatch:
        return build_batch(items, self.block_size, self.cache.shape[0], self.loaded.device)

    @torch.inference_mode()
    def follow(self) -> None:
        """Compute what rank 0 computes until it ends. For the other ranks."""
        length = torch.zeros(1, dtype=torch.int64)
        waits = self._groups.waits
        while int(waits.told(length)) != _END:
            words = waits.told(torch.zeros(int(length), dtype=torch.int64))
            self.follow_pass(from_words(words.numpy()))
        waits.meet()

    def follow_pass(self, items: Sequence[ForwardItem]) -> None:
        """This rank's part of a pass. For the other ranks."""
        self.forward_batch(self._batch(items))

    def end(self) -> None:
        """Let the other ranks end. For rank 0."""
        self._groups.waits.tell(torch.tensor([_END]))
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
        words = torch.from_numpy(to_words(items))
        self._groups.waits.tell(torch.tensor([len(words)]))
        self._groups.waits.tell(words)

    def _require_all(self) -> None:
        """Raises the error of a pass after which the group is of no use."""
        if self._lost is not None:
            raise self._lost


class RankRunner(DrivenRunner):
    """One rank's passes, where ranks share layers or are stages."""

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
            assert self._groups.pipe is not None
            rows = batch.logit_rows.numel()
            answer = torch.empty((max(1, rows), self.loaded.info.vocab_size))
            wait = self._groups.pipe.receiving(answer, self._at.degrees.ranks - self._at.degrees.tensor)

        def logits() -> torch.Tensor:
            self._require_all()
            with self._noting_a_loss():
                found = wait()[:rows]
            for layer in range(self.loaded.info.layers if on_layer is not None else 0):
                on_layer(layer)  # type: ignore[misc]
            return found

        return logits

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
