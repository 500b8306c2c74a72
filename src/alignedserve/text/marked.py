"""An answer's text with some special tokens written in it: the markers by which reasoning and tool calls are found."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from alignedserve.text.stops import StoppableText


class MarkedText:
    """A StoppableText whose pieces contain the spelling of the special tokens `markers`, each at its place.

    Stop strings are found in the text without markers, as workers do. What follows a stop string is dropped.
    """

    __slots__ = ("_markers", "_shown", "_text", "_waiting")

    def __init__(self, text: StoppableText, markers: Mapping[int, str]) -> None:
        self._text = text
        self._markers = markers
        self._shown = 0  # characters of the text without markers that were returned
        self._waiting: deque[tuple[int, str]] = deque()  # markers, by the character that they stand before

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def stop(self) -> str | None:
        return self._text.stop

    @property
    def length(self) -> int:
        """Characters of all tokens so far, without markers."""
        return self._text.length

    def push(self, token: int) -> str:
        """The text that can be shown after this token."""
        marker = self._markers.get(token)
        if marker is not None:
            self._waiting.append((self._text.length, marker))
        return self._with_markers(self._text.push(token))

    def finish(self) -> str:
        """The rest of the text, once the answer has ended."""
        text = self._with_markers(self._text.finish())
        return text if self.stopped else text + "".join(marker for _, marker in self._waiting)

    def _with_markers(self, text: str) -> str:
        if not self._waiting:
            self._shown += len(text)
            return text
        pieces, at, end = [], 0, self._shown + len(text)
        while self._waiting and self._waiting[0][0] <= end and not (self.stopped and self._waiting[0][0] == end):
            place, marker = self._waiting.popleft()
            pieces += [text[at : place - self._shown], marker]
            at = place - self._shown
        self._shown = end
        return "".join([*pieces, text[at:]])
