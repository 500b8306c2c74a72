"""What a parameter's JSON schema says of its type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_MOST_DEPTH = 16
_MOST_VISITS = 1000  # of subschemas: references may lead to one again and again
_NAMES: dict[type[Any], str] = {str: "string", list: "array", dict: "object"}
TEXT = frozenset({"string"})
Types = frozenset[str] | None
"""Names of JSON's types, with "number" for integers; None: any type."""


def type_of(value: Any) -> str:
    """The name of a value's type."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return _NAMES.get(type(value), "null")


def parameter_schema(schema: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The schema of a parameter, with a reference at its top followed; None if there is none."""
    properties = schema.get("properties")
    inner = properties.get(name) if isinstance(properties, dict) else None
    for _ in range(_MOST_DEPTH):
        if not isinstance(inner, dict):
            return None
        if "$ref" not in inner:
            return inner
        inner = target_of(inner["$ref"], schema)
    return None


def parameter_types(schema: Mapping[str, Any], name: str) -> Types:
    """The types that a parameter may have. One that the schema does not describe is text."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not isinstance(properties.get(name), dict):
        return TEXT
    return types_of(properties[name], schema)


def types_of(inner: Any, schema: Mapping[str, Any]) -> Types:
    """The types that a schema within `schema` allows. What lies too deep, or comes too late, allows any type."""
    return _types_of(inner, schema, _MOST_DEPTH, iter(range(_MOST_VISITS)))


def _types_of(inner: Any, schema: Mapping[str, Any], depth: int, visits: Iterator[int]) -> Types:
    if not isinstance(inner, dict) or depth == 0 or next(visits, None) is None:
        return None

    def within(one: Any) -> Types:
        return _types_of(one, schema, depth - 1, visits)

    kind = inner.get("type")
    said = [kind] if isinstance(kind, str) else kind
    allowed = [frozenset("number" if one == "integer" else str(one) for one in said)] if isinstance(said, list) else []
    options = inner.get("enum", [inner["const"]] if "const" in inner else None)
    if isinstance(options, list):
        allowed.append(frozenset(map(type_of, options)))
    branches: list[Types] = [within(target_of(inner["$ref"], schema))] if "$ref" in inner else []
    unions = [inner[key] for key in ("anyOf", "oneOf") if isinstance(inner.get(key), list)]
    branches += [_union(map(within, union)) for union in unions]
    if isinstance(inner.get("allOf"), list):
        branches += map(within, inner["allOf"])
    allowed += [types for types in branches if types is not None]
    return frozenset.intersection(*allowed) if allowed else None


def _union(branches: Iterable[Types]) -> Types:
    found: frozenset[str] = frozenset()
    for types in branches:
        if types is None:
            return None
        found |= types
    return found


def target_of(reference: Any, schema: Mapping[str, Any]) -> Any:
    """What a reference within the schema (`#/$defs/NAME`) refers to; None if it is another one."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = schema
    for key in reference[2:].split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
