"""Arguments that a family writes one by one, as text: converted to JSON by the tool's schema, and back to a grammar.

Between tags, a value ends even where the model leaves out its end tag.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.errors import GrammarError
from alignedserve.gateway.dialects.lark import Lark
from alignedserve.gateway.dialects.machine import CallMachine, Reading, Tool
from alignedserve.gateway.dialects.schema_types import TEXT, Types, parameter_schema, parameter_types, type_of

_LONGEST_KEY = 256
_KEY = re.compile(r"[^\s<>{}()\[\]:=\"',|]{1,200}")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "description", "title", "default",
                "examples", "$defs", "definitions", "$schema"}  # fmt: skip
_TEXT_KEYS = {"type", "description", "title", "default", "examples", "enum", "const"}
_MOST_OPTIONAL = 256  # parameters with commas between them: each may be the first


def is_text(tool: Tool, parameter: str) -> bool:
    """Whether the value is a string, so that it is taken as it is written. Without a schema it is."""
    return parameter_types(tool.parameters, parameter) == TEXT


def as_json(raw: str, types: Types = None) -> str:
    """A value that need not be a string: JSON if it is of these types, or Python's words, else a string.

    A value that must not be a string may be a Python literal, too.
    """
    text = raw.strip()
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return escaped(raw, quotes=True) if types is None or "string" in types else python_as_json(raw)
    fits = types is None or "string" not in types or type_of(value) in types
    return text if fits else escaped(raw, quotes=True)


class _JsonNames(ast.NodeTransformer):
    """true, false and null, which models write in Python's calls too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def python_as_json(raw: str) -> str:
    """A Python literal as JSON, in which true, false and null may stand; its text as a string if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return json_of(ast.literal_eval(_JsonNames().visit(ast.parse(raw.strip(), mode="eval"))))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return escaped(raw, quotes=True)


def json_of(value: Any) -> str:
    """The value as JSON that UTF-8 can hold: half of a surrogate pair is written as an escape.

    Raises ValueError or TypeError for a value that JSON lacks.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def escaped(text: str, *, quotes: bool = False) -> str:
    """Text as it is written within a JSON string."""
    written = json.dumps(text, ensure_ascii=False)
    return written if quotes else written[1:-1]


class ArgumentsWriter:
    """Writes `{"key": value, …}` as the arguments of a machine's last call."""

    def __init__(self, machine: CallMachine) -> None:
        self._machine = machine
        self._keys: set[str] = set()
        machine.argue("{")

    def key(self, name: str) -> None:
        before = ", " if self._keys else ""
        self._keys.add(name)
        self._machine.argue(f"{before}{escaped(name, quotes=True)}: ")

    def has(self, name: str) -> bool:
        return name in self._keys

    def close(self) -> None:
        self._machine.argue("}")


@dataclass(frozen=True, slots=True)
class Mark:
    """A text that ends a value if one of `after` follows, after white space, or nothing does.

    `closes`: the value's own tag. Other marks belong to what comes after a value without one. With no `after`, it
    begins an argument: a key of the tool follows.
    """

    text: str
    after: tuple[str, ...] = ()
    closes: bool = False


class TaggedCalls(CallMachine):
    """Reads calls whose arguments stand between tags.

    Values may contain these tags, so one ends a value only where the format goes on after it. `marks`: what may end a
    value, longer ones first. `key_end`: the tag after a key. `ends`: the tags after the last argument. `lines`: a line
    break at a value's beginning, and one at its end, are not part of it.
    """

    openers = "<"
    marks: tuple[Mark, ...]
    key_end: str
    ends: tuple[str, ...]
    lines = False

    @abstractmethod
    def key(self) -> Reading[tuple[str, str]]:
        """Passes a key and the tags around it. Returns the key, and all that was passed; "" and "" if none follows."""

    def arguments(self, name: str) -> Reading[None]:
        """Reads the arguments of a call that has begun, and the tags after them.

        They become a whole object, unless the answer was cut within them. The first value of a key counts: it may have
        been sent. Others are content after the call.
        """
        tool, writer, repeated = self.tools[name], ArgumentsWriter(self), list[str]()
        while True:
            self._saw_end = False
            key, written = yield from self.key()
            if not key:
                break
            if writer.has(key):
                repeated.append(written)
                repeated.append((yield from self._until_its_end(tool, repeated.append)) or "")
                continue
            writer.key(key)
            yield from self._value(tool, key)
        ended = False
        for tag in self.ends:
            ended = (yield from self.close(tag)) or ended
        if ended or self._finished or not self._saw_end:
            writer.close()
        self.say("".join(repeated))

    def _value(self, tool: Tool, key: str) -> Reading[None]:
        """Reads a value. A string is written while it is read."""
        if not is_text(tool, key):
            raw: list[str] = []
            yield from self._until_its_end(tool, raw.append)
            text = "".join(raw)
            self.argue(as_json(text.removeprefix("\n") if self.lines else text, parameter_types(tool.parameters, key)))
            return
        begins = self.lines

        def take(text: str) -> None:
            nonlocal begins
            if begins and text:
                text, begins = text.removeprefix("\n"), False
            self.argue(escaped(text))

        self.argue('"')
        if (yield from self._until_its_end(tool, take)) is not None or self._finished:
            self.argue('"')

    def _until_its_end(self, tool: Tool, take: Callable[[str], None]) -> Reading[str | None]:
        """Gives a value to `take`. Returns its tag, which is passed; "" if it has none, None if the text ends first."""
        marks = {mark.text: mark for mark in self.marks}
        broken = self.lines and (yield from self.peek()) == "\n"
        while found := (yield from self.until(marks, take)):
            if (yield from self._ends_it(marks[found], tool, broken=broken)):
                if marks[found].closes:
                    return found
                self.back(found.removeprefix("\n"))
                return ""
            take(found)
        return None

    def _ends_it(self, mark: Mark, tool: Tool, *, broken: bool) -> Reading[bool]:
        """Whether this mark, which was passed, ends a value. `broken`: a line break came before the value."""
        if broken and not mark.text.startswith("\n"):
            # Within a line, tags are a part of the value, unless the model has just left out the line break.
            space = yield from self.spaces()
            goes_on = yield from self.peek()
            self.back(space)
            if not mark.closes or (goes_on and "\n" not in space):
                return False
        if mark.after:
            return (yield from self.one_follows(mark.after))
        return (yield from self._key_follows(tool))

    def _key_follows(self, tool: Tool) -> Reading[bool]:
        """Whether a key that the tool's schema names follows, or any if it names none. Passes nothing."""
        key = yield from self.key_text()
        closed = yield from self.literal(self.key_end)
        self.back(key + (self.key_end if closed else ""))
        named = tool.parameters.get("properties")
        return closed and bool(key) and (not isinstance(named, dict) or not named or key in named)

    def key_text(self) -> Reading[str]:
        """Passes what may be a key."""
        key = ""
        while (character := (yield from self.char())) and character not in "<>\n" and len(key) < _LONGEST_KEY:
            key += character
        self.back(character)
        return key


def parameter_rules(
    lark: Lark,
    tool: Tool,
    written: Callable[[str], str],
    end: str = "",
    *,
    json_end: str = "",
) -> list[tuple[str, bool]]:
    """An expression for each parameter of the schema, in its order, and whether the parameter is required.

    `written`: what comes before a value. `end`: what comes after it. `json_end`: what comes
    after one that is no string, if not `end`. Raises GrammarError for a name that the format cannot hold, and for a
    strict schema that says more than it can.
    """
    schema = tool.parameters
    required = schema.get("required", [])
    if tool.strict and (found := sorted(schema.keys() - _OBJECT_KEYS)):
        raise GrammarError(f"tool {tool.name}: {found[0]} cannot be followed in this model's format of calls")
    if tool.strict and (unknown := sorted(set(required) - _properties(tool).keys())):
        raise GrammarError(f"tool {tool.name}: required: {unknown[0][:60]!r} is not among the properties")
    rules = []
    for name, inner in _properties(tool).items():
        check_key(tool, name)
        if is_text(tool, name):
            body = f"{lark.literal(written(name))} {_text_rule(lark, tool, name, end)}"
        else:
            shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            own = inner if isinstance(inner, dict) else {}
            value = lark.json({**shared, **own}, f"tool {tool.name}, {name}")
            body = f"{lark.literal(written(name))} {value} {lark.literal(json_end or end)}"
        rules.append((lark.rule(body), name in required))
    return rules


def with_commas(lark: Lark, values: Sequence[tuple[str, bool]], comma: str) -> str:
    """An expression for parameters, required ones first, with `comma` between those that are there."""
    between = lark.literal(comma)
    required = [rule for rule, needed in values if needed]
    optional = [rule for rule, needed in values if not needed]
    if not required and len(optional) > _MOST_OPTIONAL:
        raise GrammarError(f"over {_MOST_OPTIONAL} optional parameters have no form in this model's format of calls")
    more = [f" ({between} {rule})?" for rule in optional]
    if required:
        return f" {between} ".join(required) + "".join(more)
    choices = [rule + "".join(more[at:]) for at, rule in enumerate(optional, 1)]
    return f"({' | '.join(choices)})?" if choices else ""


def lines(lark: Lark, values: Sequence[tuple[str, bool]], end: str = "\n") -> str:
    """An expression for parameters in their order, each with `end` after it."""
    line = lark.literal(end)
    return " ".join(f"{rule} {line}" if required else f"({rule} {line})?" for rule, required in values)


def check_key(tool: Tool, name: str) -> None:
    """Raises GrammarError for a parameter's name that could be read as a part of the format."""
    if not _KEY.fullmatch(name):
        raise GrammarError(f"tool {tool.name}: the parameter {name[:60]!r} has no form in this model's format of calls")


def _text_rule(lark: Lark, tool: Tool, name: str, end: str) -> str:
    schema = parameter_schema(tool.parameters, name) or {}
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if options is not None:
        if not isinstance(options, list) or not options or not all(isinstance(one, str) and one for one in options):
            raise GrammarError(f"tool {tool.name}, {name}: enum must be a list of strings that are not empty")
        return f"({' | '.join(map(lark.literal, options))}) {lark.literal(end)}"
    if tool.strict and (other := sorted(schema.keys() - _TEXT_KEYS)):
        raise GrammarError(f"tool {tool.name}, {name}: {other[0]} cannot be followed in this model's format of calls")
    return lark.text_until(end)


def _properties(tool: Tool) -> dict[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _no_constant(name: str) -> None:
    raise ValueError(name)
