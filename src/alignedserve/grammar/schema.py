"""What of a JSON schema a library cannot follow exactly, by keyword and place, before the library sees the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, TypeGuard
from urllib.parse import unquote

from alignedserve.errors import GrammarError

LIBRARY = "{library}"  # in a rule's reason: the library's name
Node = dict[str, Any]
Rule = Callable[[Node], str | None]
"""Why a keyword of this schema cannot be followed; None if it can."""

_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("dependentSchemas", "patternProperties", "properties")
_ASSERTING = frozenset({*_ONE, *_LISTS, *_MAPS, "$ref", "const", "dependentRequired", "dependencies", "enum",
                        "exclusiveMaximum", "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength",
                        "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum",
                        "multipleOf", "pattern", "required", "type", "uniqueItems"})  # fmt: skip
_IDLE: dict[str, tuple[Node, ...]] = {"propertyNames": ({}, {"type": "string"})}
_LONGEST = max(map(len, _ASSERTING)) + 1  # of keywords that are looked at
MOST_DEPTH = 64  # of a schema's subschemas, references not counted
_FORMATS = {"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6",
            "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer",
            "relative-json-pointer", "regex"}  # fmt: skip
MOST_NUMBER = (1 << 53) - 1  # beyond it integers are rounded, and -2^63 ends llguidance's process
_WRITABLE = frozenset("\b\f\n\r\t")  # control characters with an escape of their own
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def parsed_schema(text: str, kind: str) -> Any:
    """The JSON text's value. Raises GrammarError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"{kind}: it is not JSON: {error}") from error
    except RecursionError:
        raise GrammarError(f"{kind}: it is nested too deeply") from None
    require_characters(found, kind)
    return found


def require_characters(value: Any, where: str) -> None:
    """Raises GrammarError for half of a surrogate pair: it is no character, and an error about it could not be sent."""
    for text in _texts(value):
        if found := _SURROGATE.search(text):
            escape = f"\\u{ord(found[0]):04x}"
            raise GrammarError(f"{where}: {escape} is half of a surrogate pair, which is no character")


def checked_schema(schema: Any, keywords: Mapping[str, Rule], library: str, place: str = "") -> dict[str, Any]:
    """A copy of the schema, as an object. Raises GrammarError for what `library` cannot follow by its `keywords`."""
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a schema is an object, true or false, not {json.dumps(schema)[:50]}")
    if schema is False:
        raise GrammarError("no value satisfies the schema false")
    try:
        found: dict[str, Any] = {} if schema is True else json.loads(json.dumps(schema))
        check_schema(found, keywords, library, place)
    except RecursionError:
        raise GrammarError("a schema is nested too deeply") from None
    return found


def check_schema(schema: Any, rules: Mapping[str, Rule], library: str, place: str = "") -> None:
    """Raises GrammarError, which names the keyword and its place, for what `library` cannot follow by its `rules`.

    Removes keywords that have no effect, such as `uniqueItems: false`, and unknown formats, which assert nothing. Only
    what can be reached from the root is looked at. `place`: JSON pointer of the schema.
    """
    for found, node in reachable(schema, place):
        _remove_idle(node)
        _limit_numbers(node, found)
        for keyword in list(node):
            reason = rules[keyword](node) if keyword in rules and keyword in node else None
            if reason is None and (meant := _meant(keyword)):
                reason = f"JSON schema has no such keyword; did you mean {meant!r}?"
            if reason is not None:
                reason = reason.replace(LIBRARY, library)  # not `format`: it may show a pattern, with braces
                raise GrammarError(f"{keyword} at {found or '/'}: {reason}")


def _meant(keyword: str) -> str:
    """The keyword that this one misspells, so that nothing would be checked; "" if it misspells none."""
    short = len(keyword) <= _LONGEST and keyword not in _ASSERTING and not keyword.startswith("x-")
    return _nearest(keyword) if short else ""


@lru_cache(maxsize=8192)
def _nearest(keyword: str) -> str:
    plain = keyword.replace("_", "").replace("-", "").lower()
    return next(
        (known for known in sorted(_ASSERTING) if plain == known.lower() or _one_slip(plain, known.lower())), ""
    )


def _one_slip(keyword: str, known: str) -> bool:
    """Whether one letter is wrong, missing or too much, or two have changed places. A plural is a word of its own."""
    if min(len(keyword), len(known)) < 5 or abs(len(keyword) - len(known)) > 1 or keyword == known + "s":
        return False
    same = next((at for at, (ours, theirs) in enumerate(zip(keyword, known, strict=False)) if ours != theirs), None)
    same = min(len(keyword), len(known)) if same is None else same
    ours, theirs = keyword[same:], known[same:]
    if len(ours) == len(theirs):
        return ours[1:] == theirs[1:] or (ours[1::-1] == theirs[:2] and ours[2:] == theirs[2:])
    return ours[1:] == theirs if len(ours) > len(theirs) else ours == theirs[1:]


def reachable(schema: Any, place: str = "") -> Iterator[tuple[str, Node]]:
    """Each schema that applies to a value, with its JSON pointer; references within the document are followed.

    Raises GrammarError for one that is nested too deeply, or leads nowhere, and for a reference that is not a place in
    this schema: what it leads to would not be looked at.
    """
    seen: set[int] = set()
    key = "id" if isinstance(schema, dict) and re.search("draft-0[34]", str(schema.get("$schema"))) else "$id"
    base = _address(schema, key)
    waiting: list[tuple[str, Any, int]] = [(place, schema, 0)]
    while waiting:
        found, node, depth = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        if node is not schema and _address(node, key) and _refers(node):
            raise GrammarError(
                f"{key} at {found}: references within a schema with an address of its own are not followed"
            )
        if depth > MOST_DEPTH:
            raise GrammarError(f"{found[:200]}: schemas are nested more than {MOST_DEPTH} deep")
        seen.add(id(node))
        yield found, node
        waiting += ((f"{found}/{name}", child, depth + 1) for name, child in _children(node))
        reference = node.get("$ref")
        if isinstance(reference, str):
            own = reference.removeprefix(base) if base else reference
            if own not in ("", "#") and not own.startswith("#/"):
                raise GrammarError(f"$ref at {found or '/'}: {reference[:200]!r} is not a place in this schema (#/…)")
            waiting.append((place + own[1:], _at(schema, own, found), depth))


def _address(node: Any, key: str) -> str:
    """The schema's own address, which its references are relative to; "" if it has none."""
    found = node.get(key) if isinstance(node, dict) else None
    return found.partition("#")[0] if isinstance(found, str) else ""


def _refers(node: Any) -> bool:
    waiting = [node]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            if isinstance(found.get("$ref"), str):
                return True
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
    return False


def _children(node: Node) -> Iterator[tuple[str, Any]]:
    for name in _ONE:
        if isinstance(node.get(name), dict):
            yield name, node[name]
    for name in _LISTS:
        if isinstance(children := node.get(name), list):
            yield from ((f"{name}/{index}", child) for index, child in enumerate(children))
    for name in _MAPS:
        if isinstance(own := node.get(name), dict):
            yield from ((f"{name}/{escaped(key)}", child) for key, child in own.items())


def escaped(key: str) -> str:
    """A key as part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _at(schema: Any, reference: str, place: str) -> Any:
    found = schema
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise GrammarError(f"$ref at {place or '/'}: the schema has nothing at {reference[:200]}")
    return found


def _remove_idle(node: Node) -> None:
    """Remove keywords that change nothing, and `$schema`: a keyword asserts what it says in each draft that has it."""
    node.pop("$schema", None)
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if "contains" not in node:
        node.pop("minContains", None)
        node.pop("maxContains", None)
    if "if" not in node or ("then" not in node and "else" not in node):
        for name in ("if", "then", "else"):
            node.pop(name, None)
    for name in ("unevaluatedProperties", "unevaluatedItems", "propertyNames", "contentSchema"):
        if node.get(name, 0) is True or node.get(name) in _IDLE.get(name, ({},)):
            del node[name]
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        if node.get(name) == {}:
            del node[name]
    if node.get("not", 0) is False:
        del node["not"]
    if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
        del node["format"]
    least, required = node.get("minProperties"), node.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least <= len(set(map(str, required))):
        del node["minProperties"]


def _limit_numbers(node: Node, place: str) -> None:
    """Cut wide bounds to the exact integers of JSON (I-JSON, RFC 7493). Raises GrammarError for numbers beyond them."""
    for keyword in ("maximum", "exclusiveMaximum"):
        if is_number(bound := node.get(keyword)):
            node[keyword] = min(bound, MOST_NUMBER)
    for keyword in ("minimum", "exclusiveMinimum"):
        if is_number(bound := node.get(keyword)):
            node[keyword] = max(bound, -MOST_NUMBER)
    for keyword in ("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "const", "enum"):
        if any(abs(number) > MOST_NUMBER for number in _numbers(node.get(keyword))):
            raise GrammarError(f"{keyword} at {place or '/'}: numbers beyond ±{MOST_NUMBER} are not written exactly")


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- rules


def never(node: Node) -> str:
    return f"{LIBRARY} cannot follow this keyword"


def written_exactly(keyword: str) -> Rule:
    """For `const` and `enum`: control characters without a short escape are not written."""

    def rule(node: Node) -> str | None:
        characters = chain.from_iterable(_texts(node[keyword]))
        if any(ord(character) < 32 and character not in _WRITABLE for character in characters):
            return "it contains control characters, which are not written"
        return None

    return rule


def plain_pattern(node: Node) -> str | None:
    """`pattern`: a regular expression that means the same in ECMAScript, Python and the library."""
    pattern = node["pattern"]
    return pattern_trouble(pattern) if isinstance(pattern, str) else "it must be a string"


def plain_patterns(node: Node) -> str | None:
    """`patternProperties`."""
    own = node["patternProperties"]
    troubles = map(pattern_trouble, own) if isinstance(own, dict) else iter(())
    return next((trouble for trouble in troubles if trouble), None)


_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL)
_SETS = re.compile(r"\[|&&|--|~~")
_GROUP = re.compile(r"\(\?(?![:<=!]|P<)")
_TWICE = re.compile(r"([*+?]|\{\d*,?\d*\})([*+]|\{\d*,?\d*\})")


def pattern_trouble(pattern: str, *, flags: bool = False) -> str | None:
    """Why a regular expression means something else to one of the engines that check it; None if it does not.

    `flags`: inline flags are allowed.
    """
    plain = re.sub(r"\\.", "..", pattern, flags=re.DOTALL)
    outside = _CLASS.sub(".", plain)
    if _TWICE.search(outside):
        return f"the pattern {pattern[:80]!r} repeats a repetition; put it into a group"
    if not flags and _GROUP.search(outside):
        return f"the pattern {pattern[:80]!r} has inline flags or a group that is not of ECMAScript"
    for found in _CLASS.findall(plain):
        if _SETS.search(found[1:]):
            return f"the pattern {pattern[:80]!r} has an operator of sets, or a bracket, within a class; escape it"
    return None


def anchor_trouble(inner: str) -> str | None:
    """Why what is between a pattern's outer anchors cannot be followed: alternatives, or another anchor."""
    plain = _CLASS.sub("", re.sub(r"\\.", "..", inner, flags=re.DOTALL))
    if "^" in plain or "$" in plain:
        return f"the pattern {inner[:80]!r} has an anchor within"
    depth = 0
    for character in plain:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return f"the pattern {inner[:80]!r} has alternatives outside of a group"
    return None


_PIECE = re.compile(r"\\.|\[\^?\]?|\]|.", re.DOTALL)
_OUTSIDE = {"\\d": "[0-9]", "\\w": "[0-9A-Za-z_]", "\\D": r"\P{Nd}", "\\W": r"[^\p{L}\p{N}_]",
            "\\S": r"[^\s\x1c-\x1f\x{feff}]"}  # fmt: skip
_INSIDE = {**_OUTSIDE, "\\d": "0-9", "\\w": "0-9A-Za-z_"}
_NEGATED = {"\\d": r"\p{Nd}", "\\w": r"\p{L}\p{N}_", "\\s": r"\s\x1c-\x1f\x{feff}", "\\D": "[^0-9]",
            "\\W": "[^0-9A-Za-z_]"}  # fmt: skip


def common_classes(pattern: str) -> str:
    """The pattern with `\\d`, `\\W` and the like as what ECMAScript, Python and Rust all take them for."""
    found, within = [], ""  # the class's opening bracket
    for piece in _PIECE.findall(pattern):
        known = _OUTSIDE if not within else _NEGATED if within.startswith("[^") else _INSIDE
        if not within and piece.startswith("["):
            within = piece
        elif within and piece == "]":
            within = ""
        found.append(known.get(piece, piece))
    return "".join(found)


def optional_as_empty(pattern: str) -> str:
    """The pattern with `(…)?` as `(…|)`."""
    found: list[str] = []
    within = False
    for piece in _PIECE.findall(pattern):
        optional = piece == "?" and not within and found[-1:] == [")"]
        lazy = piece == "?" and not within and found[-1:] == ["|)"]
        within = (piece.startswith("[") and not within) or (within and piece != "]")
        if optional:
            found[-1] = "|)"
        elif not lazy:
            found.append(piece)
    return "".join(found)


def has_classes(pattern: str) -> bool:
    """Whether it has a class whose characters differ between engines."""
    return any(piece in _OUTSIDE or piece == "\\s" for piece in _PIECE.findall(pattern))


def negations(pattern: str) -> bool:
    """Whether the pattern takes characters that it does not name: `.`, a negated class, `\\D`, `\\S`, `\\W`."""
    within = False
    for piece in _PIECE.findall(pattern):
        if piece in ("\\D", "\\S", "\\W") or (not within and (piece == "." or piece.startswith("[^"))):
            return True
        within = piece.startswith("[") or (within and piece != "]")
    return False


_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def copies_trouble(pattern: str, most: int) -> str | None:
    """Whether all its counts, such as {1,200}, multiplied, exceed `most`."""
    copies = 1
    for found in _COUNT.finditer(pattern):
        copies *= max(1, int((found[2] or found[1])[:9]))
        if copies > most:
            return f"the counts of the pattern {pattern[:80]!r} are too large"
    return None


def _numbers(value: Any) -> Iterator[float]:
    if is_number(value):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)


def _texts(value: Any) -> Iterator[str]:
    """The strings in a value of JSON, keys included."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, list):
            waiting += found
        elif isinstance(found, dict):
            yield from found
            waiting += found.values()
