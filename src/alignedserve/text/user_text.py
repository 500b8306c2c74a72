"""Text that somebody else wrote, on its way through a chat template: recognisable wherever it comes out again.

Each character that a special token is spelled with is replaced by a private one, its mark, before the template sees the
text. Whatever the template does with it then, and whatever it puts beside it, no special token is spelled with a
character of the user's. `UserText` answers the template's questions (`in`, `split`, `==`) as if there were no marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from alignedserve.errors import InvalidRequestError

_PRIVATE = [(0xE000, 0xF8FF), (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)]
_PRIVATE_CHARACTER = re.compile("[" + "".join(f"{chr(low)}-{chr(high)}" for low, high in _PRIVATE) + "]")
_DECODED = frozenset("&\\%{}")  # what begins an entity, an escape or a format: templates may decode those


class Marks:
    """Which private character stands for which. `spellings` are the special tokens' texts.

    A text no longer than the longest of them is marked wholly, so that a template cannot put special characters of its
    own around it; of a longer one, all that is no letter or digit, and what special tokens begin and end with.
    """

    def __init__(self, spellings: Iterable[str], taken: Iterable[str] = ()) -> None:
        self._spellings = tuple(spellings)
        self._longest = max(map(len, self._spellings), default=0)
        ends = {text[end] for text in self._spellings for end in (0, -1)}
        every = {character for text in self._spellings for character in text if not character.isspace()}
        some = {character for character in every if not character.isalnum()} | (ends & every)
        if self._spellings:
            some |= _DECODED
        free = _free_characters(set(taken))
        self._some = {character: next(free) for character in sorted(some)}
        self._every = {**self._some, **{character: next(free) for character in sorted(every - some)}}
        self._table = str.maketrans(self._every)

    def for_texts(self, texts: Iterable[str]) -> Marks:
        """Marks that none of these texts has in it already."""
        taken = {found for text in texts if not text.isascii() for found in _PRIVATE_CHARACTER.findall(text)}
        return Marks(self._spellings, taken) if taken.intersection(self._every.values()) else self

    def mark(self, text: str) -> UserText:
        if len(text) <= self._longest:
            return UserText(text.translate(self._table), self)
        for character, mark in self._some.items():
            text = text.replace(character, mark)
        return UserText(text, self)

    def unmark(self, text: str) -> str:
        if not text.isascii():  # marks are not ASCII
            for character, mark in self._every.items():
                text = text.replace(mark, character)
        return text


def _free_characters(taken: set[str]) -> Iterator[str]:
    for low, high in _PRIVATE:
        yield from (chr(point) for point in range(low, high + 1) if chr(point) not in taken)
    raise InvalidRequestError("the messages have every private-use character of Unicode in them", param="messages")


def _plain(value: Any) -> Any:
    if isinstance(value, UserText):
        return value._marks.unmark(str.__str__(value))
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _asked(name: str) -> Any:
    """A method whose answer is no text: what the plain text answers."""
    method = getattr(str, name)

    def ask(self: UserText, *arguments: Any) -> Any:
        return method(_plain(self), *map(_plain, arguments))

    return ask


def _recased(name: str) -> Any:
    method: Callable[[str], str] = getattr(str, name)

    def recase(self: UserText) -> UserText:
        return self._marks.mark(method(_plain(self)))

    return recase


class UserText(str):
    """Marked text. Its characters are the marked ones, also for code that knows nothing of marks (`"".join`, a filter
    written in C): so nothing is ever lost. One mark stands for one character: positions and lengths are the same.
    """

    _marks: Marks

    def __new__(cls, marked: str, marks: Marks) -> UserText:
        text = super().__new__(cls, marked)
        text._marks = marks
        return text

    def _like(self, marked: str) -> UserText:
        return UserText(marked, self._marks)

    def __str__(self) -> UserText:
        return self

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
        joined = super().__add__(other)
        return joined if joined is NotImplemented else self._like(joined)

    def __radd__(self, other: Any) -> Any:
        return self._like(str.__add__(other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: Any) -> UserText:
        return self._like(super().__getitem__(key))

    def __iter__(self) -> Iterator[UserText]:
        return map(self._like, super().__iter__())

    def strip(self, chars: str | None = None) -> UserText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> UserText:
        return self[len(self) - len(_plain(self).lstrip(_plain(chars))) :]

    def rstrip(self, chars: str | None = None) -> UserText:
        return self[: len(_plain(self).rstrip(_plain(chars)))]

    def removeprefix(self, prefix: str, /) -> UserText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> UserText:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        if sep is None:  # white space is never marked
            return list(map(self._like, super().split(None, maxsplit)))
        return list(self._cut(_plain(self).split(_plain(sep), maxsplit), len(sep)))

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        if sep is None:
            return list(map(self._like, super().rsplit(None, maxsplit)))
        return list(self._cut(_plain(self).rsplit(_plain(sep), maxsplit), len(sep)))

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return list(map(self._like, super().splitlines(keepends)))

    def partition(self, sep: str, /) -> tuple[Any, Any, Any]:
        head, middle, tail = self._cut(_plain(self).partition(_plain(sep)), 0)
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[Any, Any, Any]:
        head, middle, tail = self._cut(_plain(self).rpartition(_plain(sep)), 0)
        return head, middle, tail

    def replace(self, old: str, new: str, count: Any = -1, /) -> UserText:
        """What the template puts in its place is the template's own text, unless it comes from a user, too."""
        if not old:
            return self._like(super().replace(old, new, count))
        return self._like(str.join(new, self.split(old, count)))

    def _cut(self, pieces: Iterable[str], between: int) -> Iterator[UserText]:
        at = 0
        for piece in pieces:
            yield self[at : at + len(piece)]
            at += len(piece) + between


def join_texts(pieces: Iterable[str]) -> str:
    """`"".join`, of which a template's later questions get the right answers, too."""
    pieces = list(pieces)
    marked = next((piece for piece in pieces if isinstance(piece, UserText)), None)
    return "".join(pieces) if marked is None else marked._like("".join(pieces))


def marks_in(value: Any) -> Marks | None:
    """The marks of a text, or of any text within lists and mappings; None where no user's text is among them."""
    if isinstance(value, UserText):
        return value._marks
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    elif not isinstance(value, list | tuple):
        return None
    return next((marks for entry in value if (marks := marks_in(entry)) is not None), None)


def unmarked(value: Any) -> Any:
    """The same value with plain text in it."""
    if isinstance(value, Mapping):
        return {_plain(key): unmarked(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [unmarked(entry) for entry in value]
    return _plain(value)


def on_plain_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that encodes or decodes text: it works on the plain one, and all that it makes of it is the user's."""

    def apply(value: Any, *arguments: Any, **options: Any) -> Any:
        marks = marks_in(value)
        made = function(unmarked(value) if marks is not None else value, *arguments, **options)
        return made if marks is None else marks.mark(str(made))

    return apply
