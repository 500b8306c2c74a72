"""Parsers of `transformers` (5.13 and later), for tokenizers with a `response_template`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignedserve.errors import ModelError
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.parameters import json_of
from alignedserve.gateway.dialects.pieces import (
    CallArguments,
    CallStart,
    Content,
    MakeId,
    Parser,
    Piece,
    Reasoning,
    joined,
)

_REASONING = ("thinking", "reasoning_content", "reasoning")
_CALLS = ("tool_calls", "tool_call")


def markers_of(template: Mapping[str, Any]) -> tuple[str, ...]:
    """All literal texts by which the template finds its regions."""
    found: list[str] = []
    for entry in template.get("fields", {}).values():
        for key in ("open", "close"):
            value = entry.get(key, [])
            found += [value] if isinstance(value, str) else value
    return tuple(found)


def check_template(template: Mapping[str, Any]) -> None:
    """Raises ModelError if `transformers` cannot use this template."""
    try:
        _parser_of(template, "", ())
    except ImportError as error:
        raise ModelError(f"a response_template needs transformers 5.13 or later: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"the tokenizer's response_template cannot be used: {error}") from error


class TemplateParser(Parser):
    """Reads an answer as the tokenizer's `response_template` says. A call's arguments come at once, at its end.

    `prompt` is the text before the answer. Where the library fails, the text from there on is content.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        prompt: str,
        tools: Sequence[Tool],
        make_id: MakeId,
        most: int | None = None,
    ) -> None:
        self._most = most  # of calls; further ones are text
        self._names = frozenset(tool.name for tool in tools)
        self._make_id = make_id
        self._inner: Any = _parser_of(template, prompt, tools)
        self._region = ""
        self._raw = ""  # of a region with calls
        self._calls = 0
        for event in self._inner.initial_events:
            self._of_event(event)

    def feed(self, text: str) -> list[Piece]:
        if self._inner is None:
            return [Content(text)] if text else []
        # One character at a time: the library's own cuts then do not depend on those of the text.
        found: list[Piece] = []
        for at, character in enumerate(text):
            try:
                events = self._inner.feed(character)
            except Exception:  # a value that is not what the template says; the library raises what its parsers raise
                return joined([*found, *self._failed(text[at:])])
            for event in events:
                found += self._of_event(event)
        return joined(found)

    def end(self) -> list[Piece]:
        if self._inner is None:
            return []
        try:
            _, events = self._inner.finalize()
        except Exception:
            return self._failed("")
        return joined([piece for event in events for piece in self._of_event(event)])

    @property
    def reasoning(self) -> bool:
        return self._region in _REASONING

    def _failed(self, rest: str) -> list[Piece]:
        self._inner = None
        raw, self._raw, self._region = self._raw, "", ""
        return [Content(raw + rest)] if raw + rest else []

    def _of_event(self, event: Mapping[str, Any]) -> list[Piece]:
        field = event["field"]
        if event["type"] == "region_open":
            self._region, self._raw = field, ""
        elif event["type"] == "region_chunk":
            if field in _REASONING:
                return [Reasoning(event["text"])]
            if field in _CALLS:
                self._raw += event["text"]
                return []
            return [Content(event["text"])]
        elif event["type"] == "region_close":
            raw, self._raw, self._region = self._raw, "", ""
            return self._calls_in(event.get("value"), raw) if field in _CALLS else []
        return []

    def _calls_in(self, value: Any, raw: str) -> list[Piece]:
        found: list[Piece] = []
        for entry in value if isinstance(value, list) else [value]:
            function = entry.get("function", entry) if isinstance(entry, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            index = self._calls + len(found) // 2
            full = self._most is not None and index >= self._most
            text = _arguments(function) if isinstance(function, dict) else None
            if full or text is None or not isinstance(name, str) or name not in self._names:
                return [Content(raw)] if raw else []
            found += [CallStart(index, self._make_id(index), name), CallArguments(index, text)]
        self._calls += len(found) // 2
        return found


def _arguments(function: Mapping[str, Any]) -> str | None:
    """A call's arguments as JSON; None if they cannot be written as it."""
    arguments = function.get("arguments", {})
    try:
        return arguments if isinstance(arguments, str) and arguments.encode() else json_of(arguments)
    except (ValueError, TypeError, RecursionError):
        return None


def _parser_of(template: Mapping[str, Any], prompt: str, tools: Sequence[Tool]) -> Any:
    from transformers.utils.chat_parsing import ResponseParser

    spec = dict(template)
    fields = dict(spec.get("fields", {}))
    if all(entry.get("open") or entry.get("open_pattern") for entry in fields.values()):
        fields["leftover"] = {}  # else text outside regions is lost
    spec["fields"] = {name: {**entry, "optional": True} for name, entry in fields.items()}
    functions: list[Any] = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in tools
    ]
    return ResponseParser(spec, prefix=prompt, tools=functions)
