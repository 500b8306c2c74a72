"""The fields of a chat request about tools, and what they ask for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.nested import check_depth
from alignedserve.gateway.body.validation_errors import shown
from alignedserve.gateway.body.values import Body
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.failures import MissingFieldError, UnsupportedFeatureError, WrongTypeError

MAX_TOOLS = 1024
_OF_A_TOOL = ("type", "function")
_OF_A_FUNCTION = ("name", "description", "parameters", "strict")
_SLIPS = dict.fromkeys(("params", "arguments", "args", "schema", "input_schema", "inputSchema"), "parameters")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # what a function without parameters has


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools: `tools` that may be called, and `written`, as the chat template gets them.

    `forced`: the answer is calls. `most`: of calls; None: any number. `limited`: others are written that may not be
    called.
    """

    tools: tuple[Tool, ...] = ()
    written: tuple[dict[str, Any], ...] = ()
    forced: bool = False
    most: int | None = None
    limited: bool = False

    @property
    def any(self) -> bool:
        return bool(self.tools)


@dataclass(frozen=True, slots=True)
class _Choice:
    """`names`: of the functions that may be called; None: all. `one`: the answer is one call."""

    names: tuple[str, ...] | None = None
    forced: bool = False
    one: bool = False


class ToolFields(Body):
    longest_name: ClassVar[int] = 64  # of a tool, in characters

    tools: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that the model may call, each with a JSON schema."
    )
    tool_choice: Any = Field(
        None,
        description="none, auto, required, one function (the answer is then a call of it), or allowed_tools. "
        "By default auto.",
    )
    parallel_tool_calls: bool | None = Field(None, description="If false, an answer has at most one call.")
    functions: list[dict[str, Any]] | None = Field(
        None, max_length=MAX_TOOLS, description="Older form of tools. The answer has function_call, at most one."
    )
    function_call: Any = Field(None, description="Older form of tool_choice, for functions: none, auto, or a name.")

    @property
    def older(self) -> bool:
        """Whether the client uses OpenAI's older form, and gets it back."""
        return bool(self.functions)

    @property
    def unread(self) -> list[str]:
        """Places of fields of tools and of tool_choice that have no meaning here."""
        found: dict[str, None] = {}
        for tool in self.tools or ():
            found |= dict.fromkeys(f"tools.{name[:60]}" for name in tool if name not in _OF_A_TOOL)
        functions: list[tuple[str, Any]] = [("functions", one) for one in self.functions or ()]
        functions += [("tools.function", tool.get("function")) for tool in self.tools or ()]
        for place, one in functions:
            if isinstance(one, dict):
                found |= dict.fromkeys(f"{place}.{name[:60]}" for name in one if name not in _OF_A_FUNCTION)
        if isinstance(self.tool_choice, dict):
            known = ("type", "allowed_tools" if self.tool_choice.get("type") == "allowed_tools" else "function")
            found |= dict.fromkeys(f"tool_choice.{name[:60]}" for name in self.tool_choice if name not in known)
            if isinstance(within := self.tool_choice.get("allowed_tools"), dict):
                place = "tool_choice.allowed_tools"
                found |= dict.fromkeys(f"{place}.{name[:60]}" for name in within if name not in ("mode", "tools"))
        return list(found)

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequestError (or one of its kinds), which names the field."""
        if self.functions and self.tools:
            raise InvalidRequestError("functions is the older form of tools; set only one", param="functions")
        written = [{"type": "function", "function": one} for one in self.functions or ()] or self.tools or []
        place = "functions[{}]" if self.older else "tools[{}].function"
        tools = [_tool(entry, place.format(number), self.longest_name) for number, entry in enumerate(written)]
        names = [tool.name for tool in tools]
        for number, name in enumerate(names):
            if name in names[:number]:
                where = f"{place.format(number)}.name"
                raise InvalidRequestError(f"{where}: another tool is called {name!r}, too", param=where)
        chosen = self._choice(names)
        offered = [tool for tool in tools if chosen.names is None or tool.name in chosen.names]
        if not offered or "none" in (self.tool_choice, self.function_call if self.older else None):
            return ToolUse()
        most = 1 if self.parallel_tool_calls is False or chosen.one or self.older else None
        return ToolUse(tuple(offered), tuple(written), chosen.forced, most, len(offered) < len(tools))

    def _choice(self, names: Sequence[str]) -> _Choice:
        """`names`: of the tools."""
        asked = [
            (param, kind, choice)
            for param, kind in (("tool_choice", "tools"), ("function_call", "functions"))
            if (choice := getattr(self, param)) is not None and choice not in ("none", "auto")
        ]
        if not asked:
            return _Choice()
        param, kind, choice = asked[0]
        if not getattr(self, kind):
            raise InvalidRequestError(f"{param} names what to call, but there are no {kind}", param=param)
        if choice == "required" and not self.older:
            return _Choice(forced=True)
        chosen = _chosen_function(choice) if self.older else _chosen(choice)
        for name in chosen.names or ():
            if name not in names:
                raise InvalidRequestError(f"{param}: no tool is called {shown(name)}", param=param)
        return chosen


def _chosen_function(choice: Any) -> _Choice:
    """Of `{"name": …}`."""
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError('function_call must be "none", "auto", or {"name": …}', param="function_call")
    return _Choice((name,), forced=True, one=True)


def _chosen(choice: Any) -> _Choice:
    """Of `{"type": "function", "function": {"name": …}}`, or of `allowed_tools`."""
    param = "tool_choice"
    kind = choice.get("type") if isinstance(choice, dict) else "function"
    if kind == "allowed_tools":
        return _allowed(choice.get(kind), f"{param}.{kind}")
    if kind != "function":
        raise UnsupportedFeatureError(f"tool_choice of type {shown(kind)} is not supported", param=param)
    name = _function_name(choice)
    if name is None:
        wanted = '"none", "auto", "required", or {"type": "function", "function": {"name": …}}'
        raise InvalidRequestError(f"tool_choice must be {wanted}", param=param)
    return _Choice((name,), forced=True, one=True)


def _allowed(choice: Any, where: str) -> _Choice:
    """Of `{"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": …}}, …]}`."""
    mode, tools = (choice.get("mode"), choice.get("tools")) if isinstance(choice, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"{where}.mode must be auto or required, not {shown(mode)}", param=f"{where}.mode")
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    if not names or None in names:
        wanted = 'an array of {"type": "function", "function": {"name": …}}'
        raise InvalidRequestError(f"{where}.tools must be {wanted}", param=f"{where}.tools")
    return _Choice(tuple(name for name in names if name is not None), forced=mode == "required")


def _function_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _tool(entry: dict[str, Any], where: str, longest_name: int) -> Tool:
    """`where`: the place of its function. `longest_name`: in characters."""
    kind, own = entry.get("type"), where.removesuffix(".function")
    if kind != "function":
        if kind is None:
            raise MissingFieldError(f"{own}.type is required", param=f"{own}.type")
        raise UnsupportedFeatureError(f"{own}: tools of type {shown(kind)} are not supported", param=own)
    function = entry.get("function")
    if not isinstance(function, dict):
        raise WrongTypeError(f"{where} must be an object", param=where)
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    _check_fields(entry, function, where)
    if name is None:
        raise MissingFieldError(f"{where}.name is required", param=f"{where}.name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > longest_name:
        wanted = f"1 to {longest_name} letters, digits, or one of _ . -"
        raise InvalidRequestError(f"{where}.name must be {wanted}, not {shown(name)}", param=f"{where}.name")
    if not isinstance(function.get("description", ""), str | None):
        raise WrongTypeError(f"{where}.description must be a string", param=f"{where}.description")
    if not isinstance(strict, bool | None):
        raise WrongTypeError(f"{where}.strict must be true or false", param=f"{where}.strict")
    _check_parameters(parameters, f"{where}.parameters")
    check_depth(entry, where)
    return Tool(name, _NO_PARAMETERS if parameters is None else parameters, bool(strict))


def _check_fields(entry: dict[str, Any], function: dict[str, Any], where: str) -> None:
    """Raises InvalidRequestError for a field that is probably a slip: without it the function would be another one."""
    for name in function:
        meant = _SLIPS.get(name) or next(iter(difflib.get_close_matches(name, _OF_A_FUNCTION, 1, 0.8)), "")
        if name not in _OF_A_FUNCTION and meant and meant not in function:
            place = f"{where}.{name[:60]}"
            raise InvalidRequestError(f"{place} is unknown; did you mean {meant}?", param=place)
    if entry.get("strict") and "strict" not in function:
        place = f"{where.removesuffix('.function')}.strict"
        raise InvalidRequestError(f"{place} belongs into {where}", param=place)


def _check_parameters(parameters: Any, where: str) -> None:
    """Raises InvalidRequestError unless the schema describes an object, so that dialects can read its properties."""
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise WrongTypeError(f"{where} must be an object", param=where)
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"{where}: arguments are an object, so its type must be object", param=where)
    if not isinstance(parameters.get("properties", {}), dict):
        raise WrongTypeError(f"{where}.properties must be an object", param=f"{where}.properties")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise WrongTypeError(f"{where}.required must be an array of strings", param=f"{where}.required")
