"""A long text in pieces, whose tokens are those of the whole: cut where that is exact, else overlapping and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alignedserve.errors import InvalidRequestError
from alignedserve.text.division import Division
from alignedserve.text.spellings import Spellings

if TYPE_CHECKING:
    from tokenizers import Encoding

PIECE = 1 << 15  # characters
MOST_UNBROKEN = 1 << 18  # characters in a row that are tokenised at once where they cannot be divided
_TRIES = 16  # an overlap may begin elsewhere: in what repeats itself, tokens may be out of step


@dataclass(slots=True)
class _Left:
    """A piece whose end is not known yet: the tokens that may still be dropped, by where in the text they end."""

    ids: list[int]
    ends: dict[int, int]  # end in the text -> index in `ids`

    def join(self, encoding: Encoding, begin: int) -> tuple[int, int] | None:
        """How many tokens of this and how many of the next piece, which begins at `begin`, are dropped: after a token
        that both have, the next piece goes on. None where they have none in common.
        """
        last_end = max(self.ends, default=0)
        for index, token in enumerate(encoding.ids):
            end = _end_of(encoding, index)
            if end is None:
                continue
            if begin + end > last_end:
                return None
            mine = self.ends.get(begin + end)
            if mine is not None and self.ids[mine] == token:
                return mine + 1, index + 1
        return None


class Divider:
    """`others` are added tokens, over which no cut may go; `encode` gives a text's encoding, `tokens` its ids."""

    def __init__(
        self,
        division: Division,
        others: Spellings,
        encode: Callable[[str], Encoding],
        tokens: Callable[[str], list[int]],
    ) -> None:
        self._division = division
        self._others = others
        self._encode = encode
        self._tokens = tokens

    def pieces(self, text: str) -> Iterator[list[int]]:
        """Raises InvalidRequestError where a part of the text cannot be divided and is too long as it is."""
        begin = 0
        left: _Left | None = None
        while begin < len(text):
            stop = self._cut_before(text, begin)
            if stop is None and not self._may_overlap(text, begin):
                stop = self._cut_after(text, begin)
            if left is None and stop is not None:
                yield self._tokens(text[begin:stop])
                begin = stop
                continue
            encoding, begin, dropped = self._next(text, begin, stop, left)
            if left is not None:
                yield left.ids[: dropped[0]]
            if stop is not None:
                yield encoding.ids[dropped[1] :]
                begin, left = stop, None
                continue
            left = self._left(encoding, begin, dropped[1])
            begin = self._overlap_begin(left, begin + PIECE)

    def _next(
        self, text: str, begin: int, stop: int | None, left: _Left | None
    ) -> tuple[Encoding, int, tuple[int, int]]:
        """The piece that begins at `begin`, or some characters before it, so that it joins with the one before."""
        for _ in range(_TRIES):
            encoding = self._encode(text[begin : begin + PIECE if stop is None else stop])
            if left is None:
                return encoding, begin, (0, 0)
            if (dropped := left.join(encoding, begin)) is not None:
                return encoding, begin, dropped
            begin -= 1
        raise _indivisible(begin)

    def _left(self, encoding: Encoding, begin: int, first: int) -> _Left:
        ends: dict[int, int] = {}
        index = len(encoding.ids) - 1
        low = PIECE - 2 * self._division.overlap
        while index >= first:
            if (end := _end_of(encoding, index)) is not None:
                if end < low:
                    break
                ends[begin + end] = index - first
            index -= 1
        return _Left(encoding.ids[first:], ends)

    def _overlap_begin(self, left: _Left, stop: int) -> int:
        """Where the next piece begins: after a token, so that both are in step from the start."""
        before = [end for end in left.ends if end <= stop - self._division.overlap]
        if not before:
            raise _indivisible(stop)
        return max(before)

    def _cut_before(self, text: str, begin: int) -> int | None:
        """The end of a piece of about the usual size that may be cut off."""
        if len(text) - begin <= PIECE + PIECE // 4:
            return len(text)
        end = begin + PIECE
        while (at := self._division.last_cut(text, begin, end)) is not None:
            if not self._others.spans(text, at):
                return at
            end = at - 1
        return None

    def _may_overlap(self, text: str, begin: int) -> bool:
        if not self._division.joins:
            return False
        run, stop = self._division.run, begin + PIECE
        return run is None or run.fullmatch(text, stop - 2 * self._division.overlap - _TRIES - 1, stop + 2) is not None

    def _cut_after(self, text: str, begin: int) -> int:
        """The first cut after a piece of the usual size."""
        cut = self._division.cut
        low, high = begin + PIECE, begin + MOST_UNBROKEN
        for match in cut.finditer(text, low, high + 1) if cut is not None else ():
            if not self._others.spans(text, match.start()):
                return match.start()
        if high < len(text):
            raise _indivisible(begin)
        return len(text)


def _end_of(encoding: Encoding, index: int) -> int | None:
    """Where in the text a token ends; None where the next one has a part of the same character."""
    span = encoding.token_to_chars(index)
    after = encoding.token_to_chars(index + 1) if index + 1 < len(encoding.ids) else None
    return None if span is None or (after is not None and after[0] < span[1]) else int(span[1])


def _indivisible(at: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the text has a part, from about its character {at} on, that cannot be tokenised in pieces: no word ends "
        f"within {MOST_UNBROKEN} characters"
    )
