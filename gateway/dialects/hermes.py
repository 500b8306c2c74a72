"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of times."""

from __future__ import annotations

import json
from collections.abc import Sequence

from alignedserve.gateway.dialects.base import ToolDialect
from alignedserve.gateway.dialects.lark import CallRules, Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.pieces import MakeId, Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OF_OTHERS = {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
              "anyOf", "oneOf", "allOf", "if", "not", "dependentSchemas", "$ref", "$dynamicRef"}  # fmt: skip


class _Parser(CallMachine):
    openers = "<"

    def call(self) -> Reading[bool]:
        if not (yield from self.literal(OPEN)):
            return False
        yield from self.spaces()
        if not (yield from self.json_call()):
            return False
        yield from self.close(CLOSE)
        return True


class Hermes(ToolDialect):
    name = "hermes"
    markers = (OPEN, CLOSE)
    begins = (OPEN,)

    def parser(self, tools: Sequence[Tool], make_id: MakeId, most: int | None = None) -> Parser:
        return _Parser(tools, make_id, most)

    def calls(self, lark: Lark, tools: Sequence[Tool]) -> CallRules:
        body = lark.rule(" | ".join(json_call_rule(lark, tool, "arguments") for tool in tools))
        call = lark.rule(f"{lark.literal(chr(10))} {body} {lark.literal(chr(10) + CLOSE)}")
        return CallRules(call, between=lark.literal("\n" + OPEN), trigger=OPEN)


def json_call_rule(lark: Lark, tool: Tool, key: str) -> str:
    """The name of a rule for `{"name": …, KEY: {…}}`."""
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return lark.rule(f"{lark.literal(head)} {arguments_rule(lark, tool)} {lark.literal('}')}")


def arguments_rule(lark: Lark, tool: Tool) -> str:
    """The name of a rule for a call's arguments as JSON.

    Unless the schema speaks of others, they are those that it names: else a wild model goes on with new ones for ever.
    """
    schema = {"type": "object", **tool.parameters}
    named = schema.get("properties")
    if isinstance(named, dict) and not _OF_OTHERS & schema.keys() and named.keys() >= set(schema.get("required", ())):
        schema["additionalProperties"] = False
    return lark.json(schema, f"tool {tool.name}")
