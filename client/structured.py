"""Structured output in the client: a schema from a pydantic model, a dataclass or a dict, and the parsed answer back.

pydantic is not needed: a model is recognised by its methods.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from alignedserve.errors import InvalidRequestError

ResponseFormat: TypeAlias = type[Any] | Mapping[str, Any]
"""A pydantic model or a dataclass; or a dict: a JSON schema, or OpenAI's `response_format`."""

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    Any: {},
    dict: {"type": "object"},
    list: {"type": "array"},
}
_OPENAI = ("text", "json_object", "json_schema")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """`schema`: the JSON schema that is sent, as text. `read`: makes the parsed object of an answer's text."""

    schema: str
    read: Callable[[str], Any]


def wanted(response_format: Any) -> Wanted | None:
    """What an option `response_format` asks for; None for nothing. Raises InvalidRequestError."""
    if response_format is None:
        return None
    if isinstance(response_format, Mapping):
        return _of_mapping(dict(response_format))
    if hasattr(response_format, "model_json_schema") and hasattr(response_format, "model_validate_json"):
        schema = closed(response_format.model_json_schema())
        return Wanted(json.dumps(schema), response_format.model_validate_json)
    if isinstance(response_format, type) and dataclasses.is_dataclass(response_format):
        schema = _Schemas().whole(response_format)
        return Wanted(json.dumps(schema), lambda text: build(response_format, json.loads(text)))
    shown = getattr(response_format, "__name__", type(response_format).__name__)
    raise _refusal(f"must be a pydantic model, a dataclass or a dict, not {shown}")


def _of_mapping(given: dict[str, Any]) -> Wanted | None:
    if given.get("type") in _OPENAI:
        if given["type"] == "text":
            return None
        inner = given.get("json_schema")
        schema = (
            {"type": "object"} if given["type"] == "json_object" else isinstance(inner, dict) and inner.get("schema")
        )
        if not isinstance(schema, dict):
            raise _refusal("json_schema must be an object with a schema")
        return Wanted(json.dumps(schema), json.loads)
    try:
        return Wanted(json.dumps(given), json.loads)
    except (TypeError, ValueError) as error:
        raise _refusal(f"is not a JSON schema: {error}") from error


def closed(schema: Any) -> Any:
    """The schema without keys that it does not name, in objects that do not say: a model could write any number."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: value if name in ("const", "enum", "default", "examples") else closed(value)
             for name, value in schema.items()}  # fmt: skip
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


class _Schemas:
    """JSON schemas of Python's types; dataclasses become definitions, so that they may refer to themselves."""

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}

    def whole(self, kind: type[Any]) -> dict[str, Any]:
        found = self._of(kind)
        return {**found, "$defs": self._definitions}

    def _of(self, kind: Any) -> dict[str, Any]:
        if kind in _PLAIN:
            return _PLAIN[kind]
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:
            return self._of(arguments[0])
        if origin is typing.Literal:
            return {"enum": list(arguments)}
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self._of(one) for one in arguments]}
        if origin is list or (origin is tuple and arguments[1:] == (...,)):
            return {"type": "array", "items": self._of(arguments[0])}
        if origin is tuple:
            return {"type": "array", "prefixItems": [self._of(one) for one in arguments], "items": False,
                    "minItems": len(arguments)}  # fmt: skip
        if origin is dict and arguments[0] is str:
            return {"type": "object", "additionalProperties": self._of(arguments[1])}
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return {"enum": [member.value for member in kind]}
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self._of_dataclass(kind)
        raise _refusal(f"has no JSON schema for {kind!r}")

    def _of_dataclass(self, kind: type[Any]) -> dict[str, Any]:
        name = kind.__qualname__.replace("<locals>", "").replace(".", "_")
        if name not in self._definitions:
            self._definitions[name] = {}
            hints = typing.get_type_hints(kind, include_extras=True)
            own = [field for field in dataclasses.fields(kind) if field.init]
            self._definitions[name] = {
                "type": "object",
                "properties": {field.name: self._of(hints[field.name]) for field in own},
                "required": [field.name for field in own],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}


def build(kind: Any, value: Any) -> Any:
    """The object of a type that `_Schemas` describes, from JSON that satisfies the schema. Raises ValueError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return build(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        return _first_of(arguments, value)
    if origin is list and isinstance(value, list):
        return [build(arguments[0], one) for one in value]
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(build(one, item) for one, item in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: build(arguments[1], one) for key, one in value.items()}
    if origin is typing.Literal:
        if not any(value == one and type(value) is type(one) for one in arguments):
            raise ValueError(f"{value!r} is not one of {arguments}")
        return value
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{key: build(hints[key], one) for key, one in value.items()})
    if kind is Any or _is(kind, value):
        return float(value) if kind is float else value
    raise ValueError(f"{value!r} is not a {kind}")


def _is(kind: Any, value: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(kind, type) and isinstance(value, kind)


def _first_of(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return build(kind, value)
        except (TypeError, ValueError, KeyError):
            continue
    raise ValueError(f"{value!r} is of none of {kinds}")


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"response_format {problem}", param="response_format")
