"""An answer as blocks, from the deltas of a chat completion: reasoning, text and tool calls, in the order written."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

TEXT_FIRST = "text_first"  # of a choice: so many characters of its text come before its last call


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
    """One block is open at a time; a delta of another kind, or of another call, closes it."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish: str | None = None  # chat's finish_reason
        self._open: Block | None = None
        self._call: int | None = None  # index of the open call in chat's tool_calls
        self._unplaced: list[dict[str, Any]] = []  # log-probabilities of tokens that have no text yet

    def take(self, choice: dict[str, Any]) -> list[Step]:
        """The steps of one choice of a chunk."""
        delta, steps = choice["delta"], list[Step]()
        self._unplaced += (choice.get("logprobs") or {}).get("content") or ()
        calls = list(delta.get("tool_calls") or ())
        if calls and calls[0]["index"] == self._call:  # the rest of the open call comes before other text
            self._add_call(steps, calls.pop(0))
        if reasoning := delta.get("reasoning_content"):
            self._add(steps, Kind.REASONING, reasoning)
        text, first = delta.get("content") or "", choice.get(TEXT_FIRST)
        if text[:first]:
            self._add(steps, Kind.TEXT, text[:first])
        for call in calls:
            self._add_call(steps, call)
        if first is not None and text[first:]:
            self._add(steps, Kind.TEXT, text[first:])
        if choice["finish_reason"] is not None:
            self.finish = choice["finish_reason"]
            self._end(steps)
        return steps

    def _add(self, steps: list[Step], kind: Kind, piece: str) -> None:
        if self._open is None or self._open.kind is not kind:
            self._begin(steps, kind)
        block = self._open
        assert block is not None
        block.text += piece
        added, self._unplaced = tuple(self._unplaced), []
        block.logprobs += added
        steps.append(Step(Op.ADD, block, piece, added))

    def _add_call(self, steps: list[Step], call: dict[str, Any]) -> None:
        about = call.get("function", {})
        if call["index"] != self._call:
            self._begin(steps, Kind.CALL, call.get("id", ""), about.get("name", ""))
            self._call = call["index"]
        if arguments := about.get("arguments"):
            self._add(steps, Kind.CALL, arguments)

    def _begin(self, steps: list[Step], kind: Kind, call_id: str = "", name: str = "") -> None:
        self._end(steps)
        self._open = Block(kind, len(self.all), call_id=call_id, name=name)
        self.all.append(self._open)
        steps.append(Step(Op.OPEN, self._open))

    def _end(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(Step(Op.CLOSE, self._open))
        self._open = self._call = None
