"""Structural tags as a Lark grammar of llguidance, where that has the same answers; else a refusal by name.

Formats of plain text (strings, regular expressions, and what is made of them) become one terminal each, so that they
are matched as one regular expression. Text without limit ends where the next trigger, or the tag's end, appears first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import llguidance

from alignedserve.errors import GrammarError
from alignedserve.grammar.client_grammars import JsonText, lark_of
from alignedserve.grammar.schema import MOST_DEPTH, common_classes, pattern_trouble
from alignedserve.grammar.tags import Format, check_triggers, format_of, nodes_of, texts_of
from alignedserve.request import GrammarSpec
from alignedserve.text import Tokenizer

_ANY = r"/(.|\n)*/"
_SIGNS = {"optional": "?", "plus": "+", "star": "*"}
_KEYS: dict[str, set[str]] = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
    "grammar": {"grammar"},
    "any_text": set(),
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "plus": {"content"},
    "star": {"content"},
    "repeat": {"min", "max", "content"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
}


class LarkText:
    """Pieces of Lark."""

    @staticmethod
    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def tags_grammar(spec: GrammarSpec, tokenizer: Tokenizer, json_text: JsonText) -> str:
    """llguidance's grammar for a structural tag. `json_text` prepares a JSON schema. Raises GrammarError."""
    return _Writer(tokenizer, json_text, spec.whitespace).grammar(format_of(spec))


class _Writer:
    def __init__(self, tokenizer: Tokenizer, json_text: JsonText, whitespace: str | None) -> None:
        self._json_text, self._whitespace = json_text, whitespace
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []  # grammars of their own, by name
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def grammar(self, node: Format) -> str:
        start = self._format(node, "/format", last=True, depth=0)
        text = "\n".join([f"start: {start}", *self._rules])
        if not self._others:
            return llguidance.LLMatcher.grammar_from_lark(text)
        return json.dumps({"grammars": [{"name": "tags", "lark_grammar": text}, *self._others]})

    def _add(self, name: str, text: str, attributes: str = "") -> str:
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {text}")
        return name

    def _format(self, node: Any, place: str, *, last: bool, depth: int) -> str:
        """An expression of rules. `last`: nothing follows it."""
        kind = _checked(node, place, depth)
        plain = self._plain(node, place, depth)
        if plain is not None:
            if not last and plain.endswith(_ANY):
                raise GrammarError(f"structural_tag: {place}: llguidance cannot tell where any_text ends here")
            return self._add("TEXT", plain) if plain else '""'
        write: dict[str, Callable[[Format, str, bool, int], str]] = {
            "const_string": self._const,
            "json_schema": self._schema,
            "grammar": self._grammar,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        return write.get(kind, self._repeated)(node, place, last, depth)

    def _plain(self, node: Any, place: str, depth: int) -> str | None:
        """An expression of terminals; None if it needs rules."""
        kind = _checked(node, place, depth)
        if kind == "const_string":
            (value,) = texts_of(node, "value", place, empty=True)
            return None if self._has_special(value) else LarkText.quoted(value) if value else ""
        if kind == "regex":
            return f"/{_pattern(node, place)}/"
        if kind == "any_text":
            return _ANY
        if kind == "sequence":
            parts = [self._plain(child, where, depth + 1) for where, child in nodes_of(node, "elements", place)]
            return None if None in parts else " ".join(filter(None, parts))
        if kind == "or":
            parts = [self._plain(child, where, depth + 1) for where, child in nodes_of(node, "elements", place)]
            return None if None in parts else "(" + " | ".join(part or '""' for part in parts) + ")"
        if kind in ("optional", "plus", "star", "repeat"):
            inner = self._plain(node.get("content"), f"{place}/content", depth + 1)
            return inner and f"({inner}){_count(node, kind, place)}"
        return None

    def _const(self, node: Format, place: str, last: bool, depth: int) -> str:
        return self._literal(texts_of(node, "value", place)[0])

    def _schema(self, node: Format, place: str, last: bool, depth: int) -> str:
        try:
            return "%json " + self._json_text(node.get("json_schema"), self._whitespace, f"{place}/json_schema")
        except GrammarError as error:
            raise GrammarError(f"structural_tag: {error.message}") from None

    def _grammar(self, node: Format, place: str, last: bool, depth: int) -> str:
        (text,) = texts_of(node, "grammar", place)
        name = f"grammar_{len(self._others)}"
        try:
            lark = lark_of(text, self._whitespace, self._json_text)
        except GrammarError as error:
            raise GrammarError(f"structural_tag: {place}: {error.message}") from None
        self._others.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _sequence(self, node: Format, place: str, last: bool, depth: int) -> str:
        children = nodes_of(node, "elements", place)
        ends = [last and index == len(children) - 1 for index in range(len(children))]
        written = [self._format(child, where, last=end, depth=depth + 1)
                   for (where, child), end in zip(children, ends, strict=True)]  # fmt: skip
        return "(" + " ".join(written) + ")"

    def _or(self, node: Format, place: str, last: bool, depth: int) -> str:
        children = nodes_of(node, "elements", place)
        return "(" + " | ".join(self._format(child, at, last=last, depth=depth + 1) for at, child in children) + ")"

    def _repeated(self, node: Format, place: str, last: bool, depth: int) -> str:
        only = last and node["type"] == "optional"
        inner = self._format(node.get("content"), f"{place}/content", last=only, depth=depth + 1)
        return f"({inner}){_count(node, node['type'], place)}"

    def _tag(self, node: Format, place: str, last: bool, depth: int, cut: int = 0) -> str:
        """`cut`: characters of `begin` that are written already."""
        (begin,) = texts_of(node, "begin", place, empty=True)
        ends = texts_of(node, "end", place, empty=True)
        content = node.get("content")
        parts = [self._literal(begin[cut:])]
        end = "(" + " | ".join(map(self._literal, ends)) + ")" if ends != [""] else ""
        if _checked(content, f"{place}/content", depth + 1) == "any_text":
            if "" in ends:
                raise GrammarError(f"structural_tag: {place}/end must not be empty after any_text")
            parts.append(self._text_until(ends))
        else:
            ends_here = last and not end
            parts += [self._format(content, f"{place}/content", last=ends_here, depth=depth + 1), end]
        return "(" + " ".join(filter(None, parts)) + ")"

    def _triggered(self, node: Format, place: str, last: bool, depth: int) -> str:
        once, needed = bool(node.get("stop_after_first")), bool(node.get("at_least_one"))
        if not (last or (once and needed)):
            raise GrammarError(f"structural_tag: {place}: llguidance cannot tell where the text of this format ends")
        groups = check_triggers(node, place)
        any_time, at_once = [], []
        for trigger, tags in groups.items():
            for where, tag in tags:
                _require_tag(tag, where, depth + 1)
                at_once.append(self._tag(tag, where, last and once, depth + 1))
            rest = " | ".join(self._tag(tag, at, last and once, depth + 1, len(trigger)) for at, tag in tags)
            if tags:
                any_time.append(f"{self._text_until([trigger])} ({rest})")
        first, later = self._add("first", " | ".join(at_once)), self._add("later", " | ".join(any_time))
        rest_text = self._add("ANY", _ANY)
        if needed:
            return first if once else f"({first} {later}* {rest_text})"
        return f"({later} | {rest_text})" if once else f"({later}* {rest_text})"

    def _separated(self, node: Format, place: str, last: bool, depth: int) -> str:
        once, needed = bool(node.get("stop_after_first")), bool(node.get("at_least_one"))
        (separator,) = texts_of(node, "separator", place, empty=True)
        written = []
        for where, tag in nodes_of(node, "tags", place):
            _require_tag(tag, where, depth + 1)
            written.append(self._tag(tag, where, last and once, depth + 1))
        tags = self._add("tags", " | ".join(written))
        text = tags if once else f"({tags} ({self._literal(separator)} {tags})*)"
        return text if needed else f"({text})?"

    # ---- text

    def _has_special(self, text: str) -> bool:
        return self._split is not None and self._split.search(text) is not None

    def _literal(self, text: str) -> str:
        """A text, whose special tokens are written as tokens; "" for none."""
        parts: list[str | re.Match[str]] = []
        position = 0
        for found in self._split.finditer(text) if self._split is not None else ():
            parts += [text[position : found.start()], found]
            position = found.end()
        parts.append(text[position:])
        written = (LarkText.quoted(p) if isinstance(p, str) else f"<[{self._special[p.group()]}]>" for p in parts if p)
        return " ".join(written)

    def _text_until(self, ends: list[str]) -> str:
        """Text up to the first of `ends`, and that."""
        texts = [end for end in ends if not self._has_special(end)]
        found = []
        if texts:
            closing = " | ".join(map(LarkText.quoted, texts))
            found.append(self._add("until", f"{self._add('ANY', _ANY)} ({closing})", "[lazy]"))
        for end in ends:
            if end not in texts:
                if self._split is None or not (one := self._split.fullmatch(end)):
                    raise GrammarError(f"structural_tag: {end!r} mixes text and special tokens, which cannot end text")
                found.append(f"{self._add('ANY', _ANY)} <[{self._special[one.group()]}]>")
        return "(" + " | ".join(found) + ")"


def _checked(node: Any, place: str, depth: int) -> str:
    """The node's type. Raises GrammarError for a type, or an option of one, that is not translated."""
    kind = node.get("type") if isinstance(node, dict) else None
    if not isinstance(kind, str):
        raise GrammarError(f"structural_tag: {place} must be an object with a type")
    if kind not in _KEYS:
        raise GrammarError(f"structural_tag: {place}: llguidance cannot follow the type {kind[:50]!r}")
    if depth > MOST_DEPTH:
        raise GrammarError(f"structural_tag: formats are nested more than {MOST_DEPTH} deep")
    for key, value in node.items():
        if key != "type" and key not in _KEYS[kind] and value not in (None, False, [], "json"):
            raise GrammarError(f"structural_tag: {place}: llguidance cannot follow {key[:50]!r} of {kind}")
    return kind


def _require_tag(node: Any, place: str, depth: int) -> None:
    if isinstance(node, dict):
        node.setdefault("type", "tag")  # xgrammar's own reader takes tags without it, so its clients leave it out
    if _checked(node, place, depth) != "tag":
        raise GrammarError(f"structural_tag: {place} must be a tag")


def _pattern(node: Format, place: str) -> str:
    (pattern,) = texts_of(node, "pattern", place)
    if trouble := pattern_trouble(pattern):
        raise GrammarError(f"structural_tag: {place}: {trouble}")
    return llguidance.regex_to_lark(common_classes(pattern))


def _count(node: Format, kind: str, place: str) -> str:
    if kind != "repeat":
        return _SIGNS[kind]
    least, most = node.get("min"), node.get("max")
    if type(least) is not int or type(most) is not int or least < 0 or (most != -1 and not least <= most > 0):
        raise GrammarError(
            f"structural_tag: {place}: min and max must be numbers, 0 <= min <= max, max -1 or more than 0"
        )
    return f"{{{least},}}" if most == -1 else f"{{{least},{most}}}"
