"""The fields of a chat that gRPC carries as JSON: turns with calls and reasoning, tools, variables of the template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from alignedserve.client.tools import choice_json, tools_json
from alignedserve.client.types import Message, ToolCall
from alignedserve.errors import InvalidRequestError

CHAT_OPTIONS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "enable_thinking",
    "chat_template_kwargs",
    "include_reasoning",
    "separate_reasoning",
    "thinking_token_budget",
    "continue_final_message",
)
_PLAIN = {"role", "content"}
_MORE = {"name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}


def chat_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body of POST /v1/chat/completions for those options that only a chat has."""
    found = {name: options[name] for name in CHAT_OPTIONS if options.get(name) is not None}
    if "tools" in found:
        found["tools"] = tools_json(found["tools"])
    if "tool_choice" in found:
        found["tool_choice"] = choice_json(found["tool_choice"])
    return found


def written(fields: Mapping[str, Any]) -> str:
    """As JSON text. Raises InvalidRequestError, which names the field that is no JSON."""
    try:
        return json.dumps(fields, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        for name, value in fields.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequestError(f"{name}: {error}", param=name) from error
        raise


def turn_json(turn: object, number: int) -> dict[str, Any]:
    """A turn in OpenAI's form. Raises InvalidRequestError."""
    where = f"messages[{number}]"
    if isinstance(turn, Message):
        return _of_message(turn)
    if not isinstance(turn, Mapping) or not turn.keys() <= _PLAIN | _MORE:
        allowed = ", ".join(sorted(_MORE))
        raise InvalidRequestError(f"{where} must have role and content, and may have {allowed}", param="messages")
    found = {name: value for name, value in turn.items() if value is not None}
    calls = found.get("tool_calls")
    if not isinstance(found.get("role"), str) or not isinstance(
        found.get("content", "" if calls else None), str | list
    ):
        raise InvalidRequestError(f"{where}: role and content must be strings", param="messages")
    if isinstance(calls, list | tuple):
        found["tool_calls"] = [_call(call) if isinstance(call, ToolCall) else call for call in calls]
    return found


def is_plain(turn: Mapping[str, Any]) -> bool:
    """Whether it has a role and a text only."""
    return turn.keys() == _PLAIN and isinstance(turn["content"], str)


def _of_message(turn: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        found["content"] = turn.content or None
        found["tool_calls"] = [_call(call) for call in turn.tool_calls]
    if turn.name is not None:
        found["name"] = turn.name
    if turn.tool_call_id is not None:
        found["tool_call_id"] = turn.tool_call_id
    if turn.reasoning:
        found["reasoning_content"] = turn.reasoning
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
