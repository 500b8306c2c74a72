"""Grammars of tool calls and reasoning for xgrammar.

The dialects write them in Lark of llguidance (`gateway/dialects/lark.py`), one rule a line. xgrammar reads such Lark
too, but not these, which become grammars of their own that the Lark refers to by `@name`: free text, text up to a
marker, text without one, JSON, and the client's own grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import xgrammar

from alignedserve.errors import GrammarError
from alignedserve.grammar.client_grammars import lark_pieces

_ANY = r"/(?s:.*)/"
_NO_CALL = re.compile(r"/\\s\*\(\[\^\\s(?P<openers>(?:\\.|[^\]\\])*)\]\(\?s:\.\*\)\)\?/")
_LINE = re.compile(r'(?P<name>\w+)(?:\[suffix=(?P<end>"(?:[^"\\]|\\.)*")\])?: (?P<body>.*)')
_WITHOUT = re.compile(rf"{re.escape(_ANY)} & ~/\(\?s:\.\*\)(?P<text>.*)\(\?s:\.\*\)/")
_SPACES = r" \t\n\r\x0b\x0c\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ALL = r"[\x00-\U0010ffff]*"
JsonGrammar = Callable[[Any], xgrammar.Grammar]


def composed_lark(
    text: str, answer: xgrammar.Grammar | None, json_grammar: JsonGrammar
) -> tuple[str, dict[str, xgrammar.Grammar | str]]:
    """The Lark, and the grammars that it refers to by name. Raises GrammarError."""
    named: dict[str, xgrammar.Grammar | str] = {} if answer is None else {"answer": answer}
    lines = []
    for line in filter(None, text.split("\n")):
        found = _LINE.fullmatch(line)
        if found is None:
            raise GrammarError(f"xgrammar cannot follow {line[:80]!r}")
        name, own = found["name"].lower(), _own_grammar(found, json_grammar)
        if own is not None:
            named[name] = own
        lines.append(f"{name}: {_lowered(found['body']) if own is None else f'@{name}'}")
    return "\n".join(lines) + "\n", named


def _own_grammar(found: re.Match[str], json_grammar: JsonGrammar) -> xgrammar.Grammar | None:
    body = found["body"]
    if found["end"]:
        return xgrammar.Grammar.from_ebnf(text_until(json.loads(found["end"])))
    if body == _ANY:
        return xgrammar.Grammar.from_ebnf(f"root ::= {_ALL}")
    if no_call := _NO_CALL.fullmatch(body):
        openers = "".join(map(_escaped, re.sub(r"\\(.)", r"\1", no_call["openers"])))
        return xgrammar.Grammar.from_ebnf(rf'root ::= [{_SPACES}]* ("" | [^{_SPACES}{openers}] {_ALL})')
    if without := _WITHOUT.fullmatch(body):
        return xgrammar.Grammar.from_ebnf(text_until(re.sub(r"\\(.)", r"\1", without["text"]), without=True))
    if body.startswith("%json "):
        schema = json.loads(body.removeprefix("%json "))
        schema.pop("x-guidance", None)
        return json_grammar(schema)
    return None


def _lowered(body: str) -> str:
    """The expression with terminals as rules: a terminal cannot refer to a grammar."""
    return "".join(piece.lower() if kind == "name" else piece for kind, piece in lark_pieces(body))


def text_until(end: str, *, without: bool = False) -> str:
    """EBNF of text up to and including the first `end`; or of text that does not contain it.

    One rule for each number of characters of `end` that the text may have just begun (Knuth, Morris and Pratt).
    """
    rules = []
    for state in range(len(end)):
        choices = ['""'] if without else []
        for character in sorted(set(end)):
            text = end[:state] + character
            after = next(length for length in range(len(text), -1, -1) if end.startswith(text[len(text) - length :]))
            if after < len(end):
                choices.append(f'"{_escaped(character)}" s{after}')
            elif not without:
                choices.append(f'"{_escaped(character)}"')
        choices.append(f"[^{''.join(map(_escaped, sorted(set(end))))}] s0")
        rules.append(f"s{state} ::= {' | '.join(choices)}")
    return "\n".join(["root ::= s0", *rules])


def _escaped(character: str) -> str:
    return f"\\U{ord(character):08x}"
