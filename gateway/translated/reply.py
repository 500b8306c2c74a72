"""What the replies of translated APIs have in common: blocks from an answer's parts, and events made of blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.body.requests import GenerationRequest
from alignedserve.gateway.ledger.calls import Answer, Call, Delta
from alignedserve.gateway.reply.answers import AnswerView, Part, ScoredToken
from alignedserve.gateway.reply.openai_replies import ChatReply
from alignedserve.gateway.reply.replies import event
from alignedserve.gateway.translated.blocks import Blocks, Step


class TranslatedReply(ChatReply):
    """Whole replies are made of the same blocks as streamed ones. There is one answer."""

    def __init__(
        self, call: Call, model: ServedModel, end: Callable[[Answer], None], request: GenerationRequest
    ) -> None:
        super().__init__(call, model, end, request)
        self.blocks = Blocks()
        self.sent = 0  # events that are numbered
        self._opened = False

    # ---- implemented by each API

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """The first events."""

    @abstractmethod
    def step(self, step: Step) -> list[dict[str, Any]]:
        """The events of a step."""

    @abstractmethod
    def closing(self) -> list[dict[str, Any]]:
        """The last events of an answer that has ended."""

    @abstractmethod
    def failing(self, error: AlignedServeError) -> list[dict[str, Any]]:
        """The last events of an answer that fails."""

    # ---- in chunks

    def frames(self, deltas: Iterable[Delta]) -> list[bytes]:
        events = [] if self._opened else self.opening()
        self._opened = True
        for step in self._steps(deltas):
            events += self.step(step)
        return [named(one) for one in events]

    def ending(self) -> bytes:
        return b"".join(map(named, self.closing()))

    def broken(self, error: AlignedServeError) -> bytes:
        opening = [] if self._opened else self.opening()  # clients know no answer that only fails
        self._opened = True
        return b"".join(map(named, [*opening, *self.failing(error)]))

    # ---- as a whole

    def collect(self, deltas: Iterable[Delta]) -> None:
        self._steps(deltas)

    def opening_chunk(self, view: AnswerView) -> None:
        """None: a block opens with its first piece."""

    def choice_chunk(self, view: AnswerView, part: Part) -> dict[str, Any]:
        """The pieces in the order written, which a delta of chat has not, with log-probabilities where they belong."""
        pieces = [self.logprob(piece) if isinstance(piece, ScoredToken) else piece for piece in part.pieces]
        return {"index": view.answer.index, "pieces": pieces, "finish_reason": self.finish_reason(view, part)}

    def _steps(self, deltas: Iterable[Delta]) -> list[Step]:
        return [
            step
            for chunk in self.chunks(deltas)
            for choice in chunk["choices"]
            for step in self.blocks.take(choice["pieces"], choice["finish_reason"])
        ]


def named(one: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its type."""
    kind: str = one["type"]
    return b"event: " + kind.encode() + b"\n" + event(one)
