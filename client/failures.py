"""From a gRPC status to an error of `alignedserve.errors`.

Serve's gRPC proxy delivers the status code and the details text, and no trailing metadata of the gateway's own. What
the error needs beyond its message stands in brackets at the end of the details, every part optional:

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
# gRPC's own refusal of a long message has the status of a full server, and would be tried again in vain.
_TOO_LARGE = re.compile(r"(Sent|Received|Decompressed) message larger than max")

# A proxy whose server has died ends the stream with codes that stand for something else where a server gives them.
_BROKEN = re.compile(r"RST_STREAM|http2 header with status: 50\d")

# No server has seen such a call.
_UNREACHED = re.compile(r"failed to connect|Connection refused|DNS resolution failed|resolver")

# Serve's proxy names a service to ask, which this client does not ask.
_NO_APPLICATION = re.compile(r"Application (?:metadata not set|('.*') not found)\. Ping .*ListApplications", re.DOTALL)


def error_from_status(error: grpc.RpcError, timeout_s: float | None, **details: Any) -> AlignedServeError:
    """The error that a failed call stands for.

    `timeout_s` is the limit that the call ran under, in seconds. `details` (ids, the address) go into the error, with
    `status`, the gRPC status code's name, and `code`, the server's own word, where it gave one: it may know more
    kinds of a bad request than `alignedserve.errors` has classes.
    """
    status = error.code()
    message, words = _split(error.details() or status.name)
    kind = _kind(status, message, words)
    if unknown := _NO_APPLICATION.match(message):
        message = _application_hint(unknown[1])
        words.setdefault("param", "application")
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
        return "several applications run there, or none: name the one that is meant (application=...)"
    return f"no application is called {asked} there (application=...)"


class EndedEarlyError(grpc.RpcError):
    """A stream that ended as if all were well, before its last chunk had come: whatever is in between broke it."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the stream ended before the answer was whole"


class Failure(enum.Enum):
    """What a failed call means for the next attempt."""

    FINAL = "final"
    """The server's answer: another attempt would get the same."""
    BROKEN = "broken"
    """The connection broke, or the server behind it is ending: the call goes on through another one."""
    REFUSED = "refused"
    """The server has no room, or something that it needs is not there: later it may take the call."""
    UNREACHED = "unreached"
    """No server has seen the call."""


def kind_of(error: grpc.RpcError, *, begun: bool) -> Failure:
    """Which of them this is. `begun`: a server has had the call, so that one that knows nothing of it must be new."""
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
        # Not a gateway's word: a proxy that has just started knows no application, or the address is wrong.
        return Failure.BROKEN if begun else Failure.REFUSED
    return Failure.FINAL


_BY_CODE = {"shutting_down": Failure.BROKEN, "unavailable": Failure.REFUSED, "overloaded": Failure.REFUSED}


def retry_after_s(error: grpc.RpcError) -> float | None:
    """Seconds that the server asks to wait before the next attempt, where it said so."""
    return _seconds(_split(error.details() or "")[1].get("retry-after-s"))


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
        seconds = float(word) if word is not None else math.nan
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
