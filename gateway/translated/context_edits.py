"""`context_management` of /v1/messages: which edits are followed, and which can never apply here.

Edits that clear thinking are followed. Those that begin at a number of input tokens are accepted where the model cannot
hold as many; else they are refused by name, because messages are never shortened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.failures import UnsupportedFeatureError
from alignedserve.gateway.translated.fields import Fields, unsupported

_CLEAR_THINKING = "clear_thinking_20251015"
_BEGIN = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}  # input tokens, without a trigger
_NEVER = "messages are never shortened"


@dataclass(frozen=True, slots=True)
class ContextEdits:
    """`thinking_turns`: the last ones keep their thinking; None: all do.

    `begins`: the place of each edit that begins at a number of input tokens, and this number.
    """

    thinking_turns: int | None = None
    begins: Sequence[tuple[str, int]] = ()

    def apply(self, messages: Sequence[dict[str, Any]]) -> None:
        """Clears thinking in messages of a chat request. A turn reaches from a user's message to the next one."""
        if self.thinking_turns is None:
            return
        turns, counted = 0, False  # those that have thinking, from the end; whether the current one is among them
        for message in reversed(messages):
            if message["role"] == "user":
                counted = False
            elif "reasoning_content" in message:
                turns, counted = turns + (not counted), True
                if turns > self.thinking_turns:
                    del message["reasoning_content"]

    def check(self, most_tokens: int) -> None:
        """Raises UnsupportedFeatureError for an edit that begins within `most_tokens`, which the model can hold."""
        for place, tokens in self.begins:
            if tokens <= most_tokens:
                raise UnsupportedFeatureError(f"{place} is not supported: {_NEVER}", param=place)


def context_edits(fields: Fields) -> ContextEdits:
    """Raises InvalidRequestError (or one of its kinds), which names the field."""
    management = fields.object("context_management")
    turns: int | None = None
    begins = []
    for edit in [] if management is None else management.objects("edits"):
        kind = edit.text("type")
        if kind == _CLEAR_THINKING:
            turns = _thinking_turns(edit)
        elif kind in _BEGIN:
            begins.append((edit.where, _begin(edit, _BEGIN[kind])))
        else:
            raise unsupported(edit, "type", f"edits of type {kind[:60]!r} are not supported: {_NEVER}")
    return ContextEdits(turns, begins)


def _thinking_turns(edit: Fields) -> int | None:
    if edit.raw("keep") == "all":
        return None
    keep = edit.object("keep")
    if keep is None:
        return 1
    return None if keep.text("type") == "all" else _count(keep)


def _begin(edit: Fields, default: int) -> int:
    """The number of input tokens at which the edit begins; 0 if it begins at something else."""
    trigger = edit.object("trigger")
    if trigger is None:
        return default
    return _count(trigger) if trigger.text("type") == "input_tokens" else 0


def _count(owner: Fields) -> int:
    owner.required("value")
    value = int(owner.get("value", int, "an integer"))
    if value < 1:
        raise InvalidRequestError(f"{owner.place('value')} must be at least 1, got {value}", param=owner.place("value"))
    return value
