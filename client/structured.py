"""Structured output in the client: a schema from a pydantic model, a dataclass or a dict, and the parsed answer."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from alignedserve.client.schemas import NoSchemaError, Shapes, closed
from alignedserve.errors import InvalidRequestError

ResponseFormat: TypeAlias = type[Any] | Mapping[str, Any]
"""A pydantic model, a dataclass or a TypedDict; or a dict: a JSON schema, or OpenAI's `response_format`."""

_OPENAI = ("text", "json_object", "json_schema")
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_SPACES = ("whitespace_pattern", "disable_any_whitespace")
FORMAT, OUTPUTS = "response_format", "structured_outputs"


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer must follow: `text` of a grammar of this `kind`, as in a proto `Grammar`.

    `read`: makes the parsed object of an answer's text; None if there is none. `whitespace`: the pattern between tokens
    of JSON.
    """

    text: str
    read: Callable[[str], Any] | None
    kind: str = "json"
    whitespace: str | None = None

    @property
    def schema(self) -> str:
        """The JSON schema that is sent."""
        return self.text


def asked(options: Mapping[str, Any]) -> Wanted | None:
    """What the options of a request ask for; None for nothing. Raises InvalidRequestError."""
    found = wanted(options.get(FORMAT))
    other = _of_outputs(options.get(OUTPUTS))
    if found is not None and other is not None:
        message = f"{FORMAT} and {OUTPUTS} each ask for structured output; set only one"
        raise InvalidRequestError(message, param=OUTPUTS)
    return found or other


def wanted(response_format: Any) -> Wanted | None:
    """What an option `response_format` asks for; None for nothing. Raises InvalidRequestError."""
    if response_format is None:
        return None
    if isinstance(response_format, Mapping):
        return _of_mapping(dict(response_format))
    return _of_type(response_format, FORMAT)


def _of_type(kind: Any, param: str) -> Wanted:
    if hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate_json"):

        def read(text: str) -> Any:
            json.loads(text)  # what is cut raises JSONDecodeError, as for other types
            return kind.model_validate_json(text)

        return Wanted(json.dumps(closed(kind.model_json_schema())), read)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)):
        try:
            shape = Shapes().whole(kind)
        except NoSchemaError as error:
            raise _refusal(str(error), param) from error
        return Wanted(json.dumps(shape.schema), lambda text: shape.read(json.loads(text)))
    shown = getattr(kind, "__name__", type(kind).__name__)
    raise _refusal(f"must be a pydantic model, a dataclass, a TypedDict or a dict, not {shown}", param)


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
        given = schema
    return Wanted(_as_text(given, FORMAT), json.loads)


def _of_outputs(given: Any) -> Wanted | None:
    """What an option `structured_outputs` asks for."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refusal(f"must be a dict with one of {', '.join(_KINDS)}", OUTPUTS)
    space = _space(given)
    asked = [name for name in given if given[name] not in (None, False) and name not in _SPACES]
    if len(asked) != 1 or asked[0] not in _KINDS:
        raise _refusal(f"must have one of {', '.join(_KINDS)}, and may have {' or '.join(_SPACES)}", OUTPUTS)
    (kind,) = asked
    value = given[kind]
    if kind == "json_object":
        kind, value = "json", {"type": "object"}
    if kind == "json":
        if isinstance(value, type):
            return dataclasses.replace(_of_type(value, OUTPUTS), whitespace=space)
        text = value if isinstance(value, str) else _as_text(value, OUTPUTS)
        return Wanted(text, json.loads, whitespace=space)
    if kind == "choice":
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise _refusal(f"choice must be a list of strings, not {type(value).__name__}", OUTPUTS)
        return Wanted(_as_text(list(value), OUTPUTS), str, kind)
    if kind == "structural_tag" and not isinstance(value, str):
        return Wanted(_as_text(value, OUTPUTS), None, kind)
    if not isinstance(value, str):
        raise _refusal(f"{kind} must be a string", OUTPUTS)
    return Wanted(value, None, kind)


def _space(given: Mapping[str, Any]) -> str | None:
    """The pattern between tokens of JSON; None: the default."""
    pattern = given.get("whitespace_pattern")
    if not isinstance(pattern, str | None) or (pattern and given.get("disable_any_whitespace")):
        raise _refusal("may have one of whitespace_pattern, a string, and disable_any_whitespace", OUTPUTS)
    return "" if given.get("disable_any_whitespace") else pattern


def build(kind: Any, value: Any) -> Any:
    """The object of a type from JSON that satisfies its schema. Raises ValueError."""
    return Shapes().of(kind).read(value)


def _as_text(value: Any, param: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise _refusal(f"is not JSON: {error}", param) from error


def reader(options: Mapping[str, Any]) -> Callable[[str], Any] | None:
    """What makes the parsed object of an answer's text; None without structured output."""
    found = asked(options)
    return None if found is None else found.read


def _refusal(problem: str, param: str = FORMAT) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {problem}", param=param)
