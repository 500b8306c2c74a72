"""Receives an uploaded file: a form in multipart/form-data, whose file goes to disk as it arrives."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from alignedserve.errors import InvalidRequestError, TooLargeError
from alignedserve.gateway.failures import MissingFieldError

FORM = b"multipart/form-data"
WRITE_BYTES = 1 << 18  # fewer writes to disk, each in another thread
MOST_PARTS = 16
MOST_FIELD_BYTES = 1024
FORM_BYTES = 64 << 10  # of the whole body, beside the file
MAX_NAME = 255


logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every malformed form


@dataclass(slots=True)
class _Part:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    data: bytearray = field(default_factory=bytearray)


class Form:
    """One form. `receive` reads it; then `fields` has its texts by name, and the file is at `path`.

    `most_bytes`: largest file.
    """

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], path: Path, most_bytes: int) -> None:
        """Raises InvalidRequestError if the headers are not those of a form."""
        kind, options = parse_options_header(dict(headers).get(b"content-type", b"").decode("latin-1"))
        if kind != FORM or not options.get(b"boundary"):
            raise InvalidRequestError("a file is uploaded as multipart/form-data with the fields file and purpose")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._path = path
        self._most_bytes = most_bytes
        self._size = 0
        self._parts = 0
        self._part = _Part()
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._unwritten = bytearray()
        self._ended = False
        try:
            self._parser = MultipartParser(options[b"boundary"])
        except FormParserError as error:
            raise _not_a_form(error) from None
        for name in ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end", "end"):
            self._parser.set_callback(name, getattr(self, f"_on_{name}"))
        self._parser.set_callback("headers_finished", self._on_headers_finished)

    async def receive(self, pieces: AsyncIterator[bytes]) -> None:
        """Returns when the file is on the disk.

        Raises InvalidRequestError, TooLargeError, and what `pieces` raises. The file may be incomplete then.
        """
        with self._path.open("wb") as file:
            async for piece in pieces:
                try:
                    self._parser.write(piece)
                except FormParserError as error:
                    raise _not_a_form(error) from None
                if len(self._unwritten) >= WRITE_BYTES:
                    await asyncio.to_thread(self._write, file)
            await asyncio.to_thread(self._write_last, file)
        if not self._ended:
            raise InvalidRequestError("the form ends before its last boundary")
        if self.filename is None:
            raise MissingFieldError("file is missing: the form needs a part of this name with a filename", param="file")

    def _write(self, file: BinaryIO) -> None:
        file.write(self._unwritten)
        self._unwritten = bytearray()

    def _write_last(self, file: BinaryIO) -> None:
        """Waits for the disk, here and not in the store's thread, where leases are renewed."""
        self._write(file)
        file.flush()
        os.fsync(file.fileno())

    # ---- from the parser

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise InvalidRequestError(f"the form has more than {MOST_PARTS} parts")
        self._part = _Part()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _on_header_end(self) -> None:
        name, value = self._header
        self._part.headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _on_headers_finished(self) -> None:
        disposition = self._part.headers.get(b"content-disposition", b"")
        _, options = parse_options_header(disposition.decode("latin-1"))
        self._part.name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._part.name == "file":
            if self.filename is not None:
                raise InvalidRequestError("the form has more than one file", param="file")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = "".join(filter(str.isprintable, name))[-MAX_NAME:] or "file.jsonl"

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == "file":
            self._size += end - start
            if self._size > self._most_bytes:
                raise file_too_large(self._most_bytes)
            self._unwritten += data[start:end]
            return
        self._part.data += data[start:end]
        if len(self._part.data) > MOST_FIELD_BYTES:
            raise InvalidRequestError(f"a field of the form is longer than {MOST_FIELD_BYTES} bytes")

    def _on_part_end(self) -> None:
        if self._part.name != "file":
            self.fields[self._part.name] = self._part.data.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._ended = True


def file_too_large(most_bytes: int) -> TooLargeError:
    """The error for a file of more than `most_bytes`."""
    return TooLargeError(f"the file is over the limit of {most_bytes / (1 << 20):g} MiB (batches.max_file_mib)")


def _not_a_form(error: FormParserError) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not a form in multipart/form-data: {error}")
