"""Grammars of values in formats that do not write JSON: Python's literals, and Gemma's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignedserve.errors import GrammarError
from alignedserve.gateway.dialects.lark import Lark
from alignedserve.gateway.dialects.machine import Tool
from alignedserve.gateway.dialects.parameters import with_commas
from alignedserve.gateway.dialects.schema_types import target_of, type_of, types_of

_ABOUT = {"description", "title", "default", "examples", "$defs", "definitions", "$schema"}
_KEYWORDS = {"object": {"type", "properties", "required", "additionalProperties"}, "array": {"type", "items"}}
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_NUMBERS = {"integer": "/-?(0|[1-9][0-9]{0,17})/", "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/"}
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_MOST_DEPTH = 12
_MOST_VISITS = 10_000  # of subschemas: references may lead to one again and again
_ANY_DEPTH = 3  # of lists and objects in a value of any kind, which a wild model must end


@dataclass(frozen=True, slots=True)
class Writing:
    """How a format writes values. `words`: of true, false and null. `string`: an expression for any string.

    `text`: a string as it is written. `key`: what comes before the value of an object's key, after a check that it can
    be written; `any_key`: an expression for it.
    """

    words: Mapping[str, str]
    comma: str
    string: Callable[[Lark], str]
    text: Callable[[str], str]
    key: Callable[[str], str]
    any_key: Callable[[Lark], str]


@dataclass(slots=True)
class Values:
    """Rules for the values of one tool's parameters. Without `strict`, only names, types and options are followed."""

    lark: Lark
    tool: Tool
    writing: Writing
    _any: str = field(default="", init=False)
    _visits: int = field(default=0, init=False)

    def of(self, schema: Any, where: str, depth: int = 0) -> str:
        """An expression for values that satisfy the schema. Raises GrammarError for one that cannot be followed."""
        if schema is True or schema == {} or (not isinstance(schema, dict) and not self.tool.strict):
            return self._anything()
        self._visits += 1
        if not isinstance(schema, dict) or depth > _MOST_DEPTH or self._visits > _MOST_VISITS:
            if not self.tool.strict:
                return self._anything()
            raise self._refusal(where, "a schema that is false, refers to itself, or repeats others too often")
        if "$ref" in schema:
            self._check(schema, where, {"$ref"})
            return self.of(target_of(schema["$ref"], self.tool.parameters), where, depth + 1)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                self._check(schema, where, {"anyOf"})
                return self._one_of([self.of(one, where, depth + 1) for one in schema[key]])
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(options, list) and options:
            self._check(schema, where, {"enum", "const", "type"})
            types = types_of({"type": schema.get("type")}, {})
            fitting = [one for one in options if types is None or type_of(one) in types]
            return self._one_of([self.lark.literal(self._written(one)) for one in fitting or options])
        kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else None)
        kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
        if not kinds or any(one not in _TYPES for one in kinds):
            self._check(schema, where, {"type"})
            return self._anything()
        return self._one_of([self._typed(one, schema, where, depth) for one in kinds])

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str, depth: int) -> str:
        words = self.writing.words
        if kind in ("array", "object"):
            self._check(schema, where, _KEYWORDS[kind])
            return self._list(schema, where, depth) if kind == "array" else self._object(schema, where, depth)
        numbers = _LIMITS if kind in _NUMBERS else set()
        self._check(schema, where, {"type", *numbers})
        if kind == "string":
            return self.writing.string(self.lark)
        if kind in _NUMBERS:
            limits = {key: value for key, value in schema.items() if key in _LIMITS}
            of = f"tool {self.tool.name}, {where.lstrip('.')}"
            return self.lark.json({"type": kind, **limits}, of) if limits else _NUMBERS[kind]
        return self._one_of([self.lark.literal(words[one]) for one in ("true", "false", "null") if _is(one, kind)])

    def _list(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        items = schema.get("items", True)
        return self._listed(self.of(items, f"{where}[]", depth + 1))

    def _listed(self, item: str) -> str:
        lark, comma = self.lark, self.lark.literal(self.writing.comma)
        rule = lark.rule(item)
        return f"({lark.literal('[')} ({rule} ({comma} {rule})*)? {lark.literal(']')})"

    def _object(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not (properties or schema.get("additionalProperties") is False):
            others = schema.get("additionalProperties", True)
            value = self.of(True if others is False else others, f"{where}.*", depth + 1)
            return self._mapping(value)
        return f"({self.lark.literal('{')} {self.named(properties, schema, where, depth)} {self.lark.literal('}')})"

    def _mapping(self, value: str) -> str:
        lark, comma = self.lark, self.lark.literal(self.writing.comma)
        entry = lark.rule(f"{self.writing.any_key(lark)} {value}")
        return f"({lark.literal('{')} ({entry} ({comma} {entry})*)? {lark.literal('}')})"

    def named(
        self,
        properties: Mapping[str, Any],
        schema: Mapping[str, Any],
        where: str,
        depth: int = 0,
        key: Callable[[str], str] | None = None,
    ) -> str:
        """An expression for an object's entries. `key`: what comes before a value, if not the writing's."""
        self._check(schema, where, _KEYWORDS["object"])
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            if self.tool.strict:
                raise self._refusal(where, "required, which is no list of names,")
            required = []
        if self.tool.strict and (unknown := sorted(set(required) - properties.keys())):
            raise self._refusal(where, f"required {unknown[0][:60]!r}, which is not among the properties,")
        before = key or self.writing.key
        rules = [
            (self.lark.rule(f"{self.lark.literal(before(name))} {self.of(inner, f'{where}.{name}', depth + 1)}"),
             name in required)
            for name, inner in properties.items()
        ]  # fmt: skip
        return with_commas(self.lark, rules, self.writing.comma)

    def _anything(self) -> str:
        """A value of any kind."""
        if not self._any:
            words = map(self.lark.literal, self.writing.words.values())
            simple = " | ".join([self.writing.string(self.lark), _NUMBERS["number"], *words])
            self._any = self.lark.rule(simple)
            for _ in range(_ANY_DEPTH):
                inner = self._any
                self._any = self.lark.rule(f"{simple} | {self._listed(inner)} | {self._mapping(inner)}")
        return self._any

    def _written(self, value: Any) -> str:
        """A value in the format."""
        if isinstance(value, str):
            return self.writing.text(value)
        if value is None or isinstance(value, bool):
            return self.writing.words["null" if value is None else str(value).lower()]
        if isinstance(value, list):
            return f"[{self.writing.comma.join(map(self._written, value))}]"
        if isinstance(value, dict):
            entries = [self.writing.key(key) + self._written(entry) for key, entry in value.items()]
            return f"{{{self.writing.comma.join(entries)}}}"
        return str(value)

    def _one_of(self, choices: Sequence[str]) -> str:
        return choices[0] if len(choices) == 1 else f"({' | '.join(dict.fromkeys(choices))})"

    def _check(self, schema: Mapping[str, Any], where: str, known: set[str]) -> None:
        """Raises GrammarError for a strict schema that says more than this."""
        if self.tool.strict and (other := sorted(schema.keys() - known - _ABOUT)):
            raise self._refusal(where, other[0])

    def _refusal(self, where: str, what: str) -> GrammarError:
        return GrammarError(
            f"tool {self.tool.name}, {where.lstrip('.')}: {what} cannot be followed in this model's format of calls"
        )


def _is(word: str, kind: str) -> bool:
    return (word == "null") == (kind == "null")
