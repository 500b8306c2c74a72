"""Fields of a JSON body: each knows its type, its limits and its JSON schema, so that the two cannot differ.

Types are strict: a bool is no integer, "2" is no number. Null means "not given" everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.failures import WrongTypeError

Parse = Callable[[Any, str], Any]  # value, name of the field -> checked value

INT64 = (-(1 << 63), (1 << 63) - 1)
TOKEN_LIMIT = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Field:
    """`schema` is the JSON schema of a value that is given; `doc` its description."""

    name: str
    schema: Mapping[str, Any]
    parse: Parse
    doc: str = ""

    def json_schema(self) -> dict[str, Any]:
        schema = dict(self.schema)
        kind = schema.get("type")
        if isinstance(kind, str):
            schema["type"] = [kind, "null"]
        else:
            schema = {"anyOf": [*schema.pop("anyOf"), {"type": "null"}], **schema}
        return {**schema, "description": self.doc} if self.doc else schema


def read_fields(body: Mapping[str, Any], fields: Iterable[Field]) -> dict[str, Any]:
    """The checked values of all fields that are given. Raises InvalidRequestError for the first that is wrong."""
    return {
        field.name: field.parse(value, field.name) for field in fields if (value := body.get(field.name)) is not None
    }


def shown(value: Any) -> str:
    """A value in an error message, cut short."""
    if isinstance(value, list | dict):
        return f"{len(value)} entries"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def wrong_type(name: str, expected: str, value: Any, param: str = "") -> WrongTypeError:
    """`name` says which value is at fault: a field, or an entry of the field `param`."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer"}
    given = "null" if value is None else f"{names.get(type(value), 'a number')} ({shown(value)})"
    return WrongTypeError(f"{name} must be {expected}, not {given}", param=param or name)


def not_integer(name: str, value: Any, low: int, high: int, param: str = "") -> WrongTypeError:
    """Of a value that is not one, or has too many digits: such a one comes as a float, which has lost the last."""
    expected = f"an integer between {low} and {high}"
    if not isinstance(value, float):
        return wrong_type(name, expected, value, param)
    given = f"about {value:.3g}" if value.is_integer() and not low <= value <= high else shown(value)
    return WrongTypeError(f"{name} must be {expected}, got {given}", param=param or name)


def boolean(name: str, doc: str, default: bool = False) -> Field:
    def parse(value: Any, where: str) -> bool:
        if not isinstance(value, bool):
            raise wrong_type(where, "true or false", value)
        return value

    return Field(name, {"type": "boolean", "default": default}, parse, doc)


def integer(name: str, doc: str, low: int, high: int, **schema: Any) -> Field:
    def parse(value: Any, where: str) -> int:
        if type(value) is not int:
            raise not_integer(where, value, low, high)
        if not low <= value <= high:
            raise InvalidRequestError(f"{where} must be between {low} and {high}, got {shown(value)}", param=where)
        return value

    return Field(name, {"type": "integer", "minimum": low, "maximum": high, **schema}, parse, doc)


def number(name: str, doc: str, low: float, high: float, *, above_low: bool = False, **schema: Any) -> Field:
    def parse(value: Any, where: str) -> float:
        if type(value) is not float and type(value) is not int:
            raise wrong_type(where, "a number", value)
        if not low <= value <= high or (above_low and value == low) or not math.isfinite(value):
            limits = f"above {low:g}, at most {high:g}" if above_low else f"between {low:g} and {high:g}"
            raise InvalidRequestError(f"{where} must be {limits}, got {shown(value)}", param=where)
        return float(value)

    bound = {"exclusiveMinimum": low} if above_low else {"minimum": low}
    return Field(name, {"type": "number", **bound, "maximum": high, **schema}, parse, doc)


def string(name: str, doc: str, max_length: int = 1 << 20) -> Field:
    def parse(value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(where, "a string", value)
        if len(value) > max_length:
            raise InvalidRequestError(f"{where} must have at most {max_length} characters", param=where)
        return value

    return Field(name, {"type": "string", "maxLength": max_length}, parse, doc)


def string_or_strings(name: str, doc: str, most: int, max_length: int) -> Field:
    """One non-empty string, or up to `most` of them."""

    def parse(value: Any, where: str) -> tuple[str, ...]:
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list):
            raise wrong_type(where, "a string or an array of strings", value)
        if len(entries) > most:
            raise InvalidRequestError(f"{where} may have {most} strings at most, got {len(entries)}", param=where)
        for number, entry in enumerate(entries):
            named = where if entries is not value else f"{where}[{number}]"
            if not isinstance(entry, str):
                raise wrong_type(named, "a string", entry, where)
            if not 1 <= len(entry) <= max_length:
                message = f"{named} must have 1 to {max_length} characters, got {len(entry)}"
                raise InvalidRequestError(message, param=where)
        return tuple(dict.fromkeys(entries))

    one = {"type": "string", "minLength": 1, "maxLength": max_length}
    return Field(name, {"anyOf": [one, {"type": "array", "items": one, "maxItems": most}]}, parse, doc)


def integers(name: str, doc: str, most: int) -> Field:
    """Non-negative integers (token ids)."""

    def parse(value: Any, where: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise wrong_type(where, "an array of integers", value)
        if len(value) > most:
            raise InvalidRequestError(f"{where} may have {most} entries at most, got {len(value)}", param=where)
        for number, entry in enumerate(value):
            if type(entry) is not int:
                raise not_integer(f"{where}[{number}]", entry, 0, TOKEN_LIMIT, where)
            if not 0 <= entry <= TOKEN_LIMIT:
                message = f"{where}[{number}] must be between 0 and {TOKEN_LIMIT}, got {entry}"
                raise InvalidRequestError(message, param=where)
        return tuple(value)

    item = {"type": "integer", "minimum": 0, "maximum": TOKEN_LIMIT}
    return Field(name, {"type": "array", "items": item, "maxItems": most}, parse, doc)


def biases(name: str, doc: str, most: int, limit: float) -> Field:
    """An object of token ids (as strings of digits) and numbers."""

    def parse(value: Any, where: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise wrong_type(where, "an object of token ids and numbers", value)
        if len(value) > most:
            raise InvalidRequestError(f"{where} may have {most} entries at most, got {len(value)}", param=where)
        checked: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequestError(f"keys of {where} must be token ids, got {shown(key)}", param=where)
            named = f'{where}["{key}"]'
            if type(bias) is not float and type(bias) is not int:
                raise wrong_type(named, "a number", bias, where)
            if not -limit <= bias <= limit:
                message = f"{named} must be between -{limit:g} and {limit:g}, got {shown(bias)}"
                raise InvalidRequestError(message, param=where)
            checked[int(key)] = float(bias)
        return tuple(checked.items())

    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -limit, "maximum": limit},
        "maxProperties": most,
    }
    return Field(name, schema, parse, doc)
