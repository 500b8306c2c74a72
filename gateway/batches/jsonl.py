"""Reads a batch's input file in parts of bounded size, and validates it line by line."""

from __future__ import annotations

import hashlib
import sqlite3
from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import orjson

PART_LINES = 1024
PART_BYTES = 1 << 20
MOST_ERRORS = 100  # reported for one file
MAX_ID = 512  # characters of a custom_id
_CACHE_KIB = 8192
_NO_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an input file. `index`: from 0, blank lines included."""

    index: int
    text: bytes


class LineReader:
    """Reads a file part by part; blank lines are skipped. Use it as a context.

    A line of more than `most_bytes` is cut after them, so that memory stays bounded. A byte order mark is skipped.
    Lines that were validated are bounded, and are not cut: the limit may be a lower one since.
    """

    def __init__(self, path: Path, most_bytes: int = _NO_LIMIT) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None
        self._index = 0
        self.places: list[int] = []  # where each line of the last part begins in the file

    def __enter__(self) -> Self:
        self._file = self._path.open("rb")
        if self._file.read(len(BOM_UTF8)) != BOM_UTF8:
            self._file.seek(0)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def part(self) -> list[Line]:
        """The next lines, at most PART_LINES and about PART_BYTES; [] at the end of the file."""
        assert self._file is not None
        lines: list[Line] = []
        self.places = []
        size, place = 0, self._file.tell()
        while len(lines) < PART_LINES and size < PART_BYTES:
            text = self._file.readline(self._most_bytes + 2)
            if not text:
                break
            size += len(text)
            rest = text
            while not rest.endswith(b"\n") and len(rest) == self._most_bytes + 2:  # skip what is over the limit
                rest = self._file.readline(self._most_bytes + 2)
            if rest is text:  # else it stays too long, whatever spaces it ends with
                text = text.strip()
            if text:
                lines.append(Line(self._index, text))
                self.places.append(place)
            self._index += 1
            place = self._file.tell()
        return lines


class Named(Protocol):
    """The model that is served."""

    @property
    def name(self) -> str: ...

    def is_called(self, name: str) -> bool:
        """Whether this is its name, or an alias."""


class Validator:
    """Validates an input file. Call `step` until it returns True; then `errors` and `total` are complete.

    The ids of the lines are kept in a temporary database on disk, not in memory. `endpoint`, which each line
    must name; `model`, which each line may name.
    """

    def __init__(self, path: Path, endpoint: str, model: Named, most_lines: int, most_bytes: int) -> None:
        self.errors: list[dict[str, Any]] = []
        self.total = 0
        self._endpoint = endpoint
        self._model = model
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._reader = LineReader(path, most_bytes)
        self._reader.__enter__()
        self._ids = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # "": a temporary file
        self._ids.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._ids.execute("PRAGMA journal_mode = OFF")
        self._ids.execute("CREATE TABLE ids (hash BLOB PRIMARY KEY) WITHOUT ROWID")

    def close(self) -> None:
        self._reader.close()
        self._ids.close()

    def step(self) -> bool:
        """Validates the next part. Returns whether the end was reached."""
        lines = self._reader.part()
        self._ids.execute("BEGIN")
        for line in lines:
            self.total += 1
            if (problem := self._problem(line)) is not None:
                code, message, param = problem
                self._note(code, message, param, line.index + 1)
            if len(self.errors) >= MOST_ERRORS:
                break
        self._ids.execute("COMMIT")
        if self.total > self._most_lines:
            self._note("too_many_lines", f"a batch may have at most {self._most_lines} lines (batches.max_lines)")
        elif not lines and not self.total:
            self._note("empty_file", "the input file has no lines")
        return not lines or self.total > self._most_lines or len(self.errors) >= MOST_ERRORS

    def _note(self, code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        self.errors.append({"code": code, "message": message, "param": param, "line": line})

    def _problem(self, line: Line) -> tuple[str, str, str | None] | None:
        """Code, message and field of what is wrong with a line; None if nothing is."""
        if len(line.text) > self._most_bytes:
            return (
                "line_too_long",
                f"the line is over the limit of {self._most_bytes} bytes (gateway.max_body_mib)",
                None,
            )
        try:
            value = orjson.loads(line.text)
        except orjson.JSONDecodeError as error:
            return "invalid_json_line", f"the line is not valid JSON: {error}", None
        if not isinstance(value, dict):
            return "invalid_json_line", "the line is not a JSON object", None
        return self._wrong_field(value)

    def _wrong_field(self, value: Mapping[str, Any]) -> tuple[str, str, str | None] | None:
        for name in ("custom_id", "method", "url", "body"):
            if name not in value:
                return "missing_required_parameter", f"{name} is missing", name
        custom_id, body = value["custom_id"], value["body"]
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
            return "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_ID} characters", "custom_id"
        if value["method"] != "POST":
            return "invalid_method", 'method must be "POST"', "method"
        if value["url"] != self._endpoint:
            return "mismatched_url", f"url must be the batch's endpoint, {self._endpoint}", "url"
        if not isinstance(body, dict):
            return "invalid_body", "body must be an object", "body"
        named = body.get("model")
        if named is not None and not (isinstance(named, str) and self._model.is_called(named)):
            return (
                "model_not_found",
                f"body.model must be {self._model.name!r}, the model that this server has",
                "body.model",
            )
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if not self._ids.execute("INSERT INTO ids VALUES (?) ON CONFLICT DO NOTHING", (digest,)).rowcount:
            return "duplicate_custom_id", f"the custom_id {custom_id[:100]!r} is used by an earlier line", "custom_id"
        return None


def custom_id_of(line: Line) -> str:
    """The id of a line that was validated."""
    found: str = orjson.loads(line.text)["custom_id"]
    return found
