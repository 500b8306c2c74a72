"""llguidance's messages as one line each: what it draws with a caret becomes a place, what cannot be has its cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from alignedserve.grammar import schema as rules

_SEARCHED = 200  # parts of a schema that are tried for the place of an error
_MOST_CAUSES = 64
_PATTERN = re.compile(r"regex parse error:\n {4}(?P<pattern>.*)\n {4}(?P<before> *)\^+\nerror: (?P<reason>.*)")
_AROUND = re.compile(r'invalid regex ".*?" \(in regex\): ', re.DOTALL)
_SOURCE = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # lines of the grammar, with a caret
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_NOTHING = "Unsatisfiable schema"
_REFERRED = " while processing json-schema:///#"
_NEEDED = re.compile(r"required (?:property '(?P<name>.*)'|item) is unsatisfiable")


def one_line(message: str) -> str:
    text = _SOURCE.sub("", _AROUND.sub("", _PATTERN.sub(_pattern, message)))
    text = _PLACE.sub(lambda found: f"line {found['line']}, column {found['column']}: ", text)
    return " ".join(text.split())[:500]


def of_pattern(message: str) -> str:
    """About a regular expression, without its place in the grammar that we wrote around it."""
    return re.sub(r"^line \d+, column \d+: ", "", message)


def of_schema(schema: Any, error: str, error_of: Callable[[Any], str]) -> str:
    """The error with its place: the smallest part of the schema that has the same one by itself.

    `error_of`: the error of a part; "" if it has none. What nothing satisfies has the cause in the part that is needed.
    """
    parts: list[tuple[str, Any]] = [part for _, part in zip(range(_SEARCHED), rules.reachable(schema), strict=False)]
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    if error.startswith(_NOTHING):
        place, error = _cause(parts, shared, error, error_of)
        error, _, referred = error.partition(_REFERRED)
        return f"{error} (at {referred or place or '/'})"
    for place, part in sorted(parts, key=lambda found: -found[0].count("/")):
        if not place or error_of({**shared, **part}) == error:
            return f"{_own_words(error)} (at {place or '/'})"
    return _own_words(error)


def _cause(
    parts: Iterable[tuple[str, Any]], shared: Mapping[str, Any], error: str, error_of: Callable[[Any], str]
) -> tuple[str, str]:
    place = ""
    for _ in range(_MOST_CAUSES):
        if (needed := _NEEDED.search(error)) is None:
            break
        name = needed["name"]
        end = r"/(items|prefixItems/\d+)$" if name is None else rf"/properties/{re.escape(rules.escaped(name))}$"
        found = (
            (where, own)
            for where, part in parts
            if re.search(end, where) and (own := error_of({**shared, **part})).startswith(_NOTHING) and own != error
        )
        deeper = next(found, None)
        if deeper is None:
            break
        place, error = deeper
    return place, error


def _own_words(error: str) -> str:
    if error.startswith("oneOf constraints"):
        return "oneOf: more than one of its alternatives may match a value"
    if error.startswith("Unknown format"):
        return f"format: llguidance cannot follow this one ({error.partition(': ')[2]})"
    return error


def _pattern(found: re.Match[str]) -> str:
    place = f"at character {len(found['before']) + 1} of {found['pattern'][:80]!r}"
    return f"invalid regular expression: {found['reason']}, {place}"
