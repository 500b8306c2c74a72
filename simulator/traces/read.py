"""Reads a trace file and detects its format from its content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from alignedserve.errors import TraceError
from alignedserve.simulator.traces import records, tables
from alignedserve.simulator.traces.answers import with_answers
from alignedserve.simulator.traces.chats import Chats, are_chats
from alignedserve.simulator.traces.mix import Mix, is_mix
from alignedserve.simulator.traces.trace import LengthsTrace, TimedTrace, Trace, in_order

_COMPRESSED = {
    "gzip": b"\x1f\x8b",
    "zip": b"PK\x03\x04",
    "zstd": b"\x28\xb5\x2f\xfd",
    "xz": b"\xfd7zXZ",
    "bzip2": b"BZh",
}


def read_trace(source: str) -> Trace:
    """Read a file, or the specification of a mix or of chats. Raises TraceError with file, line and column."""
    if is_mix(source):
        return Mix.parse(source)
    if are_chats(source):
        return Chats.parse(source)
    raw = _bytes(source)
    digest = hashlib.sha256(raw).hexdigest()
    text = _text(raw, source)
    start = text.lstrip()
    if not start:
        raise TraceError(f"{source}, line 1, column 1: the file is empty", file=source, line=1, column=1)
    found = (records if start[0] in "{[" else tables).parse(text, source)
    if not found.rows:
        last = text.count("\n") + 1
        raise TraceError(f"{source}, line {last}, column 1: the file has no requests", file=source, line=last, column=1)
    if not found.timed:
        return LengthsTrace(source, found.format, digest, tuple(found.rows), tuple(found.notes))
    rows, ordered = in_order(found.rows)
    notes = tuple(found.notes)
    if not ordered and not found.any_order:
        notes += ("the trace is not ordered by time; it was sorted",)
    if found.format == "mooncake" and found.block_tokens:
        rows, continued = with_answers(rows, found.block_tokens)
        if continued:
            notes += (f"{continued} answers fill blocks that a later prompt goes on with; they are taken to be these",)
    return TimedTrace(source, found.format, digest, rows, notes, found.measured, found.block_tokens)


def _bytes(source: str) -> bytes:
    try:
        return Path(source).expanduser().read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read the trace {source}: {error.strerror}", file=source) from error


def _text(raw: bytes, source: str) -> str:
    for name, magic in _COMPRESSED.items():
        if raw.startswith(magic):
            raise TraceError(f"{source} is compressed ({name}): decompress it first", file=source)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        message = f"{source}, line {line}, column {column}: not UTF-8 text ({error.reason})"
        raise TraceError(message, file=source, line=line, column=column) from error
    return text
