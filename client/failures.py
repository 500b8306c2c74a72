"""Converts a gRPC status to an error of `alignedserve.errors`.

Serve's gRPC proxy delivers the status code and the details text, but not the gateway's trailing metadata. Further
fields of the error are in brackets at the end of the details. All of them are optional:

    the cluster is full [code=overloaded retry-after-s=1.5]
    max_tokens must be at least 0 [code=invalid_value param=max_tokens]
"""

from __future__ import annotations

import enum
import math
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
# gRPC's own refusal of a long message has the status of a full server, but a retry would be useless.
_TOO_LARGE = re.compile(r"(Sent|Received|Decompressed) message larger than max")

# A proxy whose server has died ends the stream with codes that have other meanings if a server sends them.
_BROKEN = re.compile(r"RST_STREAM|http2 header with status: 50\d")

# What answers is no gRPC server.
_NOT_GRPC = re.compile(r"http2 header with status: 4\d\d|Trying to connect an http1\.x server")

# No server has received such a call.
_UNREACHED = re.compile(r"failed to connect|Connection refused|DNS resolution failed|resolver")

# Serve's proxy suggests to call a service that this client does not have.
_NO_APPLICATION = re.compile(r"Application (?:metadata not set|('.*') not found)\. Ping .*ListApplications", re.DOTALL)


def error_from_status(error: grpc.RpcError, timeout_s: float | None, **details: Any) -> AlignedServeError:
    """The error for a failed call.

    `timeout_s` is the call's limit in seconds. The error gets `details` (ids, the address), `status` (the name of the
    gRPC status code) and, if the server sent one, `code`, which may be more specific than the class of the error.
    """
    status = error.code()
    message, words = _split(error.details() or status.name)
    kind = _kind(status, message, words)
    if unknown := _NO_APPLICATION.match(message):
        message = _application_hint(unknown[1])
        words.setdefault("param", "application")
    if _NOT_GRPC.search(message):
        message = f"this address does not speak gRPC (is it the port of the HTTP API?): {message}"
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        message = f"{message} (the limit was {timeout_s:g} s)"
    details["status"] = status.name
    if "code" in words:
        details["code"] = words["code"]
    if issubclass(kind, RequestError):
        details["param"] = words.get("param")
    if issubclass(kind, OverloadedError | UnavailableError) and (wait_s := retry_after_s(error)) is not None:
        details["retry_after_s"] = wait_s
    return kind(message, **details)


def _application_hint(asked: str | None) -> str:
    if asked is None:
        return "the server has several applications, or none: name the application (application=...)"
    return f"the server has no application named {asked} (application=...)"


class EndedEarlyError(grpc.RpcError):
    """A stream that ended without an error before its last chunk. The connection broke in between."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the stream ended before the answer was complete"


class Failure(enum.Enum):
    """The kind of a failed call, which determines the next attempt."""

    FINAL = "final"
    """The server's final answer: another attempt would fail in the same way."""
    BROKEN = "broken"
    """The connection broke, or its server is shutting down. The call continues through another connection."""
    REFUSED = "refused"
    """The server has no room, or a part that it needs is missing. It may accept the call later."""
    UNREACHED = "unreached"
    """No server has seen the call."""


def kind_of(error: grpc.RpcError, *, begun: bool) -> Failure:
    """The kind of a failure. `begun`: a server had accepted the call, so a server that does not know it is new."""
    status = error.code()
    message, words = _split(error.details() or "")
    if "code" in words:
        return _BY_CODE.get(words["code"], Failure.FINAL)
    if status is grpc.StatusCode.UNAVAILABLE and _UNREACHED.search(message):
        return Failure.UNREACHED
    broken = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    if status in broken or _BROKEN.search(message):
        return Failure.BROKEN
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and not _TOO_LARGE.search(message):
        return Failure.REFUSED
    if status in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
        # Not from a gateway: a proxy that has just started knows no application yet, or the address is wrong.
        return Failure.BROKEN if begun else Failure.REFUSED
    return Failure.FINAL


_BY_CODE = {"shutting_down": Failure.BROKEN, "unavailable": Failure.REFUSED, "overloaded": Failure.REFUSED}


def retry_after_s(error: grpc.RpcError) -> float | None:
    """Seconds to wait before the next attempt, if the server gave a time."""
    return _seconds(_split(error.details() or "")[1].get("retry-after-s"))


def _split(text: str) -> tuple[str, dict[str, str]]:
    """The message, and the fields in brackets after it."""
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
        seconds = float(word) if word is not None else math.nan
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
