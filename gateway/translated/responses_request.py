"""The body of /v1/responses, as a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import PrivateAttr

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.messages import EarlierCalls
from alignedserve.gateway.body.nested import MOST_REPEATED_DEPTH, check_depth
from alignedserve.gateway.body.planning import CallPlan, ServedModel, counted, plan_chat
from alignedserve.gateway.body.refused import Refusal
from alignedserve.gateway.body.requests import ChatRequest, checked
from alignedserve.gateway.body.validation_errors import shown, wrong_type
from alignedserve.gateway.body.values import Metadata
from alignedserve.gateway.translated.fields import (
    IMAGE_LEFT_OUT,
    Fields,
    part_text,
    refusals,
    refuse,
    renamed,
    text_of,
    unread,
    unsupported,
)
from alignedserve.gateway.translated.responses_tools import ToolNames, tools_of, written_call

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "metadata", "safety_identifier",
         "service_tier", "prompt_cache_key", "prompt_cache_retention")  # fmt: skip
_OWN = frozenset({"input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include",
                  "top_logprobs", "store", "truncation", "stream_options", "previous_response_id", *_SAME})  # fmt: skip
_REFUSED = refusals(
    ("conversation", "conversations are not stored; send the earlier items in input, or previous_response_id"),
    ("background", "a response is written while its client waits; see /v1/batches for work without hurry"),
    ("prompt", "there are no prompt templates; send the prompt as input"),
    ("context_management", "input is never shortened"),
    ("moderation", "there is no moderation"),
    # Fields of a chat request that this endpoint has under another name, or not at all
    ("messages", "use input"),
    ("max_tokens max_completion_tokens max_new_tokens n_predict", "use max_output_tokens"),
    ("n num_return_sequences", "there is one answer"),
    ("logprobs", 'use include: ["message.output_text.logprobs"]'),
    ("prompt_logprobs return_token_ids include_timings", "a response has no place for them"),
    ("response_format", "use text.format"),
    ("reasoning_effort", "use reasoning.effort"),
    ("functions function_call", "use tools"),
    one=("n", "num_return_sequences"),
) | {"truncation": Refusal("truncation", "it is disabled or auto", ("disabled", "auto"))}
_UNSTORED = refusals(
    ("previous_response_id", "responses are not stored (batches.folder); send the earlier items in input"),
    ("store", "responses are not stored (batches.folder); set it to false"),
)
# By a reply, or in the store, as they were sent.
_REPEATED = ("input", "metadata", "reasoning", "text", "tool_choice", "tools")
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_PARTS = ("input_text", "output_text", "text")
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
# Calls that OpenAI's servers made in an earlier part of the conversation.
_LEFT_OUT = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
             "computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
             "local_shell_call", "local_shell_call_output", "tool_search_call", "tool_search_output")  # fmt: skip


class ResponsesChat(ChatRequest):
    """A chat request that was sent to /v1/responses."""

    longest_name: ClassVar[int] = 128  # a namespace's and its function's
    fills_room: ClassVar[bool] = True
    lenient: ClassVar[bool] = True

    metadata: Metadata | None = None  # the reply repeats it

    _body: dict[str, Any] = PrivateAttr(default_factory=dict)
    _earlier: Sequence[dict[str, Any]] = PrivateAttr(default=())
    _stored: bool = PrivateAttr(default=False)
    _names: ToolNames = PrivateAttr(default_factory=ToolNames)

    @property
    def body(self) -> dict[str, Any]:
        """What the client sent."""
        return self._body

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation: the items of earlier responses, then the client's."""
        return [*self._earlier, *(dict(item.values()) for item in _items(Fields(self._body, "")))]

    @property
    def tool_names(self) -> ToolNames:
        return self._names

    @property
    def summarises(self) -> bool:
        """Whether the client wants reasoning as a summary: the only form that some show. It gets all of it."""
        reasoning = Fields(self._body, "").object("reasoning")
        return reasoning is not None and bool(reasoning.raw("summary"))

    @property
    def stored(self) -> bool:
        """Whether the answer is to be stored."""
        return self._stored

    @property
    def ignored(self) -> list[str]:
        fields = Fields(self._body, "")
        given = (_NAMES.get(name, name.replace("tools.function.", "tools.")) for name in super().ignored)
        reasoning = unread(fields.object("reasoning"), "effort", "summary")
        within = [*reasoning, *unread(fields.object("text"), "format"), *self._names.left_out]
        return [*(name for name in given if name != "metadata"), *within]


def parse_responses(body: Any, earlier: Sequence[dict[str, Any]] = (), *, stores: bool = False) -> ResponsesChat:
    """`earlier`: items of the conversation before the body's. `stores`: responses are stored unless the body says no.

    Raises InvalidRequestError, or a subclass of it, that names the invalid field.
    """
    fields = Fields(body, "")
    chat, names = _chat_body(fields, earlier, stores=stores)
    with names.placed(), renamed(_NAMES):
        request = checked(ResponsesChat, chat)
    request._body, request._earlier, request._names = body, earlier, names
    request._stored = stores and fields.flag("store") is not False
    return request


async def plan_response(model: ServedModel, request: ResponsesChat) -> CallPlan:
    """`plan_chat`, whose errors name the fields that the client sent."""
    with request.tool_names.placed(), renamed(_NAMES):
        return await plan_chat(model, request)


async def count_input(model: ServedModel, request: ResponsesChat) -> int:
    """The tokens of the conversation. Raises InvalidRequestError (or one of its kinds), ModelNotFoundError."""
    model.require(request.model)
    with request.tool_names.placed(), renamed(_NAMES):
        return await counted(model, request, "input")


def _chat_body(
    fields: Fields, earlier: Sequence[dict[str, Any]] = (), *, stores: bool = False
) -> tuple[dict[str, Any], ToolNames]:
    given = fields.values()
    for name in _REPEATED:
        check_depth(fields.raw(name), name, MOST_REPEATED_DEPTH)
    fields.flag("store")
    fields.optional_text("previous_response_id")
    fields.get("max_tool_calls", int, "an integer")  # of OpenAI's own tools, which are not here: it has no effect
    refuse(fields, _REFUSED if stores else {**_REFUSED, **_UNSTORED})
    extra = {name: value for name, value in given.items() if name not in _OWN and name not in _REFUSED}
    body = {**extra, **{name: given[name] for name in _SAME if name in given}}
    left_out: list[str] = []
    body["messages"] = _messages(fields, earlier, left_out)
    body["max_tokens"] = fields.raw("max_output_tokens")
    included = fields.get("include", list, "an array of strings") or []
    for name in included:
        if name not in _INCLUDED:
            raise unsupported(fields, "include", f"include: {shown(name)} is not supported")
    if _INCLUDED[0] in included or fields.raw("top_logprobs"):
        body |= {"logprobs": True, "top_logprobs": fields.raw("top_logprobs")}
    text = fields.object("text")
    if text is not None and (wanted := text.object("format")) is not None:
        body["response_format"] = _format(wanted)
    if (reasoning := fields.object("reasoning")) is not None:
        body["reasoning_effort"] = reasoning.raw("effort")
    tools, names = tools_of(fields)
    names.left_out += left_out
    return {**body, **tools}, names


def _format(wanted: Fields) -> dict[str, Any]:
    kind = wanted.text("type")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {name: value for name, value in wanted.values().items() if name != "type"}}


def _items(fields: Fields) -> list[Fields]:
    """The items of the input; text is a user's message."""
    value = fields.raw("input")
    if isinstance(value, str):
        return [Fields({"role": "user", "content": value}, "input")]
    if not isinstance(value, list):
        raise wrong_type("input", "text or an array of items", value)
    return fields.objects("input")


def _messages(fields: Fields, earlier: Sequence[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """`left_out` gets the places of what a text cannot hold."""
    messages: list[dict[str, Any]] = []
    if instructions := fields.optional_text("instructions"):
        messages.append({"role": "system", "content": instructions})
    calls = EarlierCalls()
    turn: dict[str, Any] | None = None  # the open turn of the assistant: its reasoning, text and calls are one message
    for item in [*(Fields(item, "previous_response_id") for item in earlier), *_items(fields)]:
        kind = item.optional_text("type") or "message"
        if kind in _LEFT_OUT:
            left_out.append(item.where)
            continue
        if kind in _CALLS:
            calls.add(item.optional_text("call_id"))
        elif kind in _RESULTS:
            calls.check(item.text("call_id"), item.place("call_id"))
        of_assistant = kind in ("reasoning", *_CALLS) or item.raw("role") == "assistant"
        if not of_assistant:
            turn = None
            messages.append(_message(item, kind, left_out))
            continue
        if turn is None or _begins_turn(turn, kind):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        _add_to_turn(turn, item, kind)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _begins_turn(turn: dict[str, Any], kind: str) -> bool:
    """Whether an item of the assistant begins a new turn. In a turn, reasoning comes first, and there is one text."""
    if kind == "reasoning":
        return len(turn) > 2 or bool(turn["content"])
    return kind == "message" and bool(turn["content"])


def _add_to_turn(turn: dict[str, Any], item: Fields, kind: str) -> None:
    if kind == "message":
        turn["content"] = text_of(item, "content", _PARTS)
    elif kind == "reasoning":
        turn["reasoning_content"] = text_of(item, "content", ("reasoning_text",)) or text_of(
            item, "summary", ("summary_text",)
        )
    else:
        name, arguments = written_call(item, kind)
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": item.text("call_id"), "type": "function", "function": function})


def _message(item: Fields, kind: str, left_out: list[str]) -> dict[str, Any]:
    if kind in _RESULTS:
        return {"role": "tool", "tool_call_id": item.text("call_id"), "content": _result(item, left_out)}
    if kind == "item_reference":
        reason = "responses are not stored (batches.folder): send whole items, as with store: false"
        raise unsupported(item, "type", f"items of type {kind} are not supported: {reason}")
    if kind != "message":
        raise unsupported(item, "type", f"items of type {kind} are not supported")
    role = item.text("role")
    if role not in ("user", "system", "developer"):
        message = f"{item.place('role')} must be one of user, assistant, system, developer; got {role[:60]!r}"
        raise InvalidRequestError(message, param=item.place("role"))
    item.required("content")
    return {"role": role, "content": text_of(item, "content", _PARTS)}


def _result(item: Fields, left_out: list[str]) -> str:
    """What a tool has returned. An image there stays in an agent's conversation, so a text says that it is left out."""
    if not isinstance(item.raw("output"), list):
        return text_of(item, "output", _PARTS)
    texts = []
    for part in item.objects("output"):
        if part.text("type") == "input_image":
            texts.append(IMAGE_LEFT_OUT)
            left_out.append(part.where)
        else:
            texts.append(part_text(part, _PARTS))
    return "".join(texts)
