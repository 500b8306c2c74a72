"""What a parser finds in an answer's text, and the contract of parsers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, which are JSON text."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments
MakeId = Callable[[int], str]
"""The id of a call, by its index, unless its dialect writes ids."""


class Parser(ABC):
    """Divides an answer's text into pieces. The pieces, joined, do not depend on how the text was cut for `feed`.

    Text is never lost: what is not part of a call, or of the markers around calls and reasoning, is content or
    reasoning. No text raises an error.
    """

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""

    @abstractmethod
    def end(self) -> list[Piece]:
        """What was held back. To be called once, after the last text."""

    def end_whole(self) -> list[Piece]:
        """`end` of an answer that the model ended, so nothing of it is cut."""
        return self.end()

    @property
    @abstractmethod
    def reasoning(self) -> bool:
        """Whether the next character belongs to reasoning, as far as is known."""

    @property
    def cut(self) -> str:
        """After `end`: the last part of the content, if it may be the beginning of a call or a marker."""
        return ""


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, with adjacent ones of one kind joined."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            found[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            found.append(piece)
    return found


class Bound(Parser):
    """Reads an answer under a grammar with calls: the beginning of a call, where the answer is cut, is no content.

    `forced`: the answer is nothing but calls. `begins`: texts that only a call begins with. `first`: only at the
    beginning of the answer.
    """

    def __init__(self, parser: Parser, begins: Iterable[str], *, forced: bool, first: bool) -> None:
        self._parser = parser
        self._begins, self._first = tuple(begins), first
        self._calls = forced  # whether nothing but calls can follow
        self._said = False

    def feed(self, text: str) -> list[Piece]:
        pieces = self._parser.feed(text)
        self._note(pieces)
        return pieces

    def end(self) -> list[Piece]:
        return self._end(whole=False)

    def end_whole(self) -> list[Piece]:
        return self._end(whole=True)

    def _end(self, *, whole: bool) -> list[Piece]:
        pieces = self._parser.end_whole() if whole else self._parser.end()
        cut = self._parser.cut
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        others: list[Piece] = [piece for piece in pieces if not isinstance(piece, Content)]
        self._note(others)
        if self._calls:
            return others
        if whole:
            return pieces
        before = text.removesuffix(cut)
        if not cut or not cut.startswith(self._begins) or (self._first and (self._said or before.strip())):
            return pieces
        return [*others, Content(before.rstrip())] if before.strip() else others

    @property
    def reasoning(self) -> bool:
        return self._parser.reasoning

    def _note(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._calls = self._calls or isinstance(piece, CallStart)
            self._said = self._said or (isinstance(piece, Content) and not piece.text.isspace())


class Chain(Parser):
    """A parser of reasoning, and one of tool calls for the content that the first one finds."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Piece]:
        return self._through(self._first.feed(text))

    def end(self) -> list[Piece]:
        return self._through(self._first.end()) + self._second.end()

    def end_whole(self) -> list[Piece]:
        return self._through(self._first.end_whole()) + self._second.end_whole()

    @property
    def reasoning(self) -> bool:
        return self._first.reasoning

    @property
    def cut(self) -> str:
        return self._first.cut or self._second.cut

    def _through(self, pieces: list[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._second.feed(piece.text) if isinstance(piece, Content) else [piece]
        return found
