"""Tokenises a long text in pieces that have the tokens of the whole text.

A piece ends at an exact cut. Without one nearby, it overlaps with the next piece, and both are joined. If that is not
possible either, the piece is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alignedserve.errors import InvalidRequestError
from alignedserve.text.division import Division
from alignedserve.text.spellings import Spellings

if TYPE_CHECKING:
    from tokenizers import Encoding

PIECE = 1 << 14  # characters
LONG = 1 << 16  # characters; other work should not wait for a longer piece
MOST_UNBROKEN = 1 << 18  # characters; a part that cannot be divided may always be this long
_TRIES = 16  # starts of an overlap to try: in repetitive text, the tokens of one start may not align


@dataclass(frozen=True, slots=True)
class Divider:
    """`others` are added tokens that no cut may split; `encode` returns a text's encoding, `tokens` its ids."""

    division: Division
    others: Spellings
    encode: Callable[[str], Encoding]
    tokens: Callable[[str], list[int]]

    def pieces(self, text: str, unbroken: int = 0) -> Iterator[list[int]]:
        """Token ids of each piece. An empty list announces a piece of more than LONG characters.

        Raises InvalidRequestError if a part that cannot be divided is longer than MOST_UNBROKEN and `unbroken`.
        """
        return _Pieces(self, text, max(MOST_UNBROKEN, unbroken)).read()

    def cut_before(self, text: str, begin: int) -> int | None:
        """The end of a piece of at most the usual size; None if no cut is possible."""
        if len(text) - begin <= PIECE + PIECE // 4:
            return len(text)
        end = begin + PIECE
        while (at := self.division.last_cut(text, begin, end)) is not None:
            if not self.others.spans(text, at):
                return at
            end = at - 1
        return None

    def cut_after(self, text: str, begin: int, unbroken: int) -> int:
        """The first cut after a piece of the usual size.

        Raises InvalidRequestError if there is none within `unbroken` characters.
        """
        high = begin + unbroken
        for at in self.division.cuts(text, begin + PIECE, min(high, len(text) - 1)):
            if not self.others.spans(text, at):
                return at
        if high < len(text):
            raise _indivisible(unbroken)
        return len(text)

    def may_overlap(self, text: str, stop: int) -> bool:
        """Whether a piece that ends at `stop` may be joined with one that begins a little earlier."""
        run, after = self.division.run, self.division.after
        if not self.division.joins or (after is not None and after.match(text, stop) is None):
            return False
        return run is None or run.fullmatch(text, stop - 2 * self.division.overlap - _TRIES - 1, stop + 2) is not None


@dataclass(frozen=True, slots=True)
class _Seam:
    """A token that two overlapping pieces share. The next piece begins at `begin`, and continues after the token."""

    kept: int  # number of tokens of the previous piece
    begin: int
    token: int
    end: int  # position in the text at which the token ends


class _Pieces:
    """Reads one text, from its beginning to its end."""

    def __init__(self, divider: Divider, text: str, unbroken: int) -> None:
        self._divider = divider
        self._text = text
        self._unbroken = unbroken
        self._last: tuple[int, int, Encoding] | None = None

    def read(self) -> Iterator[list[int]]:
        text, begin = self._text, 0
        seam: _Seam | None = None
        while begin < len(text):
            stop, exact = self._stop(begin)
            if exact and stop - begin > LONG:
                yield []
            if exact and seam is None:
                yield self._divider.tokens(text[begin:stop])
                begin = stop
                continue
            encoding = self._encoding(begin, stop)
            first = _after(seam, encoding, begin)
            if not exact:
                if (following := self._seam(encoding, begin, stop, first)) is not None:
                    yield encoding.ids[first : following.kept]
                    begin, seam = following.begin, following
                    continue
                stop = self._divider.cut_after(text, begin, self._unbroken)
                if stop - begin > LONG:
                    yield []
                encoding = self._encoding(begin, stop)
                first = _after(seam, encoding, begin)
            yield encoding.ids[first:]
            begin, seam = stop, None

    def _stop(self, begin: int) -> tuple[int, bool]:
        """The end of a piece, and whether it is an exact cut."""
        text = self._text
        if (stop := self._divider.cut_before(text, begin)) is not None:
            return stop, True
        if self._divider.may_overlap(text, begin + PIECE):
            return begin + PIECE, False
        return self._divider.cut_after(text, begin, self._unbroken), True

    def _encoding(self, begin: int, stop: int) -> Encoding:
        if self._last is None or self._last[:2] != (begin, stop):
            self._last = (begin, stop, self._divider.encode(self._text[begin:stop]))
        return self._last[2]

    def _seam(self, encoding: Encoding, begin: int, stop: int, first: int) -> _Seam | None:
        """A seam to the next piece; None if none is found. The first try begins at the end of a token, so that the
        tokens of both pieces are likely to align.
        """
        overlap = self._divider.division.overlap
        ends = _ends(encoding, begin, max(first, 1), stop - 2 * overlap)
        starts = [end for end in ends if end <= stop - overlap]
        for shift in range(_TRIES if starts else 0):
            at = max(starts) - shift
            until, _ = self._stop(at)
            if until - at > LONG:
                return None
            following = self._encoding(at, until)
            for index, token in enumerate(following.ids):
                end = _end_of(following, index)
                if end is None:
                    continue
                if at + end > stop:
                    break
                mine = ends.get(at + end)
                if mine is not None and encoding.ids[mine] == token:
                    return _Seam(mine + 1, at, token, at + end)
        return None


def _after(seam: _Seam | None, encoding: Encoding, begin: int) -> int:
    """The first token after the seam."""
    if seam is None:
        return 0
    for index, token in enumerate(encoding.ids):
        end = _end_of(encoding, index)
        if end is not None and (token, begin + end) == (seam.token, seam.end):
            return index + 1
        if end is not None and begin + end > seam.end:
            break
    raise InvalidRequestError("the text cannot be tokenised in pieces")


def _ends(encoding: Encoding, begin: int, first: int, low: int) -> dict[int, int]:
    """Indices of the tokens from `first` on that end at `low` or later, by the position in the text of their end."""
    ends: dict[int, int] = {}
    for index in range(len(encoding.ids) - 1, first - 1, -1):
        if (end := _end_of(encoding, index)) is not None:
            if begin + end < low:
                break
            ends[begin + end] = index
    return ends


def _end_of(encoding: Encoding, index: int) -> int | None:
    """The end of a token in its text; None if the next token contains a part of the same character."""
    span = encoding.token_to_chars(index)
    after = encoding.token_to_chars(index + 1) if index + 1 < len(encoding) else None
    return None if span is None or (after is not None and after[0] < span[1]) else int(span[1])


def _indivisible(unbroken: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the text has a part that cannot be divided and is longer than {unbroken} characters, the maximum that is "
        "tokenised at once"
    )
