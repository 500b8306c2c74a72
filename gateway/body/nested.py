"""Checks of JSON values that a client nests freely: tools, arguments of calls, variables of the chat template."""

from __future__ import annotations

from typing import Any

from alignedserve.errors import InvalidRequestError

MOST_DEPTH = 64  # of what is rendered and compiled
MOST_REPEATED_DEPTH = 200  # of what a reply repeats: orjson writes 254 levels


def check_depth(value: Any, where: str, most: int = MOST_DEPTH) -> None:
    """Raises InvalidRequestError if lists and objects nest deeper than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for entry in level
            if isinstance(entry, dict | list)
            for inner in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return
    raise InvalidRequestError(f"{where} nests deeper than {most} levels", param=where)


def text_size(value: Any) -> int:
    """Characters of all text in the value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + text_size(entry) for key, entry in value.items())
    return sum(map(text_size, value)) if isinstance(value, list) else 0
