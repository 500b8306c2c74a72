"""Values that a chat template gets beside text: a call's arguments, tools, and other lists and mappings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from alignedserve.text.user_text import Marks, on_plain_text


class CallArguments(dict[Any, Any]):
    """A call's arguments: a mapping for templates that look into it, and JSON text for those that write it as text."""

    def __str__(self) -> str:
        text: str = _as_json(dict(self))
        return text

    def __add__(self, other: Any) -> Any:
        return str(self) + other

    def __radd__(self, other: Any) -> Any:
        return other + str(self)


def marked(value: Any, marks: Marks) -> Any:
    """The same value, with all text in it marked as the user's."""
    if isinstance(value, str):
        return marks.mark(value)
    if isinstance(value, Mapping):
        made = {marked(key, marks): marked(entry, marks) for key, entry in value.items()}
        return CallArguments(made) if isinstance(value, CallArguments) else made
    if isinstance(value, list | tuple):
        return [marked(entry, marks) for entry in value]
    return value


def texts_in(value: Any) -> Iterator[str]:
    """All text within lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in(list(value.keys()))
        yield from texts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_in(entry)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_as_json = on_plain_text(_dumped)
