"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or in newer models `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.hermes import arguments_rule, json_call_rule
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.pieces import MakeId, Parser

MARK, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_LENGTH = 9


class _Parser(CallMachine):
    openers = "["

    def call(self) -> Reading[bool]:
        if not (yield from self.literal(MARK)):
            return False
        yield from self.spaces()
        if (yield from self.peek()) == "[":
            return (yield from self._list())
        return (yield from self._named())

    def _list(self) -> Reading[bool]:
        yield from self.literal("[")
        yield from self.spaces()
        if not (yield from self.json_call()):
            return False
        while self._most is None or self.calls < self._most:
            if not (yield from self.attempt(self._next())):
                break
        yield from self.close("]")
        return True

    def _next(self) -> Reading[bool]:
        yield from self.spaces()
        if not (yield from self.literal(",")):
            return False
        yield from self.spaces()
        return (yield from self.json_call())

    def _named(self) -> Reading[bool]:
        name = yield from self.name("[{")
        if not name:
            return False
        call_id = ""
        if (yield from self.literal(ID)):
            while len(call_id) < 64 and (character := (yield from self.char())).isalnum():
                call_id += character
            self.back(character)
        if not (yield from self.literal(ARGUMENTS)) and call_id:
            return False
        return (yield from self.call_of(name, (), call_id or None))


class Mistral(ToolDialect):
    name = "mistral"
    markers = (MARK, ARGUMENTS, ID)
    begins = (MARK,)
    id_length = ID_LENGTH

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        if lark.is_special(ARGUMENTS):
            forms = [f"{lark.literal(tool.name + ARGUMENTS)} {arguments_rule(lark, tool)}" for tool in tools]
            return CallRules(lark.rule(" | ".join(forms)), between=lark.literal(MARK), trigger=MARK)
        call = lark.rule(" | ".join(json_call_rule(lark, tool, "arguments") for tool in tools))
        return CallRules(call, lark.literal("["), lark.literal(", "), lark.literal("]"), trigger=MARK)
