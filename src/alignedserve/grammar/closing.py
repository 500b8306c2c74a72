"""Objects that name their properties, and do not say whether they have others, have no others.

Without this, a model may write further keys, which clients do not use, and a small model may never stop. Other servers
have the same default. Every answer is still valid: an object stays open if it needs a key beside those that it names,
or if another schema applies to the same value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]

_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "dependencies",
             "$dynamicRef", "$recursiveRef", "extends")  # fmt: skip
_OF_KEYS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
            "dependentRequired")  # fmt: skip
_ALTERNATIVES = ("$ref", "anyOf")  # where they stand alone, each of them may be closed
_SAYS_NOTHING = frozenset(("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
                           "$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "nullable"))  # fmt: skip


def close_objects(schema: Any) -> None:
    """Add `additionalProperties: false`, in place. References lead to places within the schema."""
    alone: dict[int, bool] = {}
    nodes: dict[int, Node] = {}
    waiting: list[tuple[Any, bool]] = [(schema, True)]
    while waiting:
        node, is_alone = waiting.pop()
        known = alone.get(id(node))
        if not isinstance(node, dict) or known is False or known is is_alone:
            continue
        alone[id(node)], nodes[id(node)] = is_alone, node
        waiting += _applied(node, schema, is_alone)
    for key, node in nodes.items():
        if alone[key] and _may_be_closed(node):
            node["additionalProperties"] = False


def _may_be_closed(node: Node) -> bool:
    own, required = node.get("properties"), node.get("required", [])
    if not isinstance(own, dict) or any(name in node for name in (*_IN_PLACE, *_OF_KEYS)):
        return False
    return isinstance(required, list) and all(isinstance(key, str) and key in own for key in required)


def _applied(node: Node, root: Any, alone: bool) -> Iterator[tuple[Any, bool]]:
    """The schemas within it, and whether no other one applies to the same value."""
    in_place = [name for name in _IN_PLACE if name in node]
    single = len(in_place) == 1 and in_place[0] in _ALTERNATIVES and not node.keys() - _SAYS_NOTHING - {*in_place}
    for name in in_place:
        inner = node[name]
        if name == "$ref":
            yield _at(root, inner), alone and single
        elif isinstance(inner, list):
            yield from ((child, alone and single) for child in inner)
        else:
            children = inner.values() if isinstance(inner, dict) and name.startswith("dependen") else [inner]
            yield from ((child, False) for child in children)
    below = alone and not in_place
    for name in ("properties", "patternProperties"):
        if isinstance(inner := node.get(name), dict):
            yield from ((child, below and "patternProperties" not in node) for child in inner.values())
    for name in ("additionalProperties", "unevaluatedProperties", "propertyNames"):
        yield node.get(name), below
    for name in ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"):
        children = node[name] if isinstance(node.get(name), list) else [node.get(name)]
        yield from ((child, below and "contains" not in node) for child in children)


def _at(root: Any, reference: Any) -> Any:
    """What a reference within the schema leads to; None if it is not such a one."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
