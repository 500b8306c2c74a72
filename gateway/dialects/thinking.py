"""Reasoning between two markers, at the beginning of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.gateway.dialects.machine import Machine, Reading
from alignedserve.gateway.dialects.pieces import Content, Piece


class ThinkingParser(Machine):
    """Reasoning up to `close`, if the answer begins with `open`, or if it has `begun` in the prompt.

    A text of `cut_by` ends it, too, and belongs to what follows. Line breaks around the markers are dropped, unless
    `whole`: then reasoning has its markers and all line breaks. A marker later in the answer is text.
    """

    def __init__(
        self, open_text: str, close_text: str, *, begun: bool, cut_by: Sequence[str] = (), whole: bool = False
    ) -> None:
        self._open, self._close = open_text, close_text
        self._cut_by, self._whole = tuple(cut_by), whole
        self._thinks = begun
        self._over = False
        super().__init__()

    @property
    def reasoning(self) -> bool:
        return self._thinks

    def feed(self, text: str) -> list[Piece]:
        if self._over and not self._again and text:
            return [Content(text)]
        return super().feed(text)

    def read(self) -> Reading[None]:
        opened = yield from self.attempt(self._opening())
        if opened or self._thinks:
            yield from self._thought()
        yield from self._rest()

    def _opening(self) -> Reading[bool]:
        space = yield from self.spaces()
        if not (yield from self.literal(self._open)):
            return False
        self.commit()
        self._thinks = True
        self.thought(space + self._open if self._whole else "")
        return True

    def _thought(self) -> Reading[None]:
        begun, breaks = False, ""

        def take(text: str) -> None:
            nonlocal begun, breaks
            if text == "\n":
                breaks += text
            elif text:
                self.thought(breaks + text if begun else text)
                begun, breaks = True, ""

        end = yield from self.until((self._close, *self._cut_by), self.thought if self._whole else take)
        self._thinks = False
        if end in self._cut_by:
            self.back(end)
        elif self._whole:
            self.thought(end)
        elif not end:
            self.thought(breaks if begun else "")
        else:
            while (yield from self.literal("\n")):
                pass

    def _rest(self) -> Reading[None]:
        self._over = True
        while character := (yield from self.char()):
            self.content(character)
