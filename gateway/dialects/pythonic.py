"""Calls as a Python list, in place of text: `[get_weather(city="Bern", days=2), now()]` (Llama 3.2 and 4, ToolACE)."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.errors import GrammarError
from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.parameters import ArgumentsWriter, escaped, python_as_json
from alignedserve.gateway.dialects.pieces import MakeId, Parser
from alignedserve.gateway.dialects.values import Values, Writing

START, END = "<|python_start|>", "<|python_end|>"
_LONGEST_KEY = 256
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_STRING = r'/"([^"\\\n\x00-\x1f]|\\["\\n])*"/'


def _quoted(text: str) -> str:
    return escaped(text, quotes=True)


_WRITING = Writing(
    words={"true": "True", "false": "False", "null": "None"},
    comma=", ",
    string=lambda lark: _STRING,
    text=_quoted,
    key=lambda name: f"{_quoted(name)}: ",
    any_key=lambda lark: f"{_STRING} {lark.literal(': ')}",
)


class _Parser(CallMachine):
    openers = "[<"
    at_start_only = True

    def call(self) -> Reading[bool]:
        marked = yield from self.literal(START)
        yield from self.spaces()
        if self.calls or not (yield from self.literal("[")):
            return False
        while True:
            yield from self.spaces()
            name = yield from self.name("(")
            if not name or not (yield from self._arguments_begin()):
                return False
            self.begin(name)
            yield from self.char()
            if not (yield from self._arguments()):
                return True
            if self._most is not None and self.calls >= self._most:
                break
            if not (yield from self.attempt(self._comma_and_name())):
                break
        if (yield from self.close("]")) and marked:
            yield from self.close(END)
        return True

    def _comma_and_name(self) -> Reading[None]:
        """Passes a comma if another call follows."""
        yield from self.spaces()
        if not (yield from self.literal(",")):
            return
        yield from self.spaces()
        if (name := (yield from self.name("("))) and (yield from self._arguments_begin()):
            self.commit()
            self.back(name)

    def _arguments_begin(self) -> Reading[bool]:
        """Whether `(` and then `key=` or `)` follow. Passes nothing."""
        read = (yield from self.char()) + (yield from self.spaces())
        key = yield from self._key()
        space = yield from self.spaces()
        character = yield from self.peek()
        self.back(read + key + space)
        return character == ("=" if key else ")")

    def _key(self) -> Reading[str]:
        key = ""
        while (character := (yield from self.char())).isidentifier() or (key and character.isdecimal()):
            key += character
            if len(key) > _LONGEST_KEY:
                return key
        self.back(character)
        return key

    def _arguments(self) -> Reading[bool]:
        """Reads `key=value, …)`. False if something else follows."""
        arguments = ArgumentsWriter(self)
        first = True
        while True:
            yield from self.spaces()
            if (yield from self.literal(")")):
                arguments.close()
                return True
            if not first:
                if not (yield from self.literal(",")):
                    return False
                yield from self.spaces()
                if (yield from self.peek()) == ")":
                    continue
            key = yield from self._key()
            space = yield from self.spaces()
            if not key or arguments.has(key) or not (yield from self.literal("=")):
                self.back(key + space)
                return False
            arguments.key(key)
            raw = yield from self._value()
            ended = bool((yield from self.peek()))
            self.argue(python_as_json(raw) if ended else escaped(raw, quotes=True)[:-1])
            if not ended:
                return False
            first = False

    def _value(self) -> Reading[str]:
        """Reads a literal up to the comma or parenthesis after it, which is not passed."""
        text, quote, open_brackets, skip = "", "", "", False
        while character := (yield from self.char()):
            if quote:
                if skip:
                    skip = False
                elif character == "\\":
                    skip = True
                elif character == quote:
                    quote = ""
            elif character in "\"'":
                quote = character
            elif character in _CLOSING:
                open_brackets += _CLOSING[character]
            elif open_brackets and character == open_brackets[-1]:
                open_brackets = open_brackets[:-1]
            elif character in ",)" and not open_brackets:
                break
            text += character
        self.back(character)
        return text


class Pythonic(ToolDialect):
    name = "pythonic"
    markers = (START, END)
    begins = ("[", START)

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        forms = []
        for tool in tools:

            def before(name: str, tool: Tool = tool) -> str:
                if not name.isidentifier():
                    raise GrammarError(f"tool {tool.name}: the parameter {name[:60]!r} is no name in Python")
                return f"{name}="

            properties = tool.parameters.get("properties", {})
            values = Values(lark, tool, _WRITING).named(properties, tool.parameters, "", key=before)
            forms.append(f"{lark.literal(tool.name + '(')} {values} {lark.literal(')')}")
        call = lark.rule(" | ".join(forms))
        openers = "[" if lark.is_special(START) else "[<"
        return CallRules(call, lark.literal("["), lark.literal(", "), lark.literal("]"), openers=openers)
