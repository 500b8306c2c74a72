"""The messages of a chat: roles, content as text or as parts of type text."""

from __future__ import annotations

from typing import Any

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.fields import shown, wrong_type
from alignedserve.gateway.failures import MissingFieldError, UnsupportedFeatureError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
_KEPT = ("name", "tool_call_id")
_CALLS = ("tool_calls", "function_call")


def parse_messages(value: Any) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """The messages as the chat template takes them, and the names of fields that nobody reads."""
    if value is None:
        raise MissingFieldError("messages is required", param="messages")
    if not isinstance(value, list):
        raise wrong_type("messages", "an array of messages", value)
    if not value:
        raise InvalidRequestError("messages must not be empty", param="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages may have {MAX_MESSAGES} entries at most, got {len(value)}", param="messages"
        )
    unread: dict[str, None] = {}
    messages = tuple(_message(message, f"messages[{number}]", unread) for number, message in enumerate(value))
    return messages, list(unread)


def _message(value: Any, where: str, unread: dict[str, None]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    role = value.get("role")
    if role is None:
        raise MissingFieldError(f"{where}.role is required", param=f"{where}.role")
    if not isinstance(role, str):
        raise wrong_type(f"{where}.role", "a string", role)
    if role not in ROLES:
        message = f"{where}.role must be one of {', '.join(ROLES)}; got {shown(role)}"
        raise InvalidRequestError(message, param=f"{where}.role")
    for name in _CALLS:
        if value.get(name):
            raise UnsupportedFeatureError(
                f"{where}.{name} is not supported: there are no tool calls", param=f"{where}.{name}"
            )
    message_fields: dict[str, Any] = {"role": role, "content": _content(value.get("content"), f"{where}.content")}
    for name in _KEPT:
        if (text := value.get(name)) is not None:
            if not isinstance(text, str):
                raise wrong_type(f"{where}.{name}", "a string", text)
            message_fields[name] = text
    known = ("role", "content", *_KEPT)
    unread.update(
        (f"messages.{name}", None) for name, entry in value.items() if name not in known and entry is not None
    )
    return message_fields


def _content(value: Any, where: str) -> str:
    if value is None:
        raise MissingFieldError(f"{where} is required", param=where)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(where, "text or an array of parts", value)
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(value))


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    kind = value.get("type")
    if kind is None:
        raise MissingFieldError(f"{where}.type is required", param=f"{where}.type")
    if not isinstance(kind, str):
        raise wrong_type(f"{where}.type", "a string", kind)
    if kind != "text":
        message = f"content parts of type {shown(kind)} are not supported: the models here read text only"
        raise UnsupportedFeatureError(message, param=f"{where}.type")
    text = value.get("text")
    if text is None:
        raise MissingFieldError(f"{where}.text is required", param=f"{where}.text")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.text", "a string", text)
    return text
