"""llguidance's messages as one line each: what it draws with a caret becomes a place, what cannot be has its cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from alignedserve.grammar import schema as rules
from alignedserve.grammar.places import Parts

_PATTERN = re.compile(r"regex parse error:\n {4}(?P<pattern>.*)\n {4}(?P<before> *)\^+\nerror: (?P<reason>.*)")
_AROUND = re.compile(r'invalid regex ".*?" \(in regex\): ', re.DOTALL)
_SOURCE = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # lines of the grammar, with a caret
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_MARKUP = re.compile(r" *</?non-verbose/?>")
_LARGE = "too many expressions constructed"
_NOTHING = "Unsatisfiable schema"
_REFERRED = " while processing json-schema:///#"
_NEEDED = re.compile(r"required (?:property '(?P<name>.*)'|item) is unsatisfiable")


def one_line(message: str) -> str:
    text = _SOURCE.sub("", _AROUND.sub("", _PATTERN.sub(_pattern, message)))
    text = _MARKUP.sub("", text)
    if _LARGE in text:
        text = "it is too large: shorten what it repeats"
    text = _PLACE.sub(lambda found: f"line {found['line']}, column {found['column']}: ", text)
    return " ".join(text.split())[:500]


def of_pattern(message: str) -> str:
    """About a regular expression, without its place in the grammar that we wrote around it."""
    return re.sub(r"^line \d+, column \d+: ", "", message)


def of_schema(schema: Any, error: str, error_of: Callable[[Any], str]) -> str:
    """The error with its place: the smallest part of the schema that has the same one by itself.

    `error_of`: the error of a part; "" if it has none. What nothing satisfies has the cause in the part that is needed.
    """
    parts = Parts(schema, error_of)
    if error.startswith(_NOTHING):
        place, error = _cause(parts.parts, error, parts.error_at)
        error, _, referred = error.partition(_REFERRED)
        return f"{error} (at {referred or place or '/'})"
    found = parts.place_of(error)
    return _own_words(error) if found is None else f"{_own_words(error)} (at {found or '/'})"


def _cause(places: Iterable[str], error: str, error_at: Callable[[str], str]) -> tuple[str, str]:
    """The place of what is needed and cannot be, below the root, and its error."""
    place = ""
    while (needed := _NEEDED.search(error)) is not None:
        name = needed["name"]
        end = r"/(items|prefixItems/\d+)" if name is None else rf"/properties/{re.escape(rules.escaped(name))}"
        below = [where for where in places if re.fullmatch(re.escape(place) + end, where)]
        deeper = next((where for where in below if error_at(where).startswith(_NOTHING)), None)
        if deeper is None:
            break
        place, error = deeper, error_at(deeper)
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
