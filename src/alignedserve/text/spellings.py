"""Finds many strings in a text as `tokenizers` finds its added tokens: leftmost, then longest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_WINDOW = 1 << 16  # characters; other threads can run between two windows


class Spellings:
    """Finds strings with a regular expression in the form of a trie, so a thousand cost hardly more than one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(filter(None, texts))
        self.longest = max(map(len, self.texts), default=0)
        self.pattern = re.compile(_tree_pattern(sorted(self.texts))) if self.texts else None

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """The begin and end of each occurrence, without overlaps."""
        at = 0
        while self.pattern is not None and at < len(text):
            window = at + _WINDOW
            end = at
            for match in self.pattern.finditer(text, at, window + self.longest):
                if match.start() >= window:
                    break
                yield match.span()
                end = match.end()
            at = max(window, end)

    def spans(self, text: str, at: int) -> bool:
        """Whether one of the strings may span this position."""
        if self.pattern is None:
            return False
        for begin in range(max(0, at - self.longest + 1), at):
            match = self.pattern.match(text, begin)
            if match is not None and match.end() > at:
                return True
        return False


def _tree_pattern(texts: list[str]) -> str:
    """An expression that matches the longest of these strings (sorted, distinct)."""
    if len(texts) == 1:
        return re.escape(texts[0])
    common = _common_beginning(texts[0], texts[-1])
    rest = [text[common:] for text in texts]
    ends_here = rest[0] == ""
    branches: list[str] = []
    group: list[str] = []
    for text in rest[1:] if ends_here else rest:
        if group and group[0][0] != text[0]:
            branches.append(_tree_pattern(group))
            group = []
        group.append(text)
    branches.append(_tree_pattern(group))
    return f"{re.escape(texts[0][:common])}(?:{'|'.join(branches)}){'?' if ends_here else ''}"


def _common_beginning(first: str, last: str) -> int:
    """Length of the common prefix of two strings."""
    return next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
