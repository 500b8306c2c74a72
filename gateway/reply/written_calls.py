"""Tool calls in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.dialects.pieces import CallArguments, CallStart


@dataclass(slots=True)
class WrittenCall:
    """A call, or the new part of one: then `start` may be None, because an earlier part had it."""

    index: int
    start: CallStart | None = None
    arguments: str = ""

    @property
    def whole(self) -> dict[str, Any]:
        assert self.start is not None
        function = {"name": self.start.name, "arguments": self.arguments}
        return {"id": self.start.id, "type": "function", "function": function}

    @property
    def delta(self) -> dict[str, Any]:
        if self.start is not None:
            return {"index": self.index, **self.whole}
        return {"index": self.index, "function": {"arguments": self.arguments}}


def written_calls(pieces: Iterable[CallStart | CallArguments]) -> list[WrittenCall]:
    """The calls that these pieces are about, in their order."""
    found: dict[int, WrittenCall] = {}
    for piece in pieces:
        call = found.setdefault(piece.index, WrittenCall(piece.index))
        if isinstance(piece, CallStart):
            call.start = piece
        else:
            call.arguments += piece.text
    return list(found.values())
