"""Functions as tools: their JSON schema from signature and docstring, and their call from a model's arguments."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from alignedserve.client.docstrings import parse_docstring
from alignedserve.client.schemas import NoSchemaError, Shape, Shapes
from alignedserve.client.types import ToolCall
from alignedserve.errors import InvalidRequestError, ToolArgumentsError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    `parameters` is the JSON schema of its arguments, an object. `strict`: calls always satisfy it, by a grammar.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool
    function: Callable[..., Any] = dataclasses.field(repr=False)
    _read: Mapping[str, Callable[[Any], Any]] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        strict: bool = True,
    ) -> Tool:
        """The tool of a function, a method or a coroutine function, all of whose parameters are annotated.

        Types: those of JSON, `Literal`, `Enum`, `Optional` and other unions, lists, tuples, sets, dicts with strings as
        keys, dataclasses, TypedDicts, NamedTuples, pydantic models; and, where the program has imported pydantic, all
        that it knows. A parameter with a default may be left out. Descriptions come from the docstring (Google's,
        NumPy's or Sphinx's style) or from `Annotated[str, "…"]`.

        Raises:
            InvalidRequestError: a parameter has no annotation, or one without a JSON schema; or the name is not one.

        Example:
            def look(place: str, days: int = 1) -> str:
                \"\"\"Get the weather.

                Args:
                    place: a city.
                \"\"\"

            client.chat("How warm is it in Bern?", tools=[Tool.of(look, strict=False)])
        """
        named = name if name is not None else _name_of(function)
        if not isinstance(named, str) or not _NAME.fullmatch(named):
            raise _refusal(f"{named!r} is no name of a tool (1 to 64 letters, digits, or one of _ . -): give name=…")
        told = parse_docstring(inspect.getdoc(_code_of(function)))
        shapes = Shapes()
        read: dict[str, Callable[[Any], Any]] = {}
        properties: dict[str, Any] = {}
        required: list[str] = []
        for parameter, kind in _annotated(function, named):
            shape = _shape(shapes, kind, named, parameter.name)
            schema = dict(shape.schema)
            if about := told.parameters.get(parameter.name):
                schema.setdefault("description", about)
            if parameter.default is inspect.Parameter.empty:
                required.append(parameter.name)
            else:
                schema |= _default(parameter.default)
            properties[parameter.name] = schema
            read[parameter.name] = shape.read
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        about = told.summary if description is None else description
        return cls(named, about, shapes.with_definitions(parameters), strict, function, read)

    def to_json(self) -> dict[str, Any]:
        """In OpenAI's form."""
        about = {"description": self.description} if self.description else {}
        function = {"name": self.name, **about, "parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "function": function}

    def arguments_of(self, call: ToolCall) -> dict[str, Any]:
        """The arguments of a call as objects of the parameters' types. Raises ToolArgumentsError."""
        values = call.parsed_arguments
        found = {}
        for name, value in values.items():
            if name not in self._read:
                raise self._wrong(call, f"there is no parameter {name!r}")
            try:
                found[name] = self._read[name](value)
            except ValueError as error:
                raise self._wrong(call, f"{name}: {error}") from error
        if missing := [name for name in self.parameters["required"] if name not in values]:
            raise self._wrong(call, f"{', '.join(missing)} missing")
        return found

    def _wrong(self, call: ToolCall, problem: str) -> ToolArgumentsError:
        return ToolArgumentsError(f"{self.name}({call.arguments}): {problem}", call=call)


ToolLike: TypeAlias = Tool | Callable[..., Any] | Mapping[str, Any]
"""A function, a `Tool`, or a dict in OpenAI's form."""

ToolChoice: TypeAlias = str | Callable[..., Any] | Tool | Mapping[str, Any]
""""auto", "none", "required"; or one function, a `Tool`, its name, or OpenAI's form: the answer is a call of it."""


def tools_of(given: Iterable[ToolLike]) -> list[Tool | Mapping[str, Any]]:
    """Raises InvalidRequestError."""
    if isinstance(given, Mapping | str) or not isinstance(given, Iterable):
        raise _refusal("tools must be a list of functions, Tools or dicts")
    found: list[Tool | Mapping[str, Any]] = []
    for one in given:
        if isinstance(one, Tool | Mapping):
            found.append(one)
        elif callable(one):
            found.append(Tool.of(one))
        else:
            raise _refusal(f"a tool must be a function, a Tool or a dict, not {type(one).__name__}")
    return found


def tools_json(given: Iterable[ToolLike]) -> list[Mapping[str, Any]]:
    """In OpenAI's form. Raises InvalidRequestError."""
    return [one.to_json() if isinstance(one, Tool) else one for one in tools_of(given)]


def choice_json(choice: ToolChoice) -> str | Mapping[str, Any]:
    """In OpenAI's form. Raises InvalidRequestError."""
    if isinstance(choice, Mapping) or (isinstance(choice, str) and choice in _CHOICES):
        return choice
    name = choice if isinstance(choice, str) else choice.name if isinstance(choice, Tool) else _name_of(choice)
    return {"type": "function", "function": {"name": name}}


def result_text(value: Any) -> str:
    """What a function returned, as the model reads it: a string as it is, anything else as JSON. Raises TypeError."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plainer)


def _plainer(value: Any) -> Any:
    if hasattr(value, "model_dump") and not isinstance(value, type):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no form as JSON; return a string, or what json.dumps takes")


def _annotated(function: Callable[..., Any], name: str) -> list[tuple[inspect.Parameter, Any]]:
    """The parameters, each with its type. Raises InvalidRequestError."""
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = typing.get_type_hints(_code_of(function), include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise _refusal(f"{name}: the annotations cannot be read: {error}") from error
    for parameter in parameters:
        if parameter.kind not in _KINDS:
            raise _refusal(f"{name}: the parameter {parameter} cannot be described; use named parameters only")
        if parameter.name not in hints:
            raise _refusal(f"{name}: the parameter {parameter.name} has no annotation")
    return [(parameter, hints[parameter.name]) for parameter in parameters]


def _shape(shapes: Shapes, kind: Any, tool: str, parameter: str) -> Shape:
    try:
        return shapes.of(kind)
    except NoSchemaError as error:
        raise _refusal(f"{tool}: the parameter {parameter} {error}") from error


def _default(value: Any) -> dict[str, Any]:
    """The keyword `default` of a schema; none if the value has no form as JSON."""
    try:
        return {"default": json.loads(json.dumps(value, default=_plainer))}
    except (TypeError, ValueError):
        return {}


def _name_of(function: Any) -> Any:
    return getattr(function.func if isinstance(function, functools.partial) else function, "__name__", None)


def _code_of(function: Any) -> Any:
    """What has the annotations and the docstring."""
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.isroutine(function) or isinstance(function, type)
    return inspect.unwrap(function) if plain else type(function).__call__


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="tools")
