"""The limit of an answer's reasoning: a function of the tokens so far, so that it survives any move of the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MOST_BEFORE = 4  # tokens of white space before reasoning


class ThinkingLimit(NamedTuple):
    """After `budget` tokens of reasoning, the tokens `close` are forced, which end it.

    `begun`: the answer begins within reasoning. Otherwise it begins with the tokens `open`, or has no reasoning.
    `before`: tokens of white space that may come before `open`. `calls`: beginnings of tool calls, which end reasoning
    without `close`.
    """

    budget: int
    open: tuple[int, ...]
    close: tuple[int, ...]
    begun: bool = False
    before: tuple[int, ...] = ()
    calls: tuple[tuple[int, ...], ...] = ()

    def forced(self, output_token_ids: Sequence[int]) -> int | None:
        """The token that must come after this output; None if any may."""
        begin = self._begin(output_token_ids)
        over = len(output_token_ids) - begin - self.budget
        if not 0 <= over < len(self.close):
            return None
        if not self.begun and tuple(output_token_ids[begin - len(self.open) : begin]) != self.open:
            return None
        thought = output_token_ids[begin : begin + self.budget]
        over_already = any(_contains(thought, end) for end in (self.close, *self.calls))
        if over_already or tuple(output_token_ids[begin + self.budget :]) != self.close[:over]:
            return None
        return self.close[over]

    def near(self, output_tokens: int) -> bool:
        """Whether a token may be forced, now or for the token after the next."""
        begin = 0 if self.begun else len(self.open)
        latest = begin if self.begun or not self.before else begin + _MOST_BEFORE
        return begin + self.budget - 2 <= output_tokens < latest + self.budget + len(self.close)

    def _begin(self, output_token_ids: Sequence[int]) -> int:
        """The place of the first token of reasoning, if the output begins with reasoning."""
        if self.begun:
            return 0
        spaces = 0
        while spaces < min(_MOST_BEFORE, len(output_token_ids)) and output_token_ids[spaces] in self.before:
            spaces += 1
        return spaces + len(self.open)


def _contains(tokens: Sequence[int], wanted: Sequence[int]) -> bool:
    first, size = wanted[0], len(wanted)
    return any(token == first and tuple(tokens[at : at + size]) == tuple(wanted) for at, token in enumerate(tokens))
