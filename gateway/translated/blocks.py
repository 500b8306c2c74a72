"""An answer as blocks, from its pieces: reasoning, text and tool calls, in the order written.

The blocks do not depend on how the pieces were divided among the answer's parts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from alignedserve.gateway.dialects.pieces import CallArguments, CallStart, Piece, Reasoning


class Kind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """`text`: what was written so far; of a call, the JSON of its arguments. `index`: its place in the answer."""

    kind: Kind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Op(enum.Enum):
    OPEN = enum.auto()
    ADD = enum.auto()
    CLOSE = enum.auto()


@dataclass(frozen=True, slots=True)
class Step:
    """`piece` and `logprobs`: what ADD adds to the block."""

    op: Op
    block: Block
    piece: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()


class Blocks:
    """One block is open at a time; a piece of another kind, or of another call, closes it."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish: str | None = None  # chat's finish_reason
        self._open: Block | None = None
        self._unplaced: list[dict[str, Any]] = []  # log-probabilities of tokens that have no text yet

    def take(self, pieces: Iterable[Piece | dict[str, Any]], finish: str | None) -> list[Step]:
        """The steps of one part of the answer. A dict is a token's log-probability; it goes to the next piece's block.

        Pieces that add to one block in a row are one step.
        """
        steps: list[Step] = []
        for piece in pieces:
            if isinstance(piece, dict):
                self._unplaced.append(piece)
            elif isinstance(piece, CallStart):
                self._begin(steps, Kind.CALL, piece.id, piece.name)
            elif isinstance(piece, CallArguments):
                self._add(steps, Kind.CALL, piece.text)
            else:
                self._add(steps, Kind.REASONING if isinstance(piece, Reasoning) else Kind.TEXT, piece.text)
        if finish is not None:
            self.finish = finish
            self._end(steps)
        return steps

    def _add(self, steps: list[Step], kind: Kind, piece: str) -> None:
        if not piece:
            return
        if self._open is None or self._open.kind is not kind:
            self._begin(steps, kind)
        block = self._open
        assert block is not None
        block.text += piece
        added, self._unplaced = tuple(self._unplaced), []
        block.logprobs += added
        last = steps[-1] if steps else None
        if last is not None and last.op is Op.ADD:  # of the open block: a step of another one is followed by a CLOSE
            steps[-1] = Step(Op.ADD, block, last.piece + piece, last.logprobs + added)
        else:
            steps.append(Step(Op.ADD, block, piece, added))

    def _begin(self, steps: list[Step], kind: Kind, call_id: str = "", name: str = "") -> None:
        self._end(steps)
        self._open = Block(kind, len(self.all), call_id=call_id, name=name)
        self.all.append(self._open)
        steps.append(Step(Op.OPEN, self._open))

    def _end(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(Step(Op.CLOSE, self._open))
        self._open = None
