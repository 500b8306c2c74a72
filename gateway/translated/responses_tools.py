"""Tools of /v1/responses as a chat request's functions, and calls of these as the items that the client knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from alignedserve.errors import InvalidRequestError, RequestError
from alignedserve.gateway.body.validation_errors import shown
from alignedserve.gateway.failures import MissingFieldError
from alignedserve.gateway.translated.fields import Fields, unsupported

_OF_CLIENT = ("function", "custom")
# What OpenAI runs itself, or has its own models call. Agents offer it to every model, beside their own tools.
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "local_shell",
           "shell", "tool_search", "apply_patch", "programmatic_tool_calling")  # fmt: skip
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
          "additionalProperties": False}  # fmt: skip
_JOINT = "__"
_PLACE = re.compile(r"tools\[(\d+)\]")


@dataclass(slots=True)
class ToolNames:
    """`custom`: tools that take a text. `spaces`: namespace and own name of a tool, by its name in the prompt.

    `places`: of each tool of the chat request, in the client's body. `left_out`: places of what is ignored.
    """

    custom: set[str] = field(default_factory=set)
    spaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def item(self, name: str, arguments: str) -> dict[str, Any]:
        """The fields of a call's item that depend on the kind of the tool. `arguments`: as written so far."""
        item: dict[str, Any] = {"type": "function_call"}
        if name in self.custom:
            item = {"type": "custom_tool_call", "input": text_input(arguments)}
        if name in self.spaces:
            item["namespace"], item["name"] = self.spaces[name]
        else:
            item["name"] = name
        return item if name in self.custom else {**item, "arguments": arguments}

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Errors about a tool of the chat request name its place in the client's body."""
        try:
            yield
        except RequestError as error:
            found = _PLACE.match(error.param or "")
            if found is not None and int(found[1]) < len(self.places):
                theirs = self.places[int(found[1])] + (error.param or "")[found.end() :]
                error.message = error.message.replace(error.param or "", theirs, 1)
                error.param = theirs
            raise


def text_input(arguments: str) -> str:
    """The text of a call of a custom tool, "" until it is whole."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    return str(found.get("input", "")) if isinstance(found, dict) else ""


def written_call(item: Fields, kind: str) -> tuple[str, str]:
    """Name and arguments of an earlier call as the prompt has them."""
    name, space = item.text("name"), item.optional_text("namespace")
    name = _joined(space, name) if space else name
    if kind == "custom_tool_call":
        return name, orjson.dumps({"input": item.text("input")}).decode()
    return name, item.text("arguments")


def tools_of(fields: Fields) -> tuple[dict[str, Any], ToolNames]:
    """tools and tool_choice of the chat request."""
    names, tools = ToolNames(), list[dict[str, Any]]()
    given = fields.objects("tools")
    for tool in given:
        kind = tool.text("type")
        if tool.raw("name") is None and isinstance(tool.raw("function"), dict):
            message = f"{tool.place('name')} is required: here a function's fields stand beside type, not in function"
            raise MissingFieldError(message, param=tool.place("name"))
        if kind == "namespace":
            tools += [_function_of(one, names, tool.text("name")) for one in tool.objects("tools")]
        elif kind in _OF_CLIENT:
            tools.append(_function_of(tool, names))
        elif kind.startswith(_HOSTED) and any(one.raw("type") in (*_OF_CLIENT, "namespace") for one in given):
            names.left_out.append(tool.where)
        else:
            raise unsupported(tool, "type", f"tools of type {kind} are not supported: only functions are")
    choice = fields.raw("tool_choice")
    if isinstance(choice, dict):
        choice = _choice(Fields(choice, "tool_choice"), tools)
    found: dict[str, Any] = {}
    if tools:
        found["tools"] = tools
    if choice is not None and (tools or choice not in ("auto", "none")):
        found["tool_choice"] = choice
    return found, names


def _function_of(tool: Fields, names: ToolNames, space: str = "") -> dict[str, Any]:
    """The function of the chat request. Raises UnsupportedFeatureError for a tool of another kind."""
    kind = tool.text("type")
    if kind not in _OF_CLIENT:
        raise unsupported(tool, "type", f"tools of type {kind} are not supported in a namespace")
    names.places.append(tool.where)
    function = {key: value for key, value in tool.values().items() if key != "type"}
    if space:
        own = tool.text("name")
        function["name"] = _joined(space, own)
        names.spaces[function["name"]] = space, own
    if kind == "custom":  # a function with one text; a grammar that the text should follow is left out
        if (wanted := tool.object("format")) is not None and wanted.raw("type") != "text":
            names.left_out.append(tool.place("format"))
        name = function["name"] if space else tool.text("name")
        names.custom.add(name)
        function = {"name": name, "description": tool.raw("description"), "parameters": _INPUT}
    return {"type": "function", "function": function}


def _joined(space: str, name: str) -> str:
    return f"{space}{name}" if space.endswith(_JOINT) else f"{space}{_JOINT}{name}"


def _choice(choice: Fields, tools: Sequence[Any]) -> dict[str, Any]:
    """Chat's tool_choice."""
    kind = choice.text("type")
    if kind in ("function", "custom"):
        return _function(choice.text("name"))
    if kind != "allowed_tools":
        raise unsupported(choice, "type", f"tool_choice of type {kind} is not supported: only functions are")
    mode, names = choice.text("mode"), [tool.text("name") for tool in choice.objects("tools")]
    if mode not in ("auto", "required"):
        raise InvalidRequestError(
            f"tool_choice.mode must be auto or required, not {shown(mode)}", param="tool_choice.mode"
        )
    if not names:
        raise InvalidRequestError("tool_choice.tools must name a tool", param="tool_choice.tools")
    missing = [name for name in names if name not in [tool["function"].get("name") for tool in tools]]
    if missing:
        raise InvalidRequestError(f"tool_choice.tools: tools has no {shown(missing[0])}", param="tool_choice.tools")
    return {"type": kind, kind: {"mode": mode, "tools": [_function(name) for name in names]}}


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
