"""Grammars as clients write them, in Lark or GBNF, as Lark of llguidance.

JSON schemas within Lark are checked like any other. What llguidance's converter of GBNF lacks is written differently
before it: escapes by number, `|` at the beginning of a line, classes that mean sets to a regular expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from alignedserve.errors import GrammarError
from alignedserve.grammar.schema import require_characters

MOST_DEPTH = 500  # of rules that refer to rules: llguidance recurses, and its time grows with the square
JsonText = Callable[[object, str | None, str], str]

_GBNF_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_GBNF_DEFINED = re.compile(r"[ \t]*::=")
_LARK_DEFINED = re.compile(r"(?:\.\d+)?[ \t]*(?:\[[^\]\n]{0,500}\][ \t]*)?:")
_BLANKS = re.compile(r"[ \t\r\n]*")
_LARK_PIECE = re.compile(
    r'(?P<text>"(?:\\["\\/bfnrt]|\\u[a-fA-F0-9]{4}|[^"\\\x00-\x1f\x7f])*")'
    r"|(?P<comment>(?:#|//)[^\n]*)"
    r"|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)"
    r"|(?P<special><[^<>\s]+>)"
    r"|(?P<schema>%json)(?![a-z])"
    r"|(?P<other>%(?:llguidance|regex))(?![a-z])"
    r"|(?P<name>@?[A-Za-z_][A-Za-z0-9_-]*)"
    r"|(?P<bad>[\"/])"
    r"|(?P<rest>.)",
    re.DOTALL,
)
_GBNF_PIECE = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*")|(?P<set>\[(?:\\.|[^\]\\\n])*\])|(?P<comment>#[^\n]*)|(?P<name>[\w-]+)'
    r'|(?P<bad>["\[])|(?P<rest>.)',
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(text: str) -> bool:
    """Whether it is GBNF (or xgrammar's EBNF), whose rules have `::=`; else it is Lark."""
    return _GBNF_RULE.search(text) is not None


def lark_of(text: str, whitespace: str | None, json_text: JsonText) -> str:
    """A client's grammar as Lark. `json_text` checks and prepares a JSON schema. Raises GrammarError with a place."""
    return _from_gbnf(text) if is_gbnf(text) else _checked_lark(text, whitespace, json_text)


# ---- Lark


def lark_pieces(text: str) -> Iterator[tuple[str, str]]:
    """The text in pieces, each with its kind: text, comment, regex, special, schema, other, name, bad, rest."""
    for found in _LARK_PIECE.finditer(text):
        yield found.lastgroup or "", found.group()


def _checked_lark(text: str, whitespace: str | None, json_text: JsonText) -> str:
    parts: list[str] = []
    rules: dict[str, set[str]] = {}
    rule, position = "", 0
    while found := _LARK_PIECE.match(text, position):
        kind, piece, position = found.lastgroup, found.group(), found.end()
        if kind == "bad":
            raise GrammarError(f"grammar: {_where(text, found.start())}: a text or a pattern that does not end")
        parts.append(piece)
        if kind in ("schema", "other"):
            schema, end = _json_at(text, position)
            parts.append(_schema_text(text, position, schema, whitespace, json_text) if kind == "schema"
                         else text[position:end])  # fmt: skip
            position = end
        elif kind == "name":
            rule = piece if _LARK_DEFINED.match(text, position) else rule
            rules.setdefault(rule, set()).add(piece)
    check_depth(rules)
    return "".join(parts)


def _json_at(text: str, position: int) -> tuple[object, int]:
    found = _BLANKS.match(text, position)
    start = found.end() if found else position
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"grammar: {_where(text, start)}: no JSON that can be read: {error}") from None
    require_characters(value, f"grammar: {_where(text, start)}")
    return value, end


def _schema_text(text: str, position: int, schema: object, whitespace: str | None, json_text: JsonText) -> str:
    try:
        return " " + json_text(schema, whitespace, "")
    except GrammarError as error:
        raise GrammarError(f"grammar: the %json at {_where(text, position)}: {error.message}") from None


def _where(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {position - text.rfind(chr(10), 0, position)}"


# ---- GBNF


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    plain = "".join(_bars_moved(_gbnf_pieces(text)))
    try:
        return gbnf_to_lark(plain)
    except GbnfToLarkError as error:
        raise GrammarError(f"grammar: {' '.join(str(error).split())[:500]}") from error
    except RecursionError:
        raise GrammarError("grammar: it is nested too deeply") from None
    except Exception as error:  # the converter's own, without a place
        raise GrammarError(f"grammar: {error}{_place_of_name(plain, str(error))}") from error


def _bars_moved(pieces: Iterator[str]) -> Iterator[str]:
    """Each `|` before the blanks and line breaks that come before it: the converter ends a rule at a line break."""
    blanks: list[str] = []
    for piece in pieces:
        if piece.isspace():
            blanks.append(piece)
            continue
        yield from ("|", *blanks) if piece == "|" else (*blanks, piece)
        blanks = []
    yield from blanks


def _gbnf_pieces(text: str) -> Iterator[str]:
    """The same grammar in what the converter knows; comments are left out."""
    rules: dict[str, set[str]] = {}
    names = set(_GBNF_RULE.findall(text))
    free = (f"start-{number}" for number in range(len(names) + 1) if f"start-{number}" not in names)
    other = next(free) if "start" in names else "start"  # the converter gives this name to root
    rule = ""
    for found in _GBNF_PIECE.finditer(text):
        kind, piece = found.lastgroup, found.group()
        if kind == "bad":
            raise GrammarError(f"grammar: {_where(text, found.start())}: a text or a class that does not end")
        if kind == "text":
            yield _gbnf_text(text, found.start(), piece[1:-1])
        elif kind == "set":
            yield _gbnf_set(text, found.start(), piece[1:-1])
        elif kind == "rest" and piece == ".":
            yield "[\\x00-\U0010ffff]"
        elif kind == "name":
            rule = piece if _GBNF_DEFINED.match(text, found.end()) else rule
            rules.setdefault(rule, set()).add(piece)
            yield other if piece == "start" else piece
        elif kind == "rest":
            yield piece
    check_depth(rules)


def _gbnf_text(text: str, position: int, inner: str) -> str:
    """A literal; a control character in it becomes a class, since Lark's literals have none."""
    parts, written = [], ""
    for character in _characters(text, position, inner):
        if character in "\n\r\t":
            written += {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
        elif ord(character) < 32 or character == "\x7f":
            parts += [f'"{written}"', f"[\\x{ord(character):02x}]"]
            written = ""
        else:
            written += f"\\{character}" if character in '"\\' else character
    parts.append(f'"{written}"')
    kept = [part for part in parts if part != '""'] or ['""']
    return kept[0] if len(kept) == 1 else f"({' '.join(kept)})"


def _gbnf_set(text: str, position: int, inner: str) -> str:
    sign = "^" if inner.startswith("^") else ""
    found = list(_characters(text, position, inner[len(sign) :], marks=True))
    written, place = "", 0
    while place < len(found):
        if found[place + 1 : place + 2] == ["-"] and place + 2 < len(found):
            written += f"{_in_set(found[place])}-{_in_set(found[place + 2])}"
            place += 3
        else:
            written += _in_set(found[place])
            place += 1
    return f"[{sign}{written}]"


def _in_set(character: str) -> str:
    plain = character[-1]  # an escaped sign is marked by a backslash before it
    return plain if plain.isalnum() or ord(plain) > 127 else f"\\x{ord(plain):02x}"


def _characters(text: str, position: int, inner: str, *, marks: bool = False) -> Iterator[str]:
    """The characters that an inner text with escapes means. `marks`: those that are written with one have a backslash
    before them. Raises GrammarError.
    """
    for found in _CHARACTER.finditer(inner):
        number = found[1] or found[2] or found[3]
        if number is not None and (int(number, 16) > 0x10FFFF or 0xD800 <= int(number, 16) <= 0xDFFF):
            raise GrammarError(f"grammar: {_where(text, position)}: {found.group()} is not a character")
        if found[4] is not None and found[4] not in '"\\[]^-nrt':
            raise GrammarError(f"grammar: {_where(text, position)}: {found.group()!r} is not an escape of GBNF")
        escaped = chr(int(number, 16)) if number is not None else _SHORT.get(found[4], found[4])
        yield found[5] if escaped is None else f"\\{escaped}" if marks else escaped


def _place_of_name(text: str, message: str) -> str:
    named = re.search(r"'([\w-]+)'", message)
    found = named and re.search(rf"(?<![\w-]){re.escape(named[1])}(?![\w-])", text)
    return f" (at {_where(text, found.start())})" if found else ""


# ---- depth


def check_depth(rules: dict[str, set[str]]) -> None:
    """Raises GrammarError if rules refer to rules in chains longer than MOST_DEPTH. `rules`: the names in each."""
    depths: dict[str, int] = {}
    for start in rules:
        waiting = [start]
        under: set[str] = set()
        while waiting:
            name = waiting[-1]
            inner = [other for other in rules.get(name, ()) if other in rules]
            if name not in depths and name not in under:
                under.add(name)
                waiting += [other for other in inner if other not in depths and other not in under]
                continue
            waiting.pop()
            if name in under:
                under.discard(name)
                depths[name] = 1 + max((depths.get(other, 0) for other in inner if other != name), default=0)
                if depths[name] > MOST_DEPTH:
                    raise GrammarError(f"grammar: rules refer to rules more than {MOST_DEPTH} deep, at {name[:60]!r}")
