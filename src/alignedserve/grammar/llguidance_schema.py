"""What llguidance follows of JSON schema; without llguidance itself, which takes long to import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from alignedserve.grammar import schema as rules
from alignedserve.grammar.closing import close_objects

ONE_SPACE = " ?"  # between the tokens of JSON: whitespace without limit would let a model go on for ever
ESCAPES = '"\\bfnrt'  # of strings; with \u a key could be spelled so that it is not seen to be one of `properties`
NAME = "llguidance"


def _unless_closed(node: rules.Node) -> str | None:
    """`minProperties`: a key that is written twice would count twice."""
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return None if closed else "more properties than `required` names cannot be asked for where keys are free"


_KEYWORDS: Mapping[str, rules.Rule] = {
    **dict.fromkeys(
        ("uniqueItems", "contains", "not", "if", "propertyNames", "dependentRequired", "dependentSchemas",
         "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "disallow",
         "divisibleBy", "extends"), rules.never,
    ),
    "minProperties": _unless_closed,
    "pattern": rules.plain_pattern,
    "patternProperties": rules.plain_patterns,
    "const": rules.written_exactly("const"),
    "enum": rules.written_exactly("enum"),
}  # fmt: skip


def checked_schema(schema: Any, place: str = "") -> dict[str, Any]:
    """The schema as an object without what has no effect. Raises GrammarError for what cannot be followed exactly."""
    return rules.checked_schema(schema, _KEYWORDS, NAME, place)


def json_text(schema: Any, whitespace: str | None = None, place: str = "") -> str:
    """A JSON schema with our options for the compiler in place of the client's. It may be changed in place.

    Raises GrammarError.
    """
    options = {
        "whitespace_pattern": ONE_SPACE if whitespace is None else whitespace,
        "json_allowed_escapes": ESCAPES,
    }
    found = checked_schema(schema, place)
    close_objects(found)
    return json.dumps({**found, "x-guidance": options})
