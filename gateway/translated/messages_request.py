"""The body of /v1/messages, Anthropic's API, as a chat request."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson
from pydantic import PrivateAttr

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.messages import EarlierCalls
from alignedserve.gateway.body.nested import check_depth
from alignedserve.gateway.body.planning import CallPlan, ServedModel, counted, plan_chat
from alignedserve.gateway.body.refused import Refusal
from alignedserve.gateway.body.requests import ChatRequest, checked
from alignedserve.gateway.body.thinking import SWITCHES
from alignedserve.gateway.body.validation_errors import wrong_type
from alignedserve.gateway.translated.context_edits import ContextEdits, context_edits
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

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "user": "metadata.user_id",
    "continue_final_message": "messages",
}
_SCHEMA = "input_schema"
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "service_tier")
_OWN = frozenset({"messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "metadata",
                  "output_config", "output_format", "context_management", *_SAME})  # fmt: skip
_REFUSED = refusals(
    ("container", "there are no containers"),
    ("mcp_servers", "there are no connections to other servers"),
    # Fields of a chat request that this endpoint has under another name, or not at all
    ("max_completion_tokens max_new_tokens n_predict", "use max_tokens"),
    ("n num_return_sequences", "there is one answer"),
    ("logprobs top_logprobs prompt_logprobs", "a message has no log-probabilities"),
    ("return_token_ids include_timings", "a message has no place for them"),
    ("stop", "use stop_sequences"),
    ("response_format", "use output_config.format"),
    ("functions function_call", "use tools"),
    ("continue_final_message add_generation_prompt", "an answer goes on with a last message of the assistant"),
    one=("n", "num_return_sequences"),
) | {"speed": Refusal("speed", "there is one speed", ("standard",))}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TEXT = ("text",)
_BILLING = "x-anthropic-billing-header:"
_OF_A_TOOL = ("type", "name", "description", "input_schema", "strict")
_OF_THINKING = ("enable_thinking", "reasoning_effort", "thinking_token_budget")  # chat's own fields
# Calls that Anthropic's servers made in an earlier part of the conversation, and their results.
_LEFT_OUT = ("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
             "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
             "advisor_tool_result", "mcp_tool_use", "mcp_tool_result")  # fmt: skip


class MessagesChat(ChatRequest):
    """A chat request that was sent to /v1/messages."""

    longest_name: ClassVar[int] = 128  # as Anthropic has it
    fills_room: ClassVar[bool] = True
    lenient: ClassVar[bool] = True

    _unread: list[str] = PrivateAttr(default_factory=list)
    _edits: ContextEdits = PrivateAttr(default_factory=ContextEdits)
    _says_thinking: bool = PrivateAttr(default=True)

    @property
    def ignored(self) -> list[str]:
        """As for chat, in Anthropic's names. `enable_thinking` is among them only if the client sent it."""
        sent = (name for name in super().ignored if name != "enable_thinking" or self._says_thinking)
        return [*(_NAMES.get(name, name) for name in sent), *self._unread]


def parse_messages(body: Any) -> MessagesChat:
    """Raises InvalidRequestError, or a subclass of it, that names the field."""
    request = _parsed(body)
    if request.messages[-1].calls:
        raise InvalidRequestError("messages must not end with a tool_use: its tool_result is missing", param="messages")
    return request


def _parsed(body: Any) -> MessagesChat:
    fields = Fields(body, "")
    fields.text("model")
    fields.required("max_tokens")
    left_out: list[str] = []
    chat, edits = _chat_body(fields, left_out), context_edits(fields)
    edits.apply(chat["messages"])
    last = chat["messages"][-1] if chat["messages"] else {}
    chat["continue_final_message"] = last.get("role") == "assistant" and "tool_calls" not in last
    with renamed(_NAMES, _SCHEMA):
        request = checked(MessagesChat, chat)
    request._edits, request._says_thinking = edits, _says_thinking(fields)
    request._unread = [
        *unread(fields.object("metadata"), "user_id"),
        *unread(fields.object("thinking"), "type", "budget_tokens"),
        *unread(fields.object("output_config"), "format", "effort"),
        *unread(fields.object("context_management"), "edits"),
        *unread(fields.object("tool_choice"), "type", "name", "disable_parallel_tool_use"),
        *(name for tool in fields.objects("tools") for name in unread(tool, *_OF_A_TOOL)),
        *left_out,
    ]
    return request


async def plan_message(model: ServedModel, request: MessagesChat) -> CallPlan:
    """`plan_chat`, whose errors name the fields that the client sent."""
    model.require(request.model)
    with renamed(_NAMES, _SCHEMA):
        return await plan_chat(model, _for_model(model, request))


async def count_tokens(model: ServedModel, body: Any) -> tuple[dict[str, Any], list[str]]:
    """The answer of /v1/messages/count_tokens, and fields that are ignored.

    Raises InvalidRequestError (or one of its kinds), ModelNotFoundError.
    """
    request = _parsed({"max_tokens": 1, **body} if isinstance(body, dict) else body)
    model.require(request.model)
    with renamed(_NAMES, _SCHEMA):
        answer = {"input_tokens": await counted(model, _for_model(model, request), "messages")}
    return answer, request.ignored


def _for_model(model: ServedModel, request: MessagesChat) -> MessagesChat:
    """Agents set how a model thinks whatever the model is: what this one cannot be told is named among what is ignored.

    Raises UnsupportedFeatureError for an edit of the conversation that could apply.
    """
    request._edits.check(model.limit[0])
    if model.template is None:
        return request
    thinks = model.dialects is not None and model.dialects.reasoning is not None
    wanted = request.enable_thinking
    if not any(map(model.template.mentions, SWITCHES)):
        if wanted is not None and wanted != thinks:
            request._unread.append("thinking.type")
        request.enable_thinking = None
    elif not request._says_thinking:
        request.enable_thinking = False  # as Anthropic's API has it
    if request.thinking_token_budget is not None and not thinks:
        request.thinking_token_budget = None
        request._unread.append("thinking.budget_tokens")
    return request


def _chat_body(fields: Fields, left_out: list[str]) -> dict[str, Any]:
    """`left_out` gets the places of what a text cannot hold."""
    given = fields.values()
    refuse(fields, _REFUSED)
    extra = {name: value for name, value in given.items() if name not in _OWN and name not in _REFUSED}
    body = {**extra, **{name: given[name] for name in _SAME if name in given}, "messages": _messages(fields, left_out)}
    if stops := fields.raw("stop_sequences"):
        body["stop"] = stops
    if (metadata := fields.object("metadata")) is not None:
        body["user"] = metadata.raw("user_id")
    config = fields.object("output_config")
    wanted = fields.object("output_format") or (None if config is None else config.object("format"))
    if wanted is not None:
        if wanted.text("type") != "json_schema":
            raise unsupported(wanted, "type", f"{wanted.place('type')} must be json_schema")
        schema = {"name": "answer", "schema": wanted.raw("schema"), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config is not None and config.raw("effort") is not None:
        body["reasoning_effort"] = config.raw("effort")
    return {**body, **_thinking(fields), **_tools(fields)}


def _says_thinking(fields: Fields) -> bool:
    """Whether the body says if the model thinks, in Anthropic's words or in chat's."""
    variables = fields.raw("chat_template_kwargs")
    switched = isinstance(variables, dict) and any(name in variables for name in SWITCHES)
    return switched or any(fields.raw(name) is not None for name in ("thinking", *_OF_THINKING))


def _thinking(fields: Fields) -> dict[str, Any]:
    thinking = fields.object("thinking")
    if thinking is None:
        return {}
    kind = thinking.text("type")
    if kind == "disabled":
        return {"enable_thinking": False}
    if kind not in ("enabled", "adaptive", "between_tools"):
        raise unsupported(
            thinking, "type", f"thinking.type must be enabled, adaptive, between_tools or disabled; got {kind[:60]!r}"
        )
    found: dict[str, Any] = {"enable_thinking": True}
    if kind == "enabled":
        found["thinking_token_budget"] = thinking.required("budget_tokens")
    return found


def _tools(fields: Fields) -> dict[str, Any]:
    tools = []
    for tool in fields.objects("tools"):
        if tool.raw("type") not in (None, "custom"):
            kind = tool.text("type")[:60]
            why = "only tools with an input_schema, which the client runs, are known"
            raise unsupported(tool, "type", f"{tool.where}: Input tag '{kind}' is not supported: {why}")
        function = {"name": tool.text("name"), "parameters": tool.required("input_schema")}
        for name in ("description", "strict"):
            if tool.raw(name) is not None:
                function[name] = tool.raw(name)
        tools.append({"type": "function", "function": function})
    found: dict[str, Any] = {"tools": tools} if tools else {}
    choice = fields.object("tool_choice")
    if choice is not None:
        kind = choice.text("type")
        if kind == "tool":
            found["tool_choice"] = {"type": "function", "function": {"name": choice.text("name")}}
        elif kind in _CHOICES:
            found["tool_choice"] = _CHOICES[kind]
        else:
            message = f"tool_choice.type must be one of auto, any, tool, none; got {kind[:60]!r}"
            raise InvalidRequestError(message, param="tool_choice.type")
        if choice.flag("disable_parallel_tool_use"):
            found["parallel_tool_calls"] = False
    return found


def _messages(fields: Fields, left_out: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if system := _system(fields):
        messages.append({"role": "system", "content": system})
    fields.required("messages")
    calls = EarlierCalls()
    for message in fields.objects("messages"):
        role = message.text("role")
        if role not in ("user", "assistant", "system"):
            text = f"{message.place('role')} must be user, assistant or system; got {role[:60]!r}"
            raise InvalidRequestError(text, param=message.place("role"))
        if role == "system" and message.raw("content") is None:
            left_out.append(message.where)  # a message that only changes settings
            continue
        content = message.required("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise wrong_type(message.place("content"), "text or an array of blocks", content)
        else:
            _note_calls(message, calls)
            messages += _OF_ROLE[role](message, left_out)
    return messages


def _system(fields: Fields) -> str:
    """The system prompt. A first block that differs with each conversation, for billing, is no part of it."""
    blocks = fields.raw("system")
    if not isinstance(blocks, list):
        return text_of(fields, "system", _TEXT)
    texts = [part_text(part, _TEXT) for part in fields.objects("system")]
    if texts and texts[0].startswith(_BILLING):
        del texts[0]
    return "".join(texts)


def _note_calls(message: Fields, calls: EarlierCalls) -> None:
    """Raises InvalidRequestError for the result of a call that was not made."""
    for block in message.objects("content"):
        if block.text("type") == "tool_use":
            calls.add(block.text("id"))
        elif block.text("type") == "tool_result":
            calls.check(block.text("tool_use_id"), block.place("tool_use_id"))


def _of_system(message: Fields, left_out: list[str]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text_of(message, "content", _TEXT)}]


def _of_user(message: Fields, left_out: list[str]) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text."""
    results, text = [], []
    for block in message.objects("content"):
        if block.text("type") == "tool_result":
            content = _result(block, left_out)
            if block.flag("is_error") and not content.lower().startswith("error"):
                content = f"Error: {content}" if content else "Error"  # templates have no field for it
            results.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content})
        else:
            text.append(_text(block, left_out))
    return [*results, {"role": "user", "content": "\n".join(text)}] if text or not results else results


def _result(block: Fields, left_out: list[str]) -> str:
    """What a tool has returned. An image there stays in an agent's conversation, so a text says that it is left out."""
    if not isinstance(block.raw("content"), list):
        return text_of(block, "content", _TEXT)
    texts = []
    for part in block.objects("content"):
        kind = part.text("type")
        if kind == "image":
            texts.append(IMAGE_LEFT_OUT)
            left_out.append(part.where)
        elif kind == "tool_reference":
            texts.append(f"The tool {part.text('tool_name')} can be used now.")
        else:
            texts.append(_text(part, left_out))
    return "\n".join(texts)


def _text(block: Fields, left_out: list[str]) -> str:
    """A text, a document or the result of a search as text. Raises UnsupportedFeatureError for another block."""
    kind = block.text("type")
    citations = block.object("citations") if kind in ("document", "search_result") else None
    if citations is not None and citations.flag("enabled"):
        left_out.append(citations.where)  # answers have none
    if kind == "document":
        return _document(block)
    if kind == "search_result":
        return "\n\n".join(filter(None, (block.text("title"), block.text("source"), _lines(block))))
    return part_text(block, _TEXT)


def _document(block: Fields) -> str:
    """The text of a document that is one. Raises UnsupportedFeatureError for another."""
    source = block.object("source")
    kind = None if source is None else source.text("type")
    if source is None or kind not in ("text", "content"):
        message = f"{block.place('source')} must be of type text or content: this server reads text only"
        raise unsupported(block, "source", message)
    text = source.text("data") if kind == "text" else _lines(source)
    return "\n\n".join(filter(None, (block.optional_text("title"), block.optional_text("context"), text)))


def _lines(owner: Fields) -> str:
    """Content that is a string, or an array of texts: each is a line of its own."""
    value = owner.required("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(owner.place("content"), "text or an array of blocks", value)
    return "\n".join(part_text(part, _TEXT) for part in owner.objects("content"))


def _of_assistant(message: Fields, left_out: list[str]) -> list[dict[str, Any]]:
    """No turn if nothing is left of it."""
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    reasoning, left = "", len(left_out)
    for block in message.objects("content"):
        kind = block.text("type")
        if kind in _LEFT_OUT:
            left_out.append(block.where)
        elif kind == "tool_use":
            block.required("input")
            given = block.get("input", dict, "an object")
            check_depth(given, block.place("input"))
            arguments = orjson.dumps(given).decode()
            function = {"name": block.text("name"), "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": block.text("id"), "type": "function", "function": function})
        elif kind == "thinking":
            reasoning += block.text("thinking")
        elif kind != "redacted_thinking":
            turn["content"] += part_text(block, _TEXT)
    if reasoning:
        turn["reasoning_content"] = reasoning
    return [] if len(left_out) > left and turn == {"role": "assistant", "content": ""} else [turn]


_OF_ROLE = {"user": _of_user, "assistant": _of_assistant, "system": _of_system}
