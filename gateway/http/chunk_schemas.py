"""JSON schemas of the chunks of streamed replies, derived from those of whole replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def chunk_schemas(replies: Mapping[str, Schema]) -> dict[str, Schema]:
    """The components `CompletionChunk` and `ChatCompletionChunk`."""
    return {
        "CompletionChunk": _chunk(replies["Completion"], "text_completion"),
        "ChatCompletionChunk": _chunk(replies["ChatCompletion"], "chat.completion.chunk"),
    }


def _chunk(reply: Schema, name: str) -> Schema:
    properties = {field: schema for field, schema in reply["properties"].items() if field != "prompt_logprobs"}
    choice = properties["choices"]["items"]
    own = {field: schema for field, schema in choice["properties"].items() if field != "prompt_logprobs"}
    required = [field for field in choice["required"] if field != "message"]
    if "message" in own:
        own["delta"] = _delta(own.pop("message"))
        required.append("delta")
    properties["choices"] = {"type": "array", "items": {"type": "object", "properties": own, "required": required}}
    properties["object"] = {"const": name}
    properties["usage"] = {
        "anyOf": [properties["usage"], {"type": "null"}],
        "description": "With stream_options.include_usage: of the last chunk; with continuous_usage_stats, of each.",
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [one for one in reply["required"] if one != "usage"],
    }


def _delta(message: Schema) -> Schema:
    properties = {field: schema for field, schema in message["properties"].items() if field != "refusal"}
    call = properties["tool_calls"]["items"]["properties"]
    function = {"type": "object", "properties": call["function"]["properties"], "required": ["arguments"]}
    parts = {"index": {"type": "integer"}, **call, "function": function}
    items = {"type": "object", "properties": parts, "required": ["index", "function"]}
    properties["content"] = {"type": "string"}
    properties["tool_calls"] = {"type": "array", "items": items, "description": "New parts of calls."}
    return {"type": "object", "properties": properties}
