"""Reads a measured table: a CSV file. Errors name file, line and column."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from alignedserve.errors import ConfigError


def read_rows(path: Path, texts: Sequence[str], numbers: Sequence[str]) -> Iterator[tuple[list[str], list[float]]]:
    """The named columns of each row, first texts, then numbers (finite, at least 0), in the requested order.

    Raises ConfigError for a file that cannot be read, lacks a column or has no row, and for a value that is not a
    number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            header = next(rows, None)
            if header is None:
                raise ConfigError(f"{path}: the table is empty; its first line must name its columns")
            for name in (*texts, *numbers):
                if name not in header:
                    raise ConfigError(f"{path}:1: no column {name!r}; the columns are {', '.join(header)}")
            places = [header.index(name) for name in (*texts, *numbers)]
            count = 0
            for row in rows:
                if not row:
                    continue
                count += 1
                if len(row) != len(header):
                    raise ConfigError(
                        f"{path}:{rows.line_num}: {len(row)} values, but the header names {len(header)} columns"
                    )
                values = [row[place] for place in places]
                words, figures = values[: len(texts)], values[len(texts) :]
                yield (
                    words,
                    [_number(path, rows.line_num, name, text) for name, text in zip(numbers, figures, strict=True)],
                )
            if not count:
                raise ConfigError(f"{path}: the table has no rows")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0.0):
        raise ConfigError(f"{path}:{line}: column {column!r} must be a number of at least 0, not {text!r}")
    return value
