"""Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}` in place of text, several with `; ` between them.

After text, a call begins with the tag.
"""

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

    def call(self) -> Reading[bool]:
        after_text = self.said
        if self.calls and not after_text and (yield from self.literal(";")):
            yield from self.spaces()
        if (yield from self.literal(TAG)):
            yield from self.spaces()
        elif after_text:
            return False  # only the tag, which is no text, can begin a call here
        return (yield from self.json_call())


class _BoundParser(_Parser):
    at_start_only = True  # where the tag is no special token, text of a grammar may contain it


class Llama3Json(ToolDialect):
    name = "llama3_json"
    markers = (TAG,)
    begins = ("{", TAG)

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def bound_parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _BoundParser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        call = lark.rule(" | ".join(json_call_rule(lark, tool, "parameters") for tool in tools))
        return CallRules(call, between=lark.literal("; "), openers="{" if lark.is_special(TAG) else "{<")
