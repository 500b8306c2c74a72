"""Marks the user's text before a chat template renders it, so that it stays recognisable in the result.

Each character that occurs in the spelling of a special token is replaced by a private character, its mark, before the
template sees the text. So the template's output never spells a special token with the user's characters. `UserText`
behaves in the template's expressions (`in`, `split`, `==`) as if it had no marks.
"""

from __future__ import annotations

import re
from codecs import charmap_decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, wraps
from typing import Any

from alignedserve.errors import InvalidRequestError

_PRIVATE = [(0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)]
_PRIVATE_CHARACTER = re.compile("[" + "".join(f"{chr(low)}-{chr(high)}" for low, high in _PRIVATE) + "]")
_DECODED = frozenset("&\\%{}")  # these begin entities, escapes and formats, which a template may decode
_LAST_CASED = 0x1E943  # the last character of Unicode that has a case


class Marks:
    """The private characters that stand for the user's characters. `spellings` are the special tokens' texts.

    Every character of a spelling is marked, except white space, and so is every character that a change of case can
    turn into one of them. A template could otherwise build a special token from its own and the user's characters.
    """

    def __init__(self, spellings: Iterable[str], taken: Iterable[str] = ()) -> None:
        self._spellings = tuple(spellings)
        free = _free_characters({*taken, *"".join(self._spellings)})
        self._marks = {character: next(free) for character in sorted(_spelled_with(self._spellings))}
        self._of_bytes = "".join(self._marks.get(character, character) for character in map(chr, range(256)))

    def for_texts(self, texts: Iterable[str]) -> Marks:
        """Marks that do not occur in these texts."""
        taken = {found for text in texts if not text.isascii() for found in _PRIVATE_CHARACTER.findall(text)}
        return Marks(self._spellings, taken) if taken.intersection(self._marks.values()) else self

    def mark(self, text: str) -> UserText:
        try:  # fast: a few milliseconds for 4 MiB
            marked, _ = charmap_decode(text.encode("latin-1"), "strict", self._of_bytes)
        except UnicodeEncodeError:
            marked = text
            for character, mark in self._marks.items():
                marked = marked.replace(character, mark)
        return UserText(marked, self, text)

    def unmark(self, text: str) -> str:
        """The text without marks. A plain `str` may contain marks, too."""
        if isinstance(text, UserText):
            return text._text
        if not text.isascii():  # marks are not ASCII
            for character, mark in self._marks.items():
                text = text.replace(mark, character)
        return text


@lru_cache(maxsize=4)
def _spelled_with(spellings: tuple[str, ...]) -> frozenset[str]:
    found = {character for text in spellings for character in text if not character.isspace()}
    cased = [c for c in map(chr, range(_LAST_CASED + 1)) if c.lower() != c or c.upper() != c] if found else []
    more = found | _DECODED if found else found
    while more - found:
        found |= more
        more = {c for c in cased if not found.isdisjoint(f"{c.lower()}{c.upper()}{c.title()}{c.casefold()}")}
    return frozenset(found)


def _free_characters(taken: set[str]) -> Iterator[str]:
    for low, high in _PRIVATE:
        yield from (chr(point) for point in range(low, high + 1) if chr(point) not in taken)
    raise InvalidRequestError("the messages contain all private-use characters of Unicode", param="messages")


def _plain(value: Any) -> Any:
    if isinstance(value, UserText):
        return value._text
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _asked(name: str) -> Any:
    """A method that does not return text: it is called on the plain text."""
    method = getattr(str, name)

    def ask(self: UserText, *arguments: Any) -> Any:
        return method(self._text, *map(_plain, arguments))

    return ask


def _recased(name: str) -> Any:
    method: Callable[[str], str] = getattr(str, name)

    def recase(self: UserText) -> UserText:
        return self._marks.mark(method(self._text))

    return recase


class UserText(str):
    """Marked text; `text` is the same text without marks.

    The characters of the string itself are the marked ones, so marks survive code that does not know them (`"".join`, a
    filter written in C). A mark stands for one character, so positions and lengths are the same.
    """

    _marks: Marks
    _text: str

    def __new__(cls, marked: str, marks: Marks, text: str) -> UserText:
        made = super().__new__(cls, marked)
        made._marks, made._text = marks, text
        return made

    def _each(self, marked: Iterable[str], texts: Iterable[str]) -> list[UserText]:
        return [UserText(piece, self._marks, text) for piece, text in zip(marked, texts, strict=True)]

    def __str__(self) -> UserText:
        return self

    def __repr__(self) -> UserText:
        return self._marks.mark(repr(self._text))

    __eq__, __ne__, __hash__ = _asked("__eq__"), _asked("__ne__"), _asked("__hash__")
    __lt__, __le__, __gt__, __ge__ = _asked("__lt__"), _asked("__le__"), _asked("__gt__"), _asked("__ge__")
    __contains__ = _asked("__contains__")
    startswith, endswith, count = _asked("startswith"), _asked("endswith"), _asked("count")
    find, rfind, index, rindex = _asked("find"), _asked("rfind"), _asked("index"), _asked("rindex")
    isalnum, isalpha, isascii = _asked("isalnum"), _asked("isalpha"), _asked("isascii")
    isdecimal, isdigit, isnumeric = _asked("isdecimal"), _asked("isdigit"), _asked("isnumeric")
    isidentifier, isprintable = _asked("isidentifier"), _asked("isprintable")
    islower, isupper, istitle = _asked("islower"), _asked("isupper"), _asked("istitle")
    lower, upper, casefold = _recased("lower"), _recased("upper"), _recased("casefold")
    capitalize, title, swapcase = _recased("capitalize"), _recased("title"), _recased("swapcase")

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, str):
            return NotImplemented
        joined = super().__add__(other)
        return UserText(joined, self._marks, self._text + self._marks.unmark(other))

    def __radd__(self, other: Any) -> Any:
        if not isinstance(other, str):
            return NotImplemented
        return UserText(str.__add__(other, self), self._marks, self._marks.unmark(other) + self._text)

    def __mul__(self, times: Any) -> UserText:
        return UserText(super().__mul__(times), self._marks, self._text * times)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> UserText:
        return UserText(super().__getitem__(key), self._marks, self._text[key])

    def __iter__(self) -> Iterator[UserText]:
        return iter(self._each(super().__iter__(), self._text))

    def strip(self, chars: str | None = None) -> UserText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> UserText:
        return self[len(self) - len(self._text.lstrip(_plain(chars))) :]

    def rstrip(self, chars: str | None = None) -> UserText:
        return self[: len(self._text.rstrip(_plain(chars)))]

    def removeprefix(self, prefix: str, /) -> UserText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> UserText:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        if sep is None:  # white space is never marked
            return self._each(super().split(None, maxsplit), self._text.split(None, maxsplit))
        return list(self._cut(self._text.split(_plain(sep), maxsplit), len(sep)))

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        if sep is None:
            return self._each(super().rsplit(None, maxsplit), self._text.rsplit(None, maxsplit))
        return list(self._cut(self._text.rsplit(_plain(sep), maxsplit), len(sep)))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return self._each(super().splitlines(keepends), self._text.splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[Any, Any, Any]:
        head, middle, tail = self._cut(self._text.partition(_plain(sep)), 0)
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[Any, Any, Any]:
        head, middle, tail = self._cut(self._text.rpartition(_plain(sep)), 0)
        return head, middle, tail

    def replace(self, old: str, new: str, count: Any = -1, /) -> UserText:
        """`new` is the template's own text, unless it is marked, too."""
        marked = str.join(new, self.split(old, count)) if old else super().replace(old, new, count)
        return UserText(marked, self._marks, self._text.replace(_plain(old), self._marks.unmark(new), count))

    def _cut(self, pieces: Iterable[str], between: int) -> Iterator[UserText]:
        at = 0
        for piece in pieces:
            yield self[at : at + len(piece)]
            at += len(piece) + between


def join_texts(pieces: Iterable[str]) -> str:
    """`"".join`. The result is a UserText if one of the pieces is."""
    pieces = list(pieces)
    marks, joined = marks_in(pieces), "".join(pieces)
    return joined if marks is None else UserText(joined, marks, "".join(map(marks.unmark, pieces)))


def marks_in(value: Any) -> Marks | None:
    """The marks of a text, or of any text within lists and mappings; None if there is no UserText."""
    if isinstance(value, UserText):
        return value._marks
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    elif not isinstance(value, list | tuple):
        return None
    return next((marks for entry in value if (marks := marks_in(entry)) is not None), None)


def unmarked(value: Any) -> Any:
    """The same value, with plain text instead of UserText."""
    if isinstance(value, Mapping):
        return {_plain(key): unmarked(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(unmarked, value)) if isinstance(value, tuple) else list(map(unmarked, value))
    return _plain(value)


def on_plain_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that reads characters. It gets plain text, and the text that it returns is marked as the user's."""

    @wraps(function)
    def apply(*arguments: Any, **options: Any) -> Any:
        marks = marks_in([*arguments, options])
        if marks is None:
            return function(*arguments, **options)
        made = function(*map(unmarked, arguments), **unmarked(options))
        if not isinstance(made, str):
            return made
        marked = marks.mark(str.__str__(made))
        return marked if type(made) is str else type(made)(marked)  # Markup stays Markup

    return apply


def text_of_method(function: Callable[..., Any]) -> str | None:
    """The string that a method is bound to; None for other functions. Jinja wraps `format`."""
    text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    return text if isinstance(text, str) else None


def on_texts(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that builds a text from others. The user's text stays marked in it."""

    @wraps(function)
    def apply(*arguments: Any, **options: Any) -> Any:
        given = [list(value) if isinstance(value, Iterator) else value for value in arguments]
        made = function(*given, **options)
        marks = marks_in([text_of_method(function), *given, options]) if type(made) is str else None
        return made if marks is None else UserText(made, marks, marks.unmark(made))

    return apply
