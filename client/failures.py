"""From a gRPC status to an error of `alignedserve.errors`.

Serve's gRPC proxy delivers the status code and the details text, and no trailing metadata of the gateway's own. What
the error needs beyond its message stands in brackets at the end of the details, every part optional:

    the cluster is full [code=overloaded retry-after-s=1.5]
    max_tokens must be at least 0 [code=invalid_value param=max_tokens]
"""

from __future__ import annotations

import re
from typing import Any

import grpc

from alignedserve.errors import (
    AlignedServeError,
    AuthenticationError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestError,
    TooLargeError,
    UnavailableError,
    by_code,
)

_BY_STATUS: dict[grpc.StatusCode, type[AlignedServeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
}
_WORDS = re.compile(r"\s*\[((?:(?:code|param|retry-after-s)=\S+ ?)+)\]\s*$")
# gRPC's own refusal of a long message has the status of a full server, and would be tried again in vain.
_TOO_LARGE = re.compile(r"(Sent|Received|Decompressed) message larger than max")

# A proxy whose server has died ends the stream with codes that stand for something else where a server gives them.
_BROKEN = re.compile(r"RST_STREAM|http2 header with status: 50\d")

# No server has seen such a call.
_UNREACHED = re.compile(r"failed to connect|Connection refused|DNS resolution failed|resolver")


def error_from_status(error: grpc.RpcError, timeout_s: float | None, **details: Any) -> AlignedServeError:
    """The error that a failed call stands for.

    `timeout_s` is the limit that the call ran under, in seconds. `details` (ids, the address) go into the error, with
    `status`, the gRPC status code's name, and `code`, the server's own word, where it gave one: it may know more
    kinds of a bad request than `alignedserve.errors` has classes.
    """
    status = error.code()
    message, words = _split(error.details() or status.name)
    kind = _kind(status, message, words)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        message = f"{message} (the limit was {timeout_s:g} s)"
    details["status"] = status.name
    if "code" in words:
        details["code"] = words["code"]
    if issubclass(kind, RequestError):
        details["param"] = words.get("param")
    if issubclass(kind, OverloadedError) and (retry_after_s := _seconds(words.get("retry-after-s"))) is not None:
        details["retry_after_s"] = retry_after_s
    return kind(message, **details)


def may_go_on(error: grpc.RpcError, *, begun: bool) -> bool:
    """Whether the call may go on over another connection: this one broke, or its server is ending.

    `begun`: a server has had the call. Then it is worth waiting for one that can be reached and has room.
    """
    status = error.code()
    message, words = _split(error.details() or "")
    if "code" in words:
        return words["code"] == "shutting_down" or (begun and words["code"] in ("unavailable", "overloaded"))
    if status is grpc.StatusCode.UNAVAILABLE:
        return begun or not _UNREACHED.search(message)
    if status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) or _BROKEN.search(message):
        return True
    # A proxy that has just started knows no application.
    return begun and status in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)


def _split(text: str) -> tuple[str, dict[str, str]]:
    """The message, and the words in brackets behind it."""
    found = _WORDS.search(text)
    if found is None:
        return text, {}
    return text[: found.start()], dict(word.split("=", 1) for word in found[1].split())


def _kind(status: grpc.StatusCode, message: str, words: dict[str, str]) -> type[AlignedServeError]:
    named = by_code(words.get("code", ""))
    if named is not AlignedServeError:
        return named
    if _BROKEN.search(message):
        return UnavailableError
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE.search(message):
        return TooLargeError
    return _BY_STATUS.get(status, AlignedServeError)


def _seconds(word: str | None) -> float | None:
    try:
        return float(word) if word is not None else None
    except ValueError:
        return None
