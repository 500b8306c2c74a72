"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import Reading, Tool
from alignedserve.gateway.dialects.parameters import Mark, TaggedCalls, lines, parameter_rules
from alignedserve.gateway.dialects.pieces import MakeId, Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_NEXT = (FUNCTION, f"{OPEN}{FUNCTION}", f"{OPEN}\n{FUNCTION}")  # another call
_AFTER_VALUE = (PARAMETER, FUNCTION_END, CLOSE, *_NEXT)
_MARKS = (Mark(PARAMETER_END, _AFTER_VALUE, closes=True), Mark(PARAMETER), Mark(FUNCTION_END, (CLOSE, *_NEXT)),
          Mark(CLOSE, _NEXT))  # fmt: skip


class _Parser(TaggedCalls):
    marks = (*(replace(mark, text=f"\n{mark.text}") for mark in _MARKS), *_MARKS)
    key_end = ">"
    ends = (FUNCTION_END, CLOSE)
    lines = True

    def call(self) -> Reading[bool]:
        yield from self.literal(OPEN)
        yield from self.spaces()
        if not (yield from self.literal(FUNCTION)):
            return False
        name = yield from self.name(">")
        if not name:
            return False
        yield from self.char()
        space = yield from self.spaces()
        follows = yield from self.one_of((PARAMETER, FUNCTION_END, CLOSE))
        if not follows:
            return False
        self.back(space + follows)
        self.begin(name)
        yield from self.arguments(name)
        return True

    def key(self) -> Reading[tuple[str, str]]:
        read = yield from self.spaces()
        if (yield from self.literal(PARAMETER)):
            key = yield from self.key_text()
            read += PARAMETER + key
            if key and (yield from self.literal(">")):
                return key, f"{read}>"
        self.back(read)
        return "", ""


class Qwen3Coder(ToolDialect):
    name = "qwen3_coder"
    markers = (OPEN, CLOSE)
    begins = (OPEN,)
    ends_reasoning = (f"{OPEN}\n{FUNCTION}",)

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        forms = []
        for tool in tools:
            values = parameter_rules(
                lark, tool, lambda key: f"{PARAMETER}{key}>\n", PARAMETER_END, json_end=f"\n{PARAMETER_END}"
            )
            inner = lines(lark, values)
            head = lark.literal(f"\n{FUNCTION}{tool.name}>\n")
            forms.append(f"{head} {inner} {lark.literal(f'{FUNCTION_END}{chr(10)}{CLOSE}')}")
        return CallRules(lark.rule(" | ".join(forms)), between=lark.literal("\n" + OPEN), trigger=OPEN)
