"""Checks JSON one character at a time."""

from __future__ import annotations

import json
import re

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_SPACES = " \t\n\r"
_MOST_DEPTH = 256


def object_in(written: str) -> str:
    """The JSON object that a JSON string, written like this between its quotes, holds; "" if it holds none."""
    try:
        text = json.loads(f'"{written}"', strict=False).strip(_SPACES)
        text.encode()  # half of a surrogate pair has no UTF-8
    except ValueError:
        return ""
    scanner, found = JsonScanner(), list[str]()
    for character in text:
        pushed = None if scanner.done else scanner.push(character)
        if pushed is None:
            return ""
        found.append(pushed)
    return "".join(found) if scanner.done else ""


class JsonScanner:
    """Follows one JSON object or array up to its last bracket.

    Control characters within strings, which models write and JSON forbids, are escaped in what `push` returns.
    """

    __slots__ = ("_escape", "_expected", "_in_string", "_scalar", "_stack", "done")

    def __init__(self) -> None:
        self.done = False
        self._stack: list[str] = []  # "}" and "]" that close what is open
        self._expected = "open"  # open, value, value or end, key, key or end, colon, comma or end
        self._in_string = False
        self._escape = 0  # in a string: characters of an escape that follow; -1: its kind follows
        self._scalar = ""  # a number or a word so far

    def push(self, character: str) -> str | None:
        """The character, as it is to be written; None if it cannot follow."""
        if self._in_string:
            return self._in_a_string(character)
        if self._scalar:
            if character not in ",]}" and character not in _SPACES:
                return self._in_a_scalar(character)
            if not self._is_scalar():
                return None
            self._scalar, self._expected = "", "comma or end"
        if character in _SPACES:
            return character if self._stack else None
        return character if self._structural(character) else None

    def _structural(self, character: str) -> bool:
        expected = self._expected
        if character in "{[" and expected in ("open", "value", "value or end") and len(self._stack) < _MOST_DEPTH:
            self._stack.append("}" if character == "{" else "]")
            self._expected = "key or end" if character == "{" else "value or end"
            return True
        if character in "}]" and expected.endswith("or end") and self._stack[-1] == character:
            self._stack.pop()
            self._expected = "comma or end"
            self.done = not self._stack
            return True
        if character == '"' and expected not in ("open", "colon", "comma or end"):
            self._in_string = True
            self._expected = "colon" if expected.startswith("key") else "comma or end"
            return True
        if character == ":" and expected == "colon":
            self._expected = "value"
            return True
        if character == "," and expected == "comma or end":
            self._expected = "key" if self._stack[-1] == "}" else "value"
            return True
        if expected in ("value", "value or end") and character in "-0123456789tfn":
            self._scalar = character
            return True
        return False

    def _in_a_string(self, character: str) -> str | None:
        if self._escape < 0:
            if character not in '"\\/bfnrtu':
                return None
            self._escape = 4 if character == "u" else 0
        elif self._escape:
            if character not in "0123456789abcdefABCDEF":
                return None
            self._escape -= 1
        elif character == "\\":
            self._escape = -1
        elif character == '"':
            self._in_string = False
        elif character < " ":
            return json.dumps(character)[1:-1]
        return character

    def _in_a_scalar(self, character: str) -> str | None:
        longer = self._scalar + character
        if longer[0] in "tfn":
            if not any(word.startswith(longer) for word in _WORDS):
                return None
        elif character not in "0123456789.eE+-":
            return None
        self._scalar = longer
        return character

    def _is_scalar(self) -> bool:
        return self._scalar in _WORDS or _NUMBER.fullmatch(self._scalar) is not None
