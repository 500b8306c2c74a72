"""Finds stop strings in text that arrives in pieces, at the same token in every process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from alignedserve.request import SamplingParams
from alignedserve.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from alignedserve.text.tokenizer import Tokenizer


class StopMatcher:
    """Passes text through, but holds back text that could be the start of a stop string.

    The first complete match wins, however the text was split into pieces. No text is released after a match.
    `include`: the text that is released ends with the stop string, not before it.
    """

    __slots__ = ("_first", "_held", "_hold", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._include = include
        self._stops = tuple(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._hold = max(map(len, stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can no longer be part of a stop string."""
        if self.matched is not None:
            return ""
        text = self._held + text
        best: tuple[int, int, str] | None = None  # end, begin: earliest end, then longest
        for stop in self._stops:
            begin = text.find(stop)
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
                best = (begin + len(stop), begin, stop)
        if best is not None:
            self.matched, self._held = best[2], ""
            return text[: best[0] if self._include else best[1]]
        cut = self._possible_begin(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The text that is still held back. To be called once no more text follows."""
        held, self._held = self._held, ""
        return held

    def _possible_begin(self, text: str) -> int:
        """The position where an incomplete stop string may begin; the text's length if there is none."""
        for begin in range(max(0, len(text) - self._hold), len(text)):
            if text[begin] in self._first:
                tail = text[begin:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return begin
        return len(text)


class StoppableText:
    """The text of an answer, token by token, up to its stop string.

    The first `min_tokens` tokens never complete a stop string. `length` counts the characters of all tokens so far,
    held back or not. `include_stop`: the text ends with the stop string.
    """

    __slots__ = ("_detokenizer", "_matcher", "_skip", "length")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        context_ids: Sequence[int] = (),
        min_tokens: int = 0,
        *,
        skip_special: bool = True,
        spaces: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, context_ids, skip_special=skip_special, spaces=spaces)
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None
        self._skip = min_tokens
        self.length = 0

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self._matcher is None else self._matcher.matched

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, sampling: SamplingParams, prompt: Sequence[int], *, include_stop: bool = False
    ) -> StoppableText:
        """The text of an answer to `prompt`."""
        return cls(
            tokenizer,
            sampling.stop,
            prompt,
            sampling.min_tokens,
            skip_special=sampling.skip_special_tokens,
            spaces=sampling.spaces_between_special_tokens,
            include_stop=include_stop,
        )

    def push(self, token: int) -> str:
        """The text that can be shown after this token."""
        text = self._detokenizer.push(token)
        self.length += len(text)
        if self._matcher is None:
            return text
        if self._skip > 0:
            self._skip -= 1
            return text
        return self._matcher.push(text) if text else ""

    def finish(self) -> str:
        """The rest of the text, once the answer has ended."""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        return self._matcher.push(text) + self._matcher.finish()


class StopChecker:
    """Tells a worker at which token a stop string of the answer is complete.

    `already_generated_ids` are the answer's tokens so far (of an earlier epoch), `context_ids` the prompt.
    """

    __slots__ = ("_text",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        already_generated_ids: Iterable[int] = (),
        context_ids: Sequence[int] = (),
        min_tokens: int = 0,
        *,
        skip_special: bool = True,
        spaces: bool = True,
    ) -> None:
        self._text = StoppableText(tokenizer, stops, context_ids, min_tokens, skip_special=skip_special, spaces=spaces)
        for token in already_generated_ids:
            self._text.push(token)

    def push(self, token_id: int) -> bool:
        """True once a stop string is complete."""
        self._text.push(token_id)
        return self._text.stopped
