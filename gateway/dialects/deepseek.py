"""DeepSeek V3, R1 and V3.1: calls between markers; in V3 and R1 the arguments are a fenced block."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.hermes import arguments_rule
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.pieces import MakeId, Parser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_TYPE, _FENCE, _FENCE_END = "function", "```json\n", "\n```"


class _Parser(CallMachine):
    openers = "<"

    def call(self) -> Reading[bool]:
        yield from self.literal(BEGIN)
        yield from self.spaces()
        if not (yield from self.literal(CALL)):
            return False
        fenced = yield from self.literal(_TYPE + SEPARATOR)
        if fenced and _TYPE in self.tools and (yield from self.object_begins()):
            return (yield from self.call_of(_TYPE, (CALL_END, END)))  # of V3.1: a tool of this name
        name = yield from self.name("\n" if fenced else SEPARATOR[0])
        if not name:
            return False
        yield from self.spaces()
        if not (yield from self.literal(_FENCE if fenced else SEPARATOR)):
            return False
        fence = [_FENCE_END.strip()] if fenced else []
        return (yield from self.call_of(name, (*fence, CALL_END, END)))


class DeepseekV3(ToolDialect):
    name = "deepseek_v3"
    markers = (BEGIN, END, CALL, SEPARATOR, CALL_END)
    begins = (BEGIN,)

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        return self._calls(lark, tools, CALL + _TYPE + SEPARATOR, "\n" + _FENCE, _FENCE_END + CALL_END, "\n")

    def _calls(self, lark: Lark, tools: Sequence[Tool], head: str, middle: str, end: str, between: str) -> CallRules:
        forms = [
            f"{lark.literal(head + tool.name + middle)} {arguments_rule(lark, tool)} {lark.literal(end)}"
            for tool in tools
        ]
        call = lark.rule(" | ".join(forms))
        space = lark.literal(between) if between else ""
        return CallRules(call, between=space, after=lark.literal(END), trigger=BEGIN)


class DeepseekV31(DeepseekV3):
    name = "deepseek_v31"

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        return self._calls(lark, tools, CALL, SEPARATOR, CALL_END, "")
