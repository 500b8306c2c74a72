"""Grammars of xgrammar, an option (`engine.grammar`): structural tags in all formats, JSON schema in its plain parts.

xgrammar ignores keywords that it does not have, and those beside `enum`, `anyOf` or `$ref`. So everything that is not
known to be checked is refused. It can neither be interrupted nor bounded while it compiles: size and depth are limited.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar, cast

import numpy as np
import xgrammar

from alignedserve.errors import GrammarError
from alignedserve.grammar import schema as rules
from alignedserve.grammar.base import Bits, Grammar, GrammarLibrary, Matcher, require_pieces
from alignedserve.grammar.client_grammars import is_gbnf
from alignedserve.grammar.places import Parts
from alignedserve.grammar.tags import Format, check_triggers, format_of
from alignedserve.grammar.xgrammar_composed import composed_lark
from alignedserve.request import GrammarKind, GrammarSpec
from alignedserve.text import Tokenizer

NAME = "xgrammar"
_NO_TEXT = b"\xff"  # begins special tokens, so that no text is like them: without bytes they could not be named either
_NAMED = re.compile(r"<\[([0-9]+)\]>")
MOST_CHARACTERS = 1 << 16  # of a spec: time to compile grows with the square, and nothing ends it
MOST_COPIES = 1 << 16  # of an element, by nested counts such as {1,200}
_ERRORS = (RuntimeError, ValueError, TypeError)  # of the library
_Made = TypeVar("_Made")


class XgrammarMatcher(Matcher):
    """`allowed` `[words]`: no bits of special tokens that the grammar does not name; xgrammar takes them for text."""

    def __init__(self, inner: xgrammar.GrammarMatcher, allowed: Bits) -> None:
        self.inner, self.allowed = inner, allowed

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not self.inner.accept_token(token):
                raise GrammarError(f"the answer left its grammar at token {token}")


class XgrammarGrammar(Grammar):
    def __init__(self, compiled: xgrammar.CompiledGrammar, eos_token_ids: tuple[int, ...], allowed: Bits) -> None:
        self._compiled, self._ends, self._allowed = compiled, list(eos_token_ids), allowed

    def matcher(self) -> Matcher:
        inner = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=self._ends)
        return XgrammarMatcher(inner, self._allowed)


class XgrammarLibrary(GrammarLibrary):
    """`vocab_size`: columns of the logits, which may be more than the tokenizer has tokens. `threads`: of `fill`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, threads: int = 1) -> None:
        self._special = frozenset(tokenizer.special_ids)
        vocabulary = [_NO_TEXT * (token in self._special) + tokenizer.piece(token) for token in range(vocab_size)]
        self._tokenizer, self._vocabulary, self._vocab_size = tokenizer, vocabulary, vocab_size
        self._compilers: dict[tuple[int, ...], xgrammar.GrammarCompiler] = {}
        self._lock = Lock()  # of the dict
        self._filler = xgrammar.BatchGrammarMatcher(max_threads=threads)

    def prepare(self, eos_token_ids: tuple[int, ...]) -> None:
        self._compiler_of(eos_token_ids)

    def compile(self, spec: GrammarSpec, eos_token_ids: tuple[int, ...]) -> Grammar:
        if len(spec.text) > MOST_CHARACTERS:
            raise GrammarError(f"{spec.kind}: {len(spec.text)} characters are more than {MOST_CHARACTERS} for {NAME}")
        compiler = self._compiler_of(eos_token_ids)
        try:
            allowed = self._allowed(_named_tokens(spec) | set(eos_token_ids))
            return self._begun(XgrammarGrammar(_compiled(compiler, spec), eos_token_ids, allowed))
        except GrammarError as error:
            kind = f"{spec.kind}: "
            raise GrammarError(error.message if error.message.startswith(kind) else kind + error.message) from None
        except _ERRORS as error:
            raise GrammarError(f"{spec.kind}: {_line(str(error))}") from error

    def _begun(self, grammar: Grammar) -> Grammar:
        """The grammar, if an answer to it can begin. Raises GrammarError."""
        bits = np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32)
        self._fill(xgrammar.BatchGrammarMatcher(max_threads=1), [grammar.matcher()], bits)
        if not bits.any():
            raise GrammarError("no answer can begin: nothing satisfies it, or this vocabulary cannot write it")
        return grammar

    def fill(self, matchers: Sequence[Matcher], bits: Bits) -> None:
        self._fill(self._filler, matchers, bits)

    def _fill(self, filler: xgrammar.BatchGrammarMatcher, matchers: Sequence[Matcher], bits: Bits) -> None:
        inner = [cast(XgrammarMatcher, matcher).inner for matcher in matchers]
        try:
            filler.batch_fill_next_token_bitmask(inner, bits)
        except RuntimeError as error:
            raise GrammarError(f"the grammar cannot be followed: {_line(str(error))}") from error
        for row, matcher in enumerate(matchers):
            bits[row] &= cast(XgrammarMatcher, matcher).allowed

    def _allowed(self, named: set[int]) -> Bits:
        """Bits of all tokens, but of special ones only those that are named; none beyond the vocabulary."""
        allowed = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
        allowed[: self._vocab_size] = 1
        without = [token for token in self._special - named if token < self._vocab_size]
        allowed[np.array(without, dtype=np.int64)] = 0
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _compiler_of(self, eos_token_ids: tuple[int, ...]) -> xgrammar.GrammarCompiler:
        if not eos_token_ids:
            raise GrammarError("structured output needs a model with an end token")
        require_pieces(self._tokenizer)
        with self._lock:
            found = self._compilers.get(eos_token_ids)
            if found is None:
                info = xgrammar.TokenizerInfo(
                    self._vocabulary, vocab_size=self._vocab_size, stop_token_ids=list(eos_token_ids)
                )
                found = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._compilers[eos_token_ids] = found
            return found


def _named_tokens(spec: GrammarSpec) -> set[int]:
    """Ids of tokens that the grammar names."""
    if spec.kind is not GrammarKind.STRUCTURAL_TAG:
        return set(map(int, _NAMED.findall(spec.text)))
    found: set[int] = set()
    waiting: list[Any] = [format_of(spec)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            named = [node.get("token"), *_listed(node.get("trigger_tokens")), *_listed(node.get("rules"))]
            found |= {token for token in named if type(token) is int}
            found |= {rule[0] for rule in named if isinstance(rule, list) and rule and type(rule[0]) is int}
            waiting += [child for key, child in node.items() if key != "json_schema"]
        elif isinstance(node, list):
            waiting += node
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _compiled(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    if spec.kind is GrammarKind.JSON:
        schema = checked_schema(rules.parsed_schema(spec.text, spec.kind))
        if spec.whitespace not in (None, ""):
            raise GrammarError(f"whitespace_pattern: {NAME} has only its default and the empty one")
        options: dict[str, Any] = {"max_whitespace_cnt": 1}
        if spec.whitespace == "":
            options = {"any_whitespace": False, "separators": (",", ":")}
        return _of_schema(lambda part: compiler.compile_json_schema(part, **options, strict_mode=False), schema)
    if spec.kind is GrammarKind.REGEX:
        return compiler.compile_regex(_checked_regex(spec.text))
    if spec.kind is GrammarKind.CHOICE:
        return compiler.compile_structural_tag(_tag({"type": "or", "elements": _choices(spec)}))
    if spec.kind is GrammarKind.GRAMMAR:
        return _of_grammar(compiler, spec.text)
    if spec.kind is GrammarKind.COMPOSED:
        parts = json.loads(spec.text)
        answer = None if parts["answer"] is None else _inner_grammar(GrammarSpec(*parts["answer"]))
        lark, named = composed_lark(parts["lark"], answer, _json_grammar)
        return compiler.compile_lark(lark, named_grammars=named)
    found = format_of(spec)
    if spec.whitespace is not None:
        raise GrammarError(f"whitespace_pattern: {NAME} has only its default in structural tags")
    if not isinstance(found.get("type"), str):
        raise GrammarError("/format must be an object with a type")
    _check_format(found, "/format", 0)
    return compiler.compile_structural_tag(_tag(found))


def _inner_grammar(spec: GrammarSpec) -> xgrammar.Grammar:
    """The client's own grammar, within a composed one."""
    kind = GrammarKind(spec.kind)
    if kind is GrammarKind.JSON:
        if spec.whitespace is not None:
            raise GrammarError(f"whitespace_pattern: {NAME} has only its default beside reasoning and tools")
        return _json_grammar(rules.parsed_schema(spec.text, kind))
    if kind is GrammarKind.REGEX:
        return xgrammar.Grammar.from_regex(_checked_regex(spec.text))
    if kind is GrammarKind.CHOICE:
        return xgrammar.Grammar.from_structural_tag(_tag({"type": "or", "elements": _choices(spec)}))
    if kind is GrammarKind.GRAMMAR and is_gbnf(spec.text):
        return xgrammar.Grammar.from_ebnf(spec.text)
    raise GrammarError(f"{kind}: {NAME} has it only by itself, not beside reasoning and tools")


def _json_grammar(schema: Any) -> xgrammar.Grammar:
    return _of_schema(_plain_grammar, checked_schema(schema))


def _plain_grammar(schema: dict[str, Any]) -> xgrammar.Grammar:
    return xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=1, strict_mode=False)


def _of_schema(make: Callable[[dict[str, Any]], _Made], schema: dict[str, Any]) -> _Made:
    """What `make` makes of a schema. Raises GrammarError with the place of what xgrammar refuses."""
    try:
        return make(schema)
    except _ERRORS as error:
        message = _line(str(error))
        place = Parts(schema, _error_of).place_of(message)
        raise GrammarError(message if place is None else f"{message} (at {place or '/'})") from error


def _error_of(schema: dict[str, Any]) -> str:
    try:
        _plain_grammar(schema)
    except _ERRORS as error:
        return _line(str(error))
    return ""


def _of_grammar(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    if is_gbnf(text):
        return compiler.compile_grammar(text)
    if "%json" in text:
        raise GrammarError(f"%json: {NAME} does not check its schemas; send the schema by itself, or a structural tag")
    return compiler.compile_lark(text)


def _tag(found: Format) -> dict[str, Any]:
    return {"type": "structural_tag", "format": found}


def _choices(spec: GrammarSpec) -> list[Format]:
    choices = rules.parsed_schema(spec.text, spec.kind)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choice: must be a list of strings, not empty")
    if "" in choices:
        raise GrammarError("choice: an empty string cannot be chosen")
    return [{"type": "const_string", "value": choice} for choice in choices]


# ---- JSON schema

_BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
}
_CHARACTER = "[ !#-\\[\\]-~\u00a1-\ud7ff]"  # of a string with a length: no control character, no surrogate
_WHOLE = ("$ref", "const", "enum", "anyOf")  # xgrammar reads nothing else of a schema that has one of them
_ASSERTIONS = {keyword for keywords in _BY_TYPE.values() for keyword in keywords} | {*_WHOLE, "type"}
_PYTHON = {"string": str, "object": dict, "array": list, "boolean": bool, "null": type(None)}


def _alone(keyword: str) -> rules.Rule:
    def rule(node: rules.Node) -> str | None:
        beside = sorted((_ASSERTIONS & set(node)) - {keyword, *(("type",) if keyword in ("const", "enum") else ())})
        if beside:
            return f"{{library}} does not check {beside[0]} beside it"
        if keyword in ("const", "enum") and "type" in node:
            values = node["enum"] if keyword == "enum" else [node["const"]]
            types = node["type"] if isinstance(node["type"], list) else [node["type"]]
            if not isinstance(values, list) or not all(any(_is(value, one) for one in types) for value in values):
                return "a value is not of the type beside it"
        return None

    return rule


def _is(value: Any, name: Any) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, _PYTHON.get(name, ()))


def _typed(keyword: str) -> rules.Rule:
    wanted = {name for name, keywords in _BY_TYPE.items() if keyword in keywords}

    def rule(node: rules.Node) -> str | None:
        named = node.get("type")
        if isinstance(named, str) and named in wanted:
            return None
        return f"{{library}} checks it beside the type {' or '.join(sorted(wanted))} alone"

    return rule


def _all(*found: rules.Rule) -> rules.Rule:
    def rule(node: rules.Node) -> str | None:
        return next((reason for one in found if (reason := one(node))), None)

    return rule


def _pattern(node: rules.Node) -> str | None:
    pattern = node["pattern"]
    if not isinstance(pattern, str):
        return "it must be a string"
    if not pattern.startswith("^") or not pattern.endswith("$") or pattern.endswith("\\$"):
        return "{library} needs a pattern of the whole string, ^…$"
    node["pattern"] = rules.optional_as_empty(pattern)  # a group's ? after a repetition at its end is not followed
    return _regex_trouble(pattern)


def _length(node: rules.Node) -> str | None:
    """`minLength`, `maxLength`: as a pattern of well-formed characters, which xgrammar's own lengths do not ask for."""
    if "pattern" in node or "format" in node:
        return "{library} does not check a pattern or a format beside it"
    least, most = node.pop("minLength", 0), node.pop("maxLength", "")
    if not isinstance(least, int) or not isinstance(most, int | str) or least < 0:
        return "it must be a number, at least 0"
    if isinstance(most, int) and not least <= most:
        return "no string has these lengths"
    node["pattern"] = f"^{_CHARACTER}{{{least},{most}}}$"
    return None


def _bounds(
    inclusive: str, exclusive: str, whole: Callable[[float], int], beyond: Callable[[float], int]
) -> rules.Rule:
    """The bounds on one side, as numbers; of an integer as whole ones, which is all that xgrammar reads.

    `whole`, `beyond`: round to the last integer that is within, and to the first that is not.
    """

    def rule(node: rules.Node) -> str | None:
        flag = node.get(exclusive)
        if isinstance(flag, bool):  # in draft 4 it says whether the other bound is exclusive
            del node[exclusive]
            if flag and inclusive in node:
                node[exclusive] = node.pop(inclusive)
        for keyword, rounded in ((inclusive, whole), (exclusive, beyond)):
            if keyword not in node:
                continue
            if not rules.is_number(node[keyword]) or math.isnan(node[keyword]):
                return f"{keyword} must be a number"
            if node["type"] == "integer":
                node[keyword] = rounded(node[keyword])
        return None

    return rule


def _keys(node: rules.Node) -> str | None:
    """`properties`: a free key may be one of them, so there is none; an answer without free keys is valid, too."""
    if isinstance(node.get("additionalProperties"), dict) and node["additionalProperties"] and node["properties"]:
        return "{library} does not tell these keys from those of additionalProperties"
    if node["properties"]:
        node["additionalProperties"] = False
    return None


def _required(node: rules.Node) -> str | None:
    own, wanted = node.get("properties"), node["required"]
    if isinstance(wanted, list) and any(key not in (own or {}) for key in wanted):
        return "{library} asks only for keys that properties names"
    return None


_LOWER = _bounds("minimum", "exclusiveMinimum", math.ceil, math.floor)
_UPPER = _bounds("maximum", "exclusiveMaximum", math.floor, math.ceil)
_KEYWORDS: Mapping[str, rules.Rule] = {
    **{keyword: _typed(keyword) for keyword in _ASSERTIONS - {*_WHOLE, "type"}},
    **{keyword: _alone(keyword) for keyword in _WHOLE},
    **{keyword: _all(_typed(keyword), _LOWER) for keyword in ("minimum", "exclusiveMinimum")},
    **{keyword: _all(_typed(keyword), _UPPER) for keyword in ("maximum", "exclusiveMaximum")},
    "pattern": _all(_typed("pattern"), _pattern),
    "minLength": _all(_typed("minLength"), _length),
    "maxLength": _all(_typed("maxLength"), _length),
    "properties": _all(_typed("properties"), _keys),
    "required": _all(_typed("required"), _required),
    **dict.fromkeys(
        ("allOf", "oneOf", "not", "if", "multipleOf", "uniqueItems", "contains", "propertyNames", "patternProperties",
         "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
         "additionalItems", "$dynamicRef", "$recursiveRef", "disallow", "divisibleBy", "extends", "minProperties",
         "maxProperties", "format"), rules.never,
    ),
}  # fmt: skip


def checked_schema(schema: Any, place: str = "") -> dict[str, Any]:
    """The schema without what has no effect. Raises GrammarError for what xgrammar does not check."""
    return rules.checked_schema(schema, _KEYWORDS, NAME, place)


# ---- regular expressions and formats


def _regex_trouble(pattern: str) -> str | None:
    if trouble := rules.pattern_trouble(pattern):
        return trouble
    if rules.negations(pattern):
        return f"{NAME} takes ill-formed text for '.', negated classes and \\D, \\S, \\W"
    inner = pattern.removeprefix("^").removesuffix("$")
    return rules.anchor_trouble(inner) or rules.copies_trouble(pattern, MOST_COPIES)


def _checked_regex(pattern: str) -> str:
    if trouble := _regex_trouble(pattern):
        raise GrammarError(f"regex: {trouble}")
    return pattern


def _check_format(node: Any, place: str, depth: int) -> None:
    """Prepare every JSON schema and check every pattern in a format, in place."""
    if depth > 2 * rules.MOST_DEPTH:
        raise GrammarError(f"formats are nested more than {rules.MOST_DEPTH} deep")
    if isinstance(node, list):
        for index, child in enumerate(node):
            _check_format(child, f"{place}/{index}", depth + 1)
        return
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    if kind == "json_schema":
        _check_schema_format(node, place)
        return
    if kind == "regex" and isinstance(pattern := node.get("pattern"), str):
        if trouble := _regex_trouble(pattern):
            raise GrammarError(f"{place}/pattern: {trouble}")
    elif kind == "qwen_xml_parameter":
        raise GrammarError(f"{place}: the type {kind!r} is not checked exactly")
    elif kind == "triggered_tags":
        check_triggers(node, place)
    for key, child in node.items():
        _check_format(child, f"{place}/{key}", depth + 1)


def _check_schema_format(node: Format, place: str) -> None:
    if node.get("any_order") or node.get("excludes") or node.get("style", "json") != "json":
        raise GrammarError(f"{place}: any_order, excludes and styles are not checked exactly")
    node["json_schema"] = checked_schema(node.get("json_schema"), f"{place}/json_schema")
    node["max_whitespace_cnt"] = 1


def _line(message: str) -> str:
    """The library's message without the place in its source."""
    text = " ".join(message.split())
    text = text.rpartition(".cc:")[2].partition(": ")[2] if ".cc:" in text else text
    return text.partition("is false: ")[2][:300] or text[:300]
