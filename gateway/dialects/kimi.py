"""Kimi K2: a section of calls, each with its id `functions.NAME:INDEX` and its arguments."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.hermes import arguments_rule
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.pieces import MakeId, Parser

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_PREFIX = "functions."


class _Parser(CallMachine):
    openers = "<"

    def call(self) -> Reading[bool]:
        yield from self.literal(BEGIN)
        yield from self.spaces()
        if not (yield from self.literal(CALL)):
            return False
        yield from self.spaces()
        prefix = _PREFIX if (yield from self.literal(_PREFIX)) else ""
        name = yield from self.name(":")
        if not name:
            return False
        number = yield from self.char()
        while (character := (yield from self.char())).isdecimal() and len(number) < 10:
            number += character
        self.back(character)
        yield from self.spaces()
        if not (yield from self.literal(ARGUMENTS)):
            return False
        return (yield from self.call_of(name, (CALL_END, END), prefix + name + number))


class KimiK2(ToolDialect):
    name = "kimi_k2"
    markers = (BEGIN, END, CALL, ARGUMENTS, CALL_END)
    begins = (BEGIN,)
    ends_reasoning = (BEGIN,)

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        forms = [
            f"{lark.literal(CALL + _PREFIX + tool.name + ':')} /[0-9]{{1,3}}/ {lark.literal(ARGUMENTS)} "
            f"{arguments_rule(lark, tool)} {lark.literal(CALL_END)}"
            for tool in tools
        ]
        call = lark.rule(" | ".join(forms))
        return CallRules(call, after=lark.literal(END), trigger=BEGIN)
