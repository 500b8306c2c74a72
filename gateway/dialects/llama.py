"""Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}` in place of text, several with `; ` between them."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.hermes import json_call_rule
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.pieces import MakeId, Parser

TAG = "<|python_tag|>"


class _Parser(CallMachine):
    openers = "{<;"
    at_start_only = True

    def call(self) -> Reading[bool]:
        if self.calls and (yield from self.literal(";")):
            yield from self.spaces()
        if (yield from self.literal(TAG)):
            yield from self.spaces()
        return (yield from self.json_call())


class Llama3Json(ToolDialect):
    name = "llama3_json"
    markers = (TAG,)
    begins = ("{", TAG)

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        call = lark.rule(" | ".join(json_call_rule(lark, tool, "parameters") for tool in tools))
        return CallRules(call, between=lark.literal("; "), openers="{" if lark.is_special(TAG) else "{<")
