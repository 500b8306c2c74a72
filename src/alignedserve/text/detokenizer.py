"""Tokens to text, one token at a time, at a constant cost a token.

`DecodeStream` of `tokenizers` (0.23) is not used: it is exact only for tokenizers without rules for single tokens. It
holds text back from a U+FFFD on and has no end, so an answer that stops inside a character loses what was held. With
byte fallback it raises after a byte that does not continue the character before: the decoder then replaces that, too.
`tests/unit/shared/test_text.py` shows both.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from alignedserve.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 6
_HOLD_TOKENS = 4  # an incomplete character is at most three bytes long, and a token has at least one
_CONTINUES = re.compile(rb"[\x80-\xbf]")  # a byte within a character
_Utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of an answer, token by token. An incomplete character is held back.

    `skip_special`: special tokens have no text. If they have some, `spaces` keeps the space that a decoder may put
    between two of them.

    `context_ids` is the prompt or its last tokens. The first word of an answer keeps its leading space only if there is
    text before it. The texts of all `push` calls and `finish`, joined, are the whole text.
    """

    __slots__ = ("_begun", "_bytes", "_joins", "_prefix", "_rules", "_skipped", "_strip", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int] = (),
        *,
        skip_special: bool = True,
        spaces: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special else frozenset()
        self._joins = not skip_special and not spaces  # two special tokens, without a space
        self._rules = tokenizer.piece_rules
        self._bytes = _Utf8("replace")
        context = [token for token in context_ids[-CONTEXT_TOKENS:] if token not in tokenizer.special_ids]
        self._strip = self._rules.strip_left if self._rules is not None and not context else 0
        # Without rules: the tokens of the last returned text, and the later tokens without text so far.
        self._prefix: list[int] = context
        self._window: list[int] = []
        if self._rules is not None:
            for token in context:
                self._bytes.decode(tokenizer.piece(token))
        self._begun = False  # whether a token of the answer had bytes

    def push(self, token: int) -> str:
        """The text that this token completes; "" if it is special or ends inside a character."""
        if token in self._skipped:
            return ""
        if self._rules is None:
            return self._push_window(token)
        piece = self._tokenizer.piece(token)
        if piece and not self._begun:
            self._begun = True
            if not _CONTINUES.match(piece):  # a character that the prompt left incomplete is no text of the answer
                self._bytes.reset()
        text = self._bytes.decode(piece)
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        """The text that was held back. An incomplete character becomes U+FFFD."""
        if self._rules is None:
            text = self._window_text()
            self._prefix, self._window = self._window, []
            return text
        return self._bytes.decode(b"", final=True) if self._begun else ""

    def _stripped(self, text: str) -> str:
        spaces = min(self._strip, len(text) - len(text.lstrip(" ")))
        self._strip = 0
        return text[spaces:]

    def _push_window(self, token: int) -> str:
        """Decode the last text's tokens with and without the new ones, because decoders look at adjacent tokens."""
        special = self._tokenizer.special_ids
        follows = not self._window and bool(self._prefix) and self._prefix[-1] in special
        joined = self._joins and follows and token in special
        self._window.append(token)
        text = self._window_text()
        if joined:
            text = text.removeprefix(" ")
        if not text or (text.endswith("�") and len(self._window) < _HOLD_TOKENS):
            if len(self._window) >= 4 * _HOLD_TOKENS:  # tokens without text must not accumulate
                self._prefix, self._window = self._window[-CONTEXT_TOKENS:], []
            return ""
        self._prefix, self._window = self._window, []
        return text

    def _window_text(self) -> str:
        shown = bool(self._skipped)
        before = self._tokenizer.decode(self._prefix, skip_special=shown)
        return self._tokenizer.decode(self._prefix + self._window, skip_special=shown)[len(before) :]
