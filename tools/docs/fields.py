"""The page of all fields: each field of every request and reply, from the OpenAPI document that gateways serve.

The document's schemas of requests are those of the pydantic models that check them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from field_meanings import MEANINGS
from markdown_text import NOTICE, code, plain, table

from alignedserve.gateway.http.openapi import openapi_json

Schema = Mapping[str, Any]

HEAD = f"""\
# Fields

{NOTICE}

Every field of the [HTTP API](http.md). `a.b` is the field `b` of the object `a`, `a[]` is an entry of the list `a`.
Requests are checked by the models from which this page is made. A field that is not here is ignored, and named in the
header `x-alignedserve-ignored-fields`, or refused by name. `/v1/responses` and `/v1/messages` also take the other
fields of `/v1/chat/completions`, except those that have a name of their own there.

The Python client has the fields of completions and chat completions as [options](python.md#client) of the same names.
"""
_FORM = "multipart/form-data"
_ERRORS = {"Error": "any error", "MessagesError": "any error of `/v1/messages`"}
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
    "maxProperties": "at most {} entries",
}


@dataclass(frozen=True, slots=True)
class Field:
    """`needed`: a request must have it, a reply always has it. `default`: JSON, "" without one."""

    path: str
    kind: str
    default: str
    bounds: str
    meaning: str
    needed: bool


@cache
def _api() -> Any:
    return json.loads(openapi_json())


def _component(schema: Schema) -> Schema:
    """The schema that a reference is about."""
    found: Schema = _api()["components"]["schemas"][_name(schema)] if "$ref" in schema else schema
    return found


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def fields_of(component: str) -> list[Field]:
    """All fields of a component, or of the form of a path, each followed by those within it."""
    if component.startswith("/"):
        schema = _api()["paths"][component]["post"]["requestBody"]["content"][_FORM]["schema"]
    else:
        schema = _api()["components"]["schemas"][component]
    return list(_fields(component, schema, "", ()))


def _fields(component: str, schema: Schema, prefix: str, within: tuple[str, ...]) -> Iterator[Field]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        default = json.dumps(field["default"]) if field.get("default") is not None else ""
        yield Field(path, _kind(field), default, _bounds(field), _meaning(component, path, field), name in required)
        for reference, inner, suffix in _inner(field, ""):
            if reference not in within:
                yield from _fields(component, inner, f"{path}{suffix}.", (*within, reference))


def _inner(schema: Schema, suffix: str, reference: str = "") -> Iterator[tuple[str, Schema, str]]:
    """The objects with fields that a value may be or consist of."""
    if "$ref" in schema:
        yield from _inner(_component(schema), suffix, _name(schema))
    elif "properties" in schema:
        yield reference or str(id(schema)), schema, suffix
    for one in schema.get("anyOf", ()):
        yield from _inner(one, suffix)
    if isinstance(schema.get("items"), Mapping):
        yield from _inner(schema["items"], f"{suffix}[]")


def _meaning(component: str, path: str, field: Schema) -> str:
    """The field's description, else the longest end of its path that has a meaning."""
    if "description" in field:
        return str(field["description"])
    parts = path.split(".")
    ends = [f"{component}.{path}", *(".".join(parts[number:]) for number in range(len(parts)))]
    return next((MEANINGS[end] for end in ends if end in MEANINGS), "")


def _kind(schema: Schema) -> str:
    if "$ref" in schema:
        return _kind(_component(schema))
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(code(json.dumps(value)) for value in schema["enum"] if value is not None)
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(_kind({**schema, "type": name}) for name in kind if name != "null")
    if kind == "array":
        return f"list of {_plural(_kind(schema.get('items', {})))}"
    return {"string": "text", "integer": "whole number"}.get(kind, kind)


def _plural(kind: str) -> str:
    known = {"text": "texts", "whole number": "whole numbers", "number": "numbers", "object": "objects"}
    return known.get(kind, kind)


def _bounds(schema: Schema) -> str:
    if "$ref" in schema:
        return _bounds(_component(schema))
    own = [words.format(f"{schema[name]:,}") for name, words in _LIMITS.items() if name in schema]
    if isinstance(schema.get("items"), Mapping) and (each := _bounds(schema["items"])):
        own.append(f"each {each}")
    others = [_bounds(one) for one in schema.get("anyOf", ())]
    return "; ".join(dict.fromkeys(filter(None, [", ".join(own), *others])))


# ---- which endpoints have them


def requests() -> dict[str, list[str]]:
    """The component of each JSON body, or the path of a form, and the paths that take it."""
    found: dict[str, list[str]] = {}
    for path, _, operation in _operations():
        body = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None and _component(body["schema"]).get("properties"):
            found.setdefault(_name(body["schema"]), []).append(code(path))
        if _FORM in operation.get("requestBody", {}).get("content", {}):
            found[path] = [code(path)]
    return found


def replies() -> dict[str, list[str]]:
    """The component of each JSON reply, chunk and error, and the paths that answer with it."""
    found: dict[str, list[str]] = {}
    for path, method, operation in _operations():
        for status, answer in operation["responses"].items():
            for media, content in answer.get("content", {}).items():
                schema, where = content["schema"], code(f"{method} {path}")
                if media == "text/event-stream":
                    schema, where = schema["properties"]["data"].get("contentSchema", {}), f"{code(path)}, each chunk"
                if "$ref" in schema and media != "application/octet-stream":
                    name = _name(schema)
                    where = _ERRORS.get(name, where) if status >= "400" else where
                    found.setdefault(name, []).append(where)
    return found


def _operations() -> Iterator[tuple[str, str, Schema]]:
    for path, item in _api()["paths"].items():
        for method in item.keys() & {"get", "post", "delete"}:
            yield path, method.upper(), item[method]


def page() -> str:
    head = ("field", "type", "default", "bounds", "meaning", "where")
    lines = [HEAD, "## Of requests", ""]
    lines += table(head, _rows(requests(), lambda field: "required" if field.needed else code(field.default)))
    lines += ["## Of replies", "", "A field that is not always there says so by an empty column `always`.", ""]
    head = ("field", "type", "always", "bounds", "meaning", "where")
    lines += table(head, _rows(replies(), lambda field: "yes" if field.needed else ""))
    return "\n".join(lines)


def _rows(components: Mapping[str, list[str]], third: Any) -> Iterable[tuple[str, ...]]:
    """A row for each field; those that are the same in several places have one."""
    places: dict[Field, list[str]] = {}
    for component, paths in components.items():
        for field in fields_of(component):
            places.setdefault(field, []).extend(paths)
    for field in sorted(places, key=lambda field: field.path):
        where = ", ".join(dict.fromkeys(places[field]))
        yield code(field.path), field.kind, third(field), field.bounds, plain(field.meaning), where
