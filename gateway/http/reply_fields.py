"""What some replies have beside their main fields: what OpenAI's and Anthropic's clients read, and `alignedserve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_OBJECT: Schema = {"type": "object"}
_TEXTS = ("instructions", "user", "safety_identifier", "prompt_cache_key", "service_tier", "previous_response_id")


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _counts(*names: str) -> Schema:
    return {"type": "object", "properties": dict.fromkeys(names, _INTEGER)}


_CACHED = {
    **_counts("cached_tokens", "cache_write_tokens"),
    "description": "Of the prompt, those that the prefix cache had. Written: always 0.",
}
_RESPONSE: Schema = {
    "completed_at": _INTEGER,
    "error": {"type": "null"},
    "incomplete_details": _or_null({"type": "object", "properties": {"reason": {"const": "max_output_tokens"}}}),
    **{name: _or_null(_STRING) for name in _TEXTS},
    "max_output_tokens": _or_null(_INTEGER),
    "temperature": _or_null({"type": "number"}),
    "top_p": _or_null({"type": "number"}),
    "reasoning": _or_null(_OBJECT),
    "metadata": _OBJECT,
    "parallel_tool_calls": {"type": "boolean"},
    "background": {"const": False},
    "store": {"type": "boolean"},
    "text": _OBJECT,
    "tool_choice": {"anyOf": [_STRING, _OBJECT]},
    "tools": {"type": "array", "items": _OBJECT},
    "top_logprobs": _INTEGER,
    "truncation": {"const": "disabled"},
    "usage": {
        "type": "object",
        "properties": {
            **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), _INTEGER),
            "input_tokens_details": _CACHED,
            "output_tokens_details": _counts("reasoning_tokens"),
        },
    },
}
_MESSAGE: Schema = {
    "usage": _counts("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
}


_ROLE: Schema = {
    **dict.fromkeys(("role", "id", "node", "address", "state", "holds"), _STRING),
    "pid": _INTEGER,
    "incarnation": _INTEGER,
    "started_unix_s": {"type": "number"},
    "failure": {"type": "object", "properties": {"code": _STRING, "message": _STRING}},
}
_RESTART = {"$ref": "#/components/schemas/Restart"}
_SCALE = {"type": "object", "properties": {"prefill": _INTEGER, "decode": _INTEGER, "failure": _STRING}}
_STATUS: Schema = {
    "cluster_id": _STRING,
    "state": _STRING,
    "roles": {"type": "array", "items": {"type": "object", "properties": _ROLE, "required": ["role", "id", "state"]}},
    **{key: {"type": "array", "items": _STRING} for key in ("missing", "degraded")},
    "restart": _RESTART,
    "scale": _SCALE,
}


def with_all_fields(schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """The components, those of some replies with all their fields."""
    found = dict(schemas)
    for name, more in (("Response", _RESPONSE), ("AnthropicMessage", _MESSAGE), ("Status", _STATUS)):
        found[name] = {**schemas[name], "properties": {**schemas[name]["properties"], **more}}
    return found
