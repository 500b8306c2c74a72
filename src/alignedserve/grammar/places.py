"""Where in a schema a library's error comes from: its messages do not say."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from alignedserve.grammar import schema as rules

_SEARCHED = 200  # parts of a schema that are tried


class Parts:
    """The parts of a schema by JSON pointer. `error_of`: a part's error by itself; "" if it has none."""

    def __init__(self, schema: Any, error_of: Callable[[Any], str]) -> None:
        self.parts = dict(part for _, part in zip(range(_SEARCHED), rules.reachable(schema), strict=False))
        shared = {
            name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema
        }
        self.error_at = cache(lambda place: error_of({**shared, **self.parts[place]}))

    def place_of(self, error: str) -> str | None:
        """The place of the smallest part that has this error by itself; "" for the whole, None if it is unknown.

        A part that only refers to another has its error, so it comes after that.
        """
        deepest_first = sorted(self.parts, key=lambda found: (-found.count("/"), "$ref" in self.parts[found]))
        return next((place for place in deepest_first if not place or self.error_at(place) == error), None)
