"""GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

Until 4.6, a line break follows the name, each key and each value; from 4.7 on there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.parameters import ArgumentsWriter, lines, parameter_rules, read_value
from alignedserve.gateway.dialects.pieces import MakeId, Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_LONGEST_KEY = 256


class _Parser(CallMachine):
    openers = "<"

    def call(self) -> Reading[bool]:
        if not (yield from self.literal(OPEN)):
            return False
        yield from self.spaces()
        name = yield from self.name("\n <")
        if not name:
            return False
        yield from self.spaces()
        follows = yield from self.one_of((KEY, CLOSE))
        if not follows:
            return False
        self.back(follows)
        self.begin(name)
        arguments, tool = ArgumentsWriter(self), self.tools[name]
        while key := (yield from self._key(arguments)):
            arguments.key(key)
            if not (yield from read_value(self, tool, key, VALUE_END)):
                return True
        if (yield from self.close(CLOSE)):
            arguments.close()
        return True

    def _key(self, arguments: ArgumentsWriter) -> Reading[str]:
        """Passes a key and what begins its value; "" if it does not follow, or if the key came before."""
        read = yield from self.spaces()
        if not (yield from self.literal(KEY)):
            self.back(read)
            return ""
        read, key = read + KEY, ""
        while (character := (yield from self.char())) and character not in "<\n" and len(key) < _LONGEST_KEY:
            key += character
        self.back(character)
        read += key
        if key and not arguments.has(key) and (yield from self.literal(KEY_END)):
            read += KEY_END + (yield from self.spaces())
            if (yield from self.literal(VALUE)):
                return key
        self.back(read)
        return ""


class Glm45(ToolDialect):
    name = "glm45"
    markers = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
    begins = (OPEN,)
    line: ClassVar[str] = "\n"

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        forms = []
        for tool in tools:
            values = parameter_rules(lark, tool, lambda key: f"{KEY}{key}{KEY_END}{self.line}{VALUE}", VALUE_END)
            inner = lines(lark, values, self.line)
            forms.append(f"{lark.literal(tool.name + self.line)} {inner} {lark.literal(CLOSE)}")
        return CallRules(lark.rule(" | ".join(forms)), between=lark.literal(self.line + OPEN), trigger=OPEN)


class Glm47(Glm45):
    name = "glm47"
    line = ""
