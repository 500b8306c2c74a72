"""What a stream under chaos asks for: tokens alone, an answer under a grammar, or a call of a tool.

All are greedy. `AsyncClient` sends them, and resumes them when their gateway dies.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema

from alignedserve.client import AsyncClient
from alignedserve.client.aio import AsyncChunkStream
from alignedserve.client.calls import Call
from alignedserve.client.types import Chunk, ClientTimings
from alignedserve.proto import inference_pb2 as pb

MOST_TOKENS = 400  # of an answer under a grammar, each of which ends before
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 40},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["old", "new"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {"type": "array", "items": ITEM, "minItems": 3, "maxItems": 3}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"places": SCHEMA, "how": {"type": "string", "maxLength": 20}},
    "required": ["places", "how"],
    "additionalProperties": False,
}
REGEX = r"([a-z]{3,8}-){20}end"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": ARGUMENTS, "strict": True}}
    for name in ("look", "count")
]


@dataclass(slots=True)
class Heard:
    """What a stream has delivered so far. `calls`: name and arguments of each."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish: str = ""

    def take(self, choice: Any) -> None:
        """`choice`: of a GenerateChunk. Raises AssertionError if it begins a call out of turn or without an id."""
        self.tokens += choice.token_ids
        self.text += choice.text
        self.finish = choice.finish_reason or self.finish
        for part in choice.tool_calls:
            if part.name:
                assert (part.index, bool(part.id)) == (len(self.calls), True), part
                self.calls.append([part.name, ""])
            self.calls[part.index][1] += part.arguments

    def begins(self, other: Heard) -> bool:
        """Whether `other` may be how it goes on."""
        pairs = zip(self.calls, other.calls, strict=False)
        calls = all(mine[0] == their[0] and their[1].startswith(mine[1]) for mine, their in pairs)
        same = other.tokens[: len(self.tokens)] == self.tokens and other.text.startswith(self.text)
        return same and calls and len(self.calls) <= len(other.calls)


class Ask(ABC):
    """One stream's request. `valid` is asked of answers that have ended."""

    @abstractmethod
    def call(self, client: AsyncClient, max_tokens: int) -> Call[Chunk]: ...

    @abstractmethod
    def valid(self, heard: Heard) -> bool: ...

    def stream(self, client: AsyncClient, max_tokens: int, heard: Heard) -> AsyncChunkStream:
        """Reading it fills `heard`."""
        call = self.call(client, max_tokens)

        def parse(message: pb.GenerateChunk, timings: ClientTimings) -> Chunk:
            heard.take(message.choice)
            return call.parse(message, timings)

        return client._follow(replace(call, parse=parse))


@dataclass(frozen=True, slots=True)
class Plain(Ask):
    """Tokens past the end token, without a grammar."""

    prompt: Sequence[int]

    def call(self, client: AsyncClient, max_tokens: int) -> Call[Chunk]:
        options: Any = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return client._planner.stream(None, self.prompt, options)

    def valid(self, heard: Heard) -> bool:
        return not heard.calls


@dataclass(frozen=True, slots=True)
class Json(Ask):
    """JSON that follows SCHEMA."""

    prompt: Sequence[int]

    def call(self, client: AsyncClient, max_tokens: int) -> Call[Chunk]:
        options: Any = {"max_tokens": MOST_TOKENS, "temperature": 0, "response_format": SCHEMA}
        return client._planner.stream(None, self.prompt, options)

    def valid(self, heard: Heard) -> bool:
        return heard.finish == "stop" and not heard.calls and _follows(heard.text, SCHEMA)


@dataclass(frozen=True, slots=True)
class Regex(Ask):
    """Text that matches REGEX."""

    prompt: Sequence[int]

    def call(self, client: AsyncClient, max_tokens: int) -> Call[Chunk]:
        options: Any = {"max_tokens": MOST_TOKENS, "temperature": 0}
        call = client._planner.stream(None, self.prompt, options)
        call.message.grammar.kind, call.message.grammar.text = "regex", REGEX
        return call

    def valid(self, heard: Heard) -> bool:
        return heard.finish == "stop" and re.fullmatch(REGEX, heard.text) is not None


@dataclass(frozen=True, slots=True)
class ToolCall(Ask):
    """A call of one of TOOLS; `named`: of the first."""

    words: str
    named: bool

    def call(self, client: AsyncClient, max_tokens: int) -> Call[Chunk]:
        options: Any = {"max_tokens": MOST_TOKENS, "temperature": 0}
        call = client._planner.chat_stream([], options)
        choice = {"type": "function", "function": {"name": "look"}} if self.named else "required"
        chat = {"messages": [{"role": "user", "content": self.words}], "tools": TOOLS, "tool_choice": choice}
        call.message.chat_json = json.dumps({**chat, "parallel_tool_calls": False})
        return call

    def valid(self, heard: Heard) -> bool:
        if heard.finish not in ("stop", "tool_calls") or heard.text or len(heard.calls) != 1:
            return False
        ((name, arguments),) = heard.calls
        return name in (("look",) if self.named else ("look", "count")) and _follows(arguments, ARGUMENTS)


def mixed(prompts: Sequence[Sequence[int]]) -> list[Ask]:
    """One ask for each prompt; each third one is under a grammar, or for a call."""
    kinds: list[Callable[[Sequence[int]], Ask]] = [Json, _call_of_any, Regex, _call_of_one]
    return [
        kinds[number // 3 % 4](prompt) if number % 3 == 0 else Plain(prompt) for number, prompt in enumerate(prompts)
    ]


def _call_of_any(prompt: Sequence[int]) -> Ask:
    return ToolCall(_words(prompt), named=False)


def _call_of_one(prompt: Sequence[int]) -> Ask:
    return ToolCall(_words(prompt), named=True)


def _words(prompt: Sequence[int]) -> str:
    """About as many tokens, and other ones for another prompt."""
    return " ".join(f"Look at {token}." for token in prompt[: 1 + len(prompt) // 6])


def _follows(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
