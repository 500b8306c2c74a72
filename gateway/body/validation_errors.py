"""Converts pydantic's validation errors to InvalidRequestError and its subclasses, with messages for clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.failures import MissingFieldError, UnsupportedFeatureError, WrongTypeError

TOKEN_LIMIT = (1 << 31) - 1

# Error types in addition to pydantic's.
BETWEEN = "between"  # context: low, high, above, type
ONE_OF = "one_of"  # the message describes what is expected
UNSUPPORTED = "unsupported"  # the message is complete, except for the value
EMPTY = "empty"

_EXPECTED = {
    "bool_type": "true or false",
    "float_type": "a number",
    "list_type": "an array",
    "literal_error": "a string",
    "string_type": "a string",
    "unsupported": "a string",
}
_WHOLE = {
    "logit_bias": "an object of token ids and numbers",
    "messages": "an array of messages",
    "stop_token_ids": "an array of integers",
}
_ENTRIES = {"stop": "strings"}
_FIRST = {"prompt[0]": "text, a token id or an array of token ids"}
_REQUIRED = {"prompt": "prompt is required: text, token ids, or a list of either"}
_UNNAMED = "stream_options"  # errors name its fields without this prefix


def as_request_error(error: ValidationError) -> InvalidRequestError:
    """The first error that pydantic found; its `param` is the invalid field."""
    found = error.errors(include_url=False)[0]
    kind, value, message, context = found["type"], found["input"], found["msg"], found.get("ctx", {})
    where, field = _place(found["loc"])
    if kind == "missing" or (value is None and where and not where.endswith("]")):
        return MissingFieldError(_REQUIRED.get(where, f"{where} is required"), param=where)
    match kind:
        case "model_type" | "dict_type":
            return wrong_type(where, _WHOLE.get(where, "an object"), value) if where else no_object()
        case "unsupported" if isinstance(value, str):
            return UnsupportedFeatureError(message.format(shown(value)), param=where)
        case "one_of":
            return wrong_type(where, _FIRST.get(where, message), value, field)
        case "int_type":  # in a prompt: only its integers are validated without limits
            return _not_integer(where, value, 0, TOKEN_LIMIT, field)
        case "between":
            return _not_between(where, value, field, context)
    if kind in _EXPECTED and not (kind == "literal_error" and isinstance(value, str)):
        return wrong_type(where, _WHOLE.get(where, _EXPECTED[kind]), value, field)
    return InvalidRequestError(_not_allowed(kind, where, field, value, context) or f"{where}: {message}", param=field)


def _not_allowed(kind: str, where: str, field: str, value: Any, context: Mapping[str, Any]) -> str:
    """The message for an invalid value of the right type; "" for an error type that no field here produces."""
    match kind:
        case "literal_error":
            choices = context["expected"].replace("'", "").replace(" or ", ", ")
            return f"{where} must be one of {choices}; got {shown(value)}"
        case "string_pattern_mismatch":  # of a key
            return f"keys of {field} must be token ids, got {shown(value)}"
        case "empty" | "too_short":
            return f"{where} must not be empty"
        case "too_long":
            entries = _ENTRIES.get(where, "entries")
            return f"{where} may have at most {context['max_length']} {entries}, got {len(value)}"
        case "string_too_long":
            return f"{where} must have at most {context['max_length']} characters"
    return ""


def _place(loc: Sequence[int | str]) -> tuple[str, str]:
    """The location of the invalid value (`stop[1]`), and the field that it is part of (`stop`)."""
    if loc and loc[-1] == "[key]":
        loc = loc[:-2]
    if len(loc) > 1 and loc[0] == _UNNAMED:
        loc = loc[1:]
    where = field = ""
    for element in loc:
        if isinstance(element, int):
            where += f"[{element}]"
        elif element.isdigit():  # a key of an object: no field's name is a number
            where += f'["{element}"]'
        elif not element.startswith("<"):  # not the tag of a union's member
            field = where = f"{where}.{element}" if where else element
    return where, field


def _not_between(where: str, value: Any, field: str, context: Mapping[str, Any]) -> InvalidRequestError:
    kind, low, high = context["type"], context["low"], context["high"]
    if kind == "str":
        if not isinstance(value, str):
            return wrong_type(where, "a string", value, field)
        limits, given = f"have {low} to {high} characters", str(len(value))
    elif kind == "int":
        if type(value) is not int:
            return _not_integer(where, value, low, high, field)
        limits, given = f"be between {low} and {high}", shown(value)
    else:
        if type(value) is not float and type(value) is not int:
            return wrong_type(where, "a number", value, field)
        bounds = f"above {low:g}, at most {high:g}" if context["above"] else f"between {low:g} and {high:g}"
        limits, given = f"be {bounds}", shown(value)
    return InvalidRequestError(f"{where} must {limits}, got {given}", param=field)


def _not_integer(name: str, value: Any, low: int, high: int, param: str) -> WrongTypeError:
    """The error for a value that is not an integer, or is an integer with too many digits.

    The JSON parser reads the latter as a float, which is rounded, so the message gives an approximate value.
    """
    expected = f"an integer between {low} and {high}"
    if not isinstance(value, float):
        return wrong_type(name, expected, value, param)
    given = f"about {value:.3g}" if value.is_integer() and not low <= value <= high else shown(value)
    return WrongTypeError(f"{name} must be {expected}, got {given}", param=param)


def no_object() -> WrongTypeError:
    """The error for a body that is not a JSON object."""
    return WrongTypeError("the body must be a JSON object", param=None)


def shown(value: Any) -> str:
    """A value for an error message, shortened to about 60 characters."""
    if isinstance(value, list | dict):
        return f"{len(value)} entries"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def wrong_type(name: str, expected: str, value: Any, param: str = "") -> WrongTypeError:
    """The error for a value of a wrong type. `name` is the value's location: a field, or an entry of field `param`."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer"}
    given = "null" if value is None else f"{names.get(type(value), 'a number')} ({shown(value)})"
    return WrongTypeError(f"{name} must be {expected}, not {given}", param=param or name)
