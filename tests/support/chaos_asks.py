"""What a stream under chaos asks for: tokens alone, an answer under a grammar, or a call of a tool.

All are greedy. `AsyncClient` sends them, and resumes them when their gateway dies.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from alignedserve.client import AsyncChunkStream, AsyncClient, Chunk

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

    def take(self, chunk: Chunk) -> None:
        """Raises AssertionError if the chunk begins a call out of turn or without an id."""
        self.tokens += chunk.token_ids
        self.text += chunk.text
        self.finish = chunk.finish_reason or self.finish
        for part in chunk.tool_calls:
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
    """One stream's request."""

    @abstractmethod
    def stream(self, client: AsyncClient, max_tokens: int) -> AsyncChunkStream:
        """`max_tokens`: of an answer that nothing else ends."""

    @abstractmethod
    def valid(self, heard: Heard) -> bool:
        """Whether an answer that has ended well is what was asked for."""


@dataclass(frozen=True, slots=True)
class Plain(Ask):
    """Tokens past the end token, without a grammar."""

    prompt: Sequence[int]

    def stream(self, client: AsyncClient, max_tokens: int) -> AsyncChunkStream:
        return client.stream(prompt_token_ids=self.prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)

    def valid(self, heard: Heard) -> bool:
        return heard.finish == "length" and not heard.calls


@dataclass(frozen=True, slots=True)
class Json(Ask):
    """JSON that follows SCHEMA."""

    prompt: Sequence[int]

    def stream(self, client: AsyncClient, max_tokens: int) -> AsyncChunkStream:
        return client.stream(
            prompt_token_ids=self.prompt, max_tokens=MOST_TOKENS, temperature=0, response_format=SCHEMA
        )

    def valid(self, heard: Heard) -> bool:
        return heard.finish == "stop" and not heard.calls and _follows(heard.text, SCHEMA)


@dataclass(frozen=True, slots=True)
class Regex(Ask):
    """Text that matches REGEX."""

    prompt: Sequence[int]

    def stream(self, client: AsyncClient, max_tokens: int) -> AsyncChunkStream:
        asked = {"regex": REGEX}
        return client.stream(
            prompt_token_ids=self.prompt, max_tokens=MOST_TOKENS, temperature=0, structured_outputs=asked
        )

    def valid(self, heard: Heard) -> bool:
        return heard.finish == "stop" and re.fullmatch(REGEX, heard.text) is not None


@dataclass(frozen=True, slots=True)
class ToolCall(Ask):
    """A call of one of TOOLS; `named`: of the first."""

    words: str
    named: bool

    def stream(self, client: AsyncClient, max_tokens: int) -> AsyncChunkStream:
        return client.chat_stream(
            [{"role": "user", "content": self.words}],
            tools=TOOLS,
            tool_choice="look" if self.named else "required",
            parallel_tool_calls=False,
            max_tokens=MOST_TOKENS,
            temperature=0,
        )

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
