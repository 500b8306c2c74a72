"""Gemma: `<|tool_call>call:NAME{key:value,…}<tool_call|>` (4), and FunctionGemma's `<start_function_call>…`.

Keys are bare, strings stand between quote tokens, and lists and objects nest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from alignedserve.errors import GrammarError
from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.parameters import as_json, check_key, escaped
from alignedserve.gateway.dialects.pieces import MakeId, Parser
from alignedserve.gateway.dialects.values import Values, Writing

_HEAD = "call:"
_MOST_DEPTH = 32
_LONGEST_WORD = 4096


class _Parser(CallMachine):
    openers = "<"

    def __init__(
        self, marks: tuple[str, str, str], tools: Sequence[Tool], make_id: MakeId, most: int | None = None
    ) -> None:
        self._open, self._close, self._quote = marks
        super().__init__(tools, make_id, most)

    def call(self) -> Reading[bool]:
        if not (yield from self.literal(self._open)):
            return False
        yield from self.spaces()
        if not (yield from self.literal(_HEAD)):
            return False
        name = yield from self.name("{")
        if not name or not (yield from self._arguments_begin()):
            return False
        self.begin(name)
        if (yield from self._value(0)):
            yield from self.close(self._close)
        return True

    def _arguments_begin(self) -> Reading[bool]:
        """Whether `{` and then `key:` or `}` follow. Passes nothing."""
        read = (yield from self.char()) + (yield from self.spaces())
        if (yield from self.peek()) == "}":
            self.back(read)
            return True
        passed, key = yield from self._read_key()
        self.back(read + passed)
        return bool(key)

    def _value(self, depth: int) -> Reading[bool]:
        """Reads a value and writes it as JSON. False if it is none from here on."""
        yield from self.spaces()
        character = yield from self.peek()
        if character in ("{", "[") and character and depth < _MOST_DEPTH:
            return (yield from self._nested(character, depth))
        if character == '"':
            return (yield from self._quoted('"'))
        if (yield from self.literal(self._quote)):
            self.back(self._quote)
            return (yield from self._quoted(self._quote))
        word = ""
        while (character := (yield from self.char())) and character not in ",}]\n" and len(word) < _LONGEST_WORD:
            word += character
        self.back(character)
        if word.strip():
            self.argue(as_json(word))
            return True
        self.back(word)
        return False

    def _nested(self, opening: str, depth: int) -> Reading[bool]:
        closing = "}" if opening == "{" else "]"
        yield from self.char()
        self.argue(opening)
        first = True
        while True:
            yield from self.spaces()
            if (yield from self.literal(closing)):
                self.argue(closing)
                return True
            if not first:
                if not (yield from self.literal(",")):
                    return False
                self.argue(", ")
            if opening == "{" and not (yield from self._key()):
                return False
            if not (yield from self._value(depth + 1)):
                return False
            first = False

    def _key(self) -> Reading[bool]:
        yield from self.spaces()
        passed, key = yield from self._read_key()
        if not key:
            self.back(passed)
            return False
        self.argue(f"{escaped(key, quotes=True)}: ")
        return True

    def _read_key(self) -> Reading[tuple[str, str]]:
        """Passes `key:`. Returns the text that was passed, and the key: "" if this is none."""
        quote = yield from self.one_of((self._quote, '"'))
        key = ""
        while (character := (yield from self.char())) and character not in ':"<{}\n' and len(key) < _LONGEST_WORD:
            key += character
        self.back(character)
        passed = quote + key
        if not key.strip() or (quote and not (yield from self.literal(quote))):
            return passed, ""
        passed += quote
        if not (yield from self.literal(":")):
            return passed, ""
        return passed + ":", key.strip()

    def _quoted(self, quote: str) -> Reading[bool]:
        yield from self.literal(quote)
        self.argue('"')
        end = yield from self.until([quote], lambda text: self.argue(escaped(text)))
        self.argue('"' if end else "")
        return bool(end)


class Gemma4(ToolDialect):
    name = "gemma4"
    marks: ClassVar[tuple[str, str, str]] = ("<|tool_call>", "<tool_call|>", '<|"|>')
    markers = marks
    begins = marks[:1]

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(self.marks, tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        opening, closing, quote = self.marks
        forms = []
        for tool in tools:
            writing = _writing(tool, quote)
            properties = tool.parameters.get("properties", {})
            values = Values(lark, tool, writing).named(properties, tool.parameters, "")
            head, tail = lark.literal(f"{_HEAD}{tool.name}{{"), lark.literal("}" + closing)
            forms.append(f"{head} {values} {tail}")
        return CallRules(lark.rule(" | ".join(forms)), between=lark.literal(opening), trigger=opening)


class FunctionGemma(Gemma4):
    name = "functiongemma"
    marks = ("<start_function_call>", "<end_function_call>", "<escape>")
    markers = marks
    begins = marks[:1]


def _writing(tool: Tool, quote: str) -> Writing:
    def text(value: str) -> str:
        if quote in value:
            raise GrammarError(f"tool {tool.name}: a string with {quote} has no form in this model's format of calls")
        return f"{quote}{value}{quote}"

    def key(name: str) -> str:
        check_key(tool, name)
        return f"{name}:"

    return Writing(
        words={"true": "true", "false": "false", "null": "null"},
        comma=",",
        string=lambda lark: f"({lark.literal(quote)} {lark.text_until(quote)})",
        text=text,
        key=key,
        any_key=lambda lark: f"/[A-Za-z_][A-Za-z0-9_]{{0,31}}/ {lark.literal(':')}",
    )
