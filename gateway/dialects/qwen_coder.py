"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.parameters import ArgumentsWriter, lines, parameter_rules, read_value
from alignedserve.gateway.dialects.pieces import MakeId, Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_LONGEST_KEY = 256


class _Parser(CallMachine):
    openers = "<"

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
        arguments, tool = ArgumentsWriter(self), self.tools[name]
        while key := (yield from self._key(arguments)):
            arguments.key(key)
            if not (yield from read_value(self, tool, key, PARAMETER_END, breaks=True)):
                return True
        ended = yield from self.close(FUNCTION_END)
        if (yield from self.close(CLOSE)) or ended:
            arguments.close()
        return True

    def _key(self, arguments: ArgumentsWriter) -> Reading[str]:
        """Passes `<parameter=KEY>`; "" if it does not follow, or if the key came before."""
        read = yield from self.spaces()
        if not (yield from self.literal(PARAMETER)):
            self.back(read)
            return ""
        key = ""
        while (character := (yield from self.char())) and character not in ">\n<" and len(key) < _LONGEST_KEY:
            key += character
        if character == ">" and key and not arguments.has(key):
            return key
        self.back(read + PARAMETER + key + character)
        return ""


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
