"""The messages of a chat request: roles, content as a string or as a list of text parts, calls and their results."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic needs this class before Python 3.12

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body import refused
from alignedserve.gateway.body.nested import check_depth
from alignedserve.gateway.body.validation_errors import shown
from alignedserve.gateway.body.values import LIST, STRICT, TEXT, Sent, Unsupported, text_or_list
from alignedserve.gateway.failures import MissingFieldError
from alignedserve.text import CallArguments

MAX_MESSAGES = 4096
MAX_CALLS = 256
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class TextPart(TypedDict):
    """A text part of a message's content."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    type: Annotated[
        Literal["text"], Unsupported("content parts of type {} are not supported: this server reads text only")
    ]
    text: str


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join([part["text"] for part in content])


_Content = Annotated[
    Annotated[str, TEXT] | Annotated[list[TextPart], Field(fail_fast=True), LIST],
    text_or_list("text or an array of parts"),
]


class CalledFunction(TypedDict):
    """The function of an earlier call. `arguments`: JSON text."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    name: Annotated[str, Field(max_length=256)]
    arguments: NotRequired[str | None]


class EarlierCall(TypedDict):
    """A call that an earlier answer made."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    id: NotRequired[str]
    type: NotRequired[Annotated[Literal["function"], Unsupported("tool calls of type {} are not supported")]]
    function: CalledFunction


class Message(BaseModel):
    """One message of a conversation."""

    model_config = STRICT  # not a Body: its validator runs Python code for each of possibly thousands of messages

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, Sent(_Content, _joined)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    function_call: CalledFunction | None = Field(None, description="Older form of tool_calls.")
    reasoning_content: str | None = Field(None, description="An earlier answer's reasoning.")
    reasoning: str | None = Field(None, description="Alias of reasoning_content.")

    def check(self, where: str) -> None:
        """Raises MissingFieldError without content, or without the name of a function whose result it is;
        UnsupportedFeatureError for a field that the chat template would not receive.
        """
        if self.role == "function" and self.name is None:
            raise MissingFieldError(f"{where}.name is required: the function's", param=f"{where}.name")
        if self.content is None and self.role != "assistant":  # whose turn may be empty
            raise MissingFieldError(f"{where}.content is required", param=f"{where}.content")
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in refused.MESSAGE:
                refused.MESSAGE[name].check(value, f"{where}.{name}")

    @property
    def plain(self) -> bool:
        """Whether there is nothing to check."""
        return self.content is not None and not self.model_extra and self.role != "function"

    @property
    def calls(self) -> list[EarlierCall]:
        if self.function_call is not None and not self.tool_calls:
            return [cast(EarlierCall, {"type": "function", "function": self.function_call})]
        return self.tool_calls or []

    @property
    def turn(self) -> dict[str, Any]:
        """The message in the form that the chat template expects."""
        role = "tool" if self.role == "function" else self.role
        content = "" if self.content is None and not self.calls else self.content
        turn: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.calls:
            turn["tool_calls"] = [_call(call) for call in self.calls]
        if (thought := self.reasoning_content or self.reasoning) is not None:
            turn["reasoning_content"] = thought
        return turn


class EarlierCalls:
    """The calls of a conversation so far, which results may name."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._nameless = False

    def add(self, call_id: str | None) -> None:
        """A call. Without an id, results may have any: they belong to the calls in their order."""
        self._nameless = self._nameless or call_id is None
        self._ids.add(call_id or "")

    def check(self, call_id: str, where: str) -> None:
        """Raises InvalidRequestError for the result of a call that was not made."""
        if call_id not in self._ids and not self._nameless:
            message = f"{where}: no call before it has the id {shown(call_id)}; send the answer that made the call, too"
            raise InvalidRequestError(message, param=where)


def _call(call: EarlierCall) -> dict[str, Any]:
    """Arguments become a mapping, as templates expect them; text that is no JSON object stays text."""
    function = call["function"]
    text = function.get("arguments") or ""
    arguments: Any = text
    try:
        value = json.loads(text) if text.strip() else {}
        if "\\u" in text:  # an escape may be half of a pair, which is no character
            value = json.loads(_HALF_PAIR.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        check_depth(value, "messages")
        arguments = CallArguments(value)
    written = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **written} if "id" in call else written
