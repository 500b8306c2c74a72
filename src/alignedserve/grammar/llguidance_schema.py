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
MOST_REPEATED = 1 << 16  # characters


_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTHS = ("(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
           "02-(?:0[1-9]|1[0-9]|2[0-8])")  # fmt: skip
_DATE = f"(?:{_YEAR}-(?:{'|'.join(_MONTHS)})|{_LEAP}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](?:\\.[0-9]+)?(?:Z|[+-]{_HOUR})"
_TIMES = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def _unless_closed(node: rules.Node) -> str | None:
    """`minProperties`: a key that is written twice would count twice."""
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return None if closed else "more properties than `required` names cannot be asked for where keys are free"


# Patterns that clients write, and their equals without look-ahead: Zod's of an address, Pydantic's of a decimal number.
_WITHOUT_LOOKING = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}


def _pattern(node: rules.Node) -> str | None:
    node["pattern"] = _WITHOUT_LOOKING.get(str(node["pattern"]), node["pattern"])
    trouble = rules.plain_pattern(node)
    if trouble is None:
        node["pattern"] = rules.common_classes(node["pattern"])
    return trouble


def _names(node: rules.Node) -> str | None:
    """`propertyNames` that lists them: the same as `properties` of a closed object."""
    names, own = node["propertyNames"], node.get("properties", {})
    listed = names.get("enum") if isinstance(names, dict) and names.keys() <= {"enum", "type", "title"} else None
    if not isinstance(listed, list) or names.get("type", "string") != "string" or not isinstance(own, dict):
        return rules.never(node)
    keys = [name for name in listed if isinstance(name, str)]
    if not keys or own.keys() - set(keys) or node.get("patternProperties"):
        return rules.never(node)
    rest = node.get("additionalProperties", True)
    text = json.dumps(rest)  # it is written for each key
    if "propertyNames" in text or len(keys) * len(text) > MOST_REPEATED:
        return "with so many names, list them as `properties` of an object with `additionalProperties: false`"
    if rest is not False:
        node["properties"] = {key: own.get(key, {} if rest is True else rest) for key in keys}
        node["additionalProperties"] = False
    del node["propertyNames"]
    return None


def _format(node: rules.Node) -> str | None:
    """Dates and times as patterns: llguidance writes February 29 in any year, and leap seconds in any minute."""
    pattern = _TIMES.get(node["format"]) if isinstance(node["format"], str) else None
    if pattern is not None and isinstance(node.get("allOf", []), list):
        del node["format"]
        node["allOf"] = [*node.get("allOf", []), {"pattern": pattern}]
    return None


def _pattern_keys(node: rules.Node) -> str | None:
    """`patternProperties`: where other keys are free, engines must agree on which keys a pattern means."""
    trouble = rules.plain_patterns(node)
    if trouble is None and node.get("additionalProperties") is not False:
        own = node["patternProperties"]
        differing = [key for key in own if rules.has_classes(key)] if isinstance(own, dict) else []
        if differing:
            return (
                f"the pattern {differing[0][:80]!r} has a class such as \\d beside free keys; write [0-9] or the like"
            )
    return trouble


_KEYWORDS: Mapping[str, rules.Rule] = {
    **dict.fromkeys(
        ("uniqueItems", "contains", "not", "if", "dependentRequired", "dependentSchemas", "dependencies",
         "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "disallow", "divisibleBy",
         "extends"), rules.never,
    ),
    "propertyNames": _names,
    "minProperties": _unless_closed,
    "format": _format,
    "pattern": _pattern,
    "patternProperties": _pattern_keys,
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
