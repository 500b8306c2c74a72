"""Parses the values of a trace. Invalid values raise TraceError, which names file, line and column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn

from alignedserve.errors import TraceError
from alignedserve.request import WAIT_OBJECTIVE_S

MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a value. `column`: number of the field in a CSV line, of the character in a JSON line; from 1."""

    file: str
    line: int
    column: int
    name: str = ""

    def fail(self, problem: str) -> NoReturn:
        named = f" ({self.name})" if self.name else ""
        message = f"{self.file}, line {self.line}, column {self.column}{named}: {problem}"
        raise TraceError(message, file=self.file, line=self.line, column=self.column)


def tokens_of(value: object, place: Place, least: int = 1) -> int:
    """Parse a whole number of tokens. Fails if it is below `least`."""
    number = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = _float(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        place.fail(f"{_shown(value)} is not a whole number of tokens")
    if not least <= number < MAX_TOKENS:
        place.fail(f"{_shown(number)} is not between {least} and {MAX_TOKENS - 1} tokens")
    return number


def seconds_of(value: object, place: Place) -> float:
    """A finite time in the unit of the file."""
    number = _float(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        place.fail(f"{_shown(value)} is not a time")
    try:
        found = float(number)
    except OverflowError:  # an integer with hundreds of digits
        found = math.inf
    if not math.isfinite(found):
        place.fail(f"{_shown(value)} is not a time")
    return found


def objective_of(value: object, place: Place) -> float:
    """A request's wait objective in seconds; 0 if there is none (null, an empty field)."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return 0.0
    seconds = seconds_of(value, place)
    low, high = WAIT_OBJECTIVE_S
    if not low <= seconds <= high:
        place.fail(f"{seconds:g} is not between {low:g} and {high:g} seconds")
    return seconds


def priority_of(value: object, place: Place) -> int:
    """A request's priority; 0 if there is none (null, an empty field)."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return 0
    number = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int) or not -(1 << 63) <= number < 1 << 63:
        place.fail(f"{_shown(value)} is not a signed 64-bit integer")
    return number


def stamp_of(text: str, place: Place) -> datetime:
    """A calendar time. Without a zone it counts as UTC, since only differences matter."""
    try:
        stamp = datetime.fromisoformat(text.strip())
    except ValueError:
        place.fail(f"{_shown(text)} is not a date and time such as 2023-11-16 18:15:46.6805900")
    return stamp if stamp.tzinfo is not None else stamp.replace(tzinfo=UTC)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a value that is nested too deeply"
    return text if len(text) <= 40 else f"{text[:40]}…"
