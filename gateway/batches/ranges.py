"""The part of a file that a client asks for by the header Range (RFC 9110, section 14): one range of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from alignedserve.errors import RequestError

_ONE = re.compile(rb"bytes=([0-9]{0,18})-([0-9]{0,18})")


class RangeError(RequestError):
    """The file has no byte in the range."""

    code = "range_not_satisfiable"
    http_status = 416


def byte_range(headers: Iterable[tuple[bytes, bytes]], size: int) -> tuple[int, int] | None:
    """Where the part of a file of `size` bytes begins and ends; None for the whole file.

    A header that is not understood is ignored, as the RFC asks. So is one with If-Range, since files have no
    validators. Raises RangeError.
    """
    found = dict(headers)
    match = _ONE.fullmatch(found.get(b"range", b"").lower().strip())
    if match is None or b"if-range" in found or not any(match.groups()):
        return None
    first, last = match.groups()
    begin, end = int(first or 0), size
    if not first:  # the last bytes
        begin = max(0, size - int(last)) if int(last) else size
    elif last:
        if int(last) < begin:
            return None
        end = min(size, int(last) + 1)
    if begin >= size:
        raise RangeError(f"the file has {size} bytes, none of them in the range {match[0].decode()}", param="Range")
    return begin, end
