"""GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

Until 4.6, a line break follows the name, each key and each value; from 4.7 on there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import Reading, Tool
from alignedserve.gateway.dialects.parameters import Mark, TaggedCalls, lines, parameter_rules
from alignedserve.gateway.dialects.pieces import MakeId, Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_MARKS = (Mark(VALUE_END, (KEY, CLOSE, OPEN), closes=True), Mark(f"\n{KEY}"), Mark(KEY), Mark(f"\n{CLOSE}", (OPEN,)),
          Mark(CLOSE, (OPEN,)))  # fmt: skip


class _Parser(TaggedCalls):
    marks = _MARKS
    key_end = KEY_END
    ends = (CLOSE,)

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
        yield from self.arguments(name)
        return True

    def key(self) -> Reading[tuple[str, str]]:
        read = yield from self.spaces()
        if (yield from self.literal(KEY)):
            key = yield from self.key_text()
            read += KEY + key
            if key and (yield from self.literal(KEY_END)):
                read += KEY_END + (yield from self.spaces())
                if (yield from self.literal(VALUE)):
                    return key, read + VALUE
        self.back(read)
        return "", ""


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
