"""How an error looks to a client: OpenAI's error object and an HTTP status, or a gRPC status with its details."""

from __future__ import annotations

import math
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
)

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
_UNAVAILABLE_RETRY_S = 1.0


class MissingFieldError(InvalidRequestError):
    code = "missing_required_parameter"


class WrongTypeError(InvalidRequestError):
    code = "invalid_type"


class MalformedJsonError(InvalidRequestError):
    code = "invalid_json"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together are longer than the model, or the whole cluster, can hold."""

    code = "context_length_exceeded"


class UnsupportedFeatureError(InvalidRequestError):
    """Asks for something that is not there yet; doing without would change the result."""

    code = "unsupported_parameter"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class NotPossibleError(RequestError):
    """The cluster as it is cannot do it."""

    code = "not_possible"
    http_status = 409


class MethodNotAllowedError(RequestError):
    code = "method_not_allowed"
    http_status = 405


class UnsupportedMediaTypeError(RequestError):
    """The body is not what the headers must say that it is."""

    code = "unsupported_media_type"
    http_status = 415


class ShuttingDownError(UnavailableError):
    """This gateway ends; another one may go on with the call, and `alignedserve.client` asks it to."""

    code = "shutting_down"


class RequestLostError(UnavailableError):
    """Lost again and again without a token: it may be what ends its workers, so nobody should send it again unasked."""

    code = "request_lost"


def as_error(error: BaseException) -> AlignedServeError:
    """The error to report. What is not ours is a bug: its text stays in the log."""
    if isinstance(error, AlignedServeError):
        return error
    return AlignedServeError("the gateway failed to answer; its log says why")


def error_object(error: AlignedServeError) -> dict[str, Any]:
    """OpenAI's error object: message, type, param, code."""
    status = error.http_status
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def retry_after_s(error: AlignedServeError) -> float | None:
    if isinstance(error, OverloadedError):
        return error.retry_after_s
    return _UNAVAILABLE_RETRY_S if isinstance(error, UnavailableError) else None


def retry_headers(error: AlignedServeError) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least 1, for errors that pass.

    The `openai` package asks again after a 408, unless this header of its own says no: the caller's time is over.
    """
    if isinstance(error, DeadlineError):
        return {"x-should-retry": "false"}
    seconds = retry_after_s(error)
    return {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}


_GRPC: tuple[tuple[type[AlignedServeError], grpc.StatusCode], ...] = (
    (AuthenticationError, grpc.StatusCode.UNAUTHENTICATED),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TooLargeError, grpc.StatusCode.INVALID_ARGUMENT),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (CancelledError, grpc.StatusCode.CANCELLED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
)


def grpc_status(error: AlignedServeError) -> tuple[grpc.StatusCode, str]:
    """Status code and details, as `alignedserve.client.failures` reads them: the message, then words in brackets."""
    status = next((code for kind, code in _GRPC if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    words = [f"code={error.code}"]
    if isinstance(error, RequestError) and error.param and not any(map(str.isspace, error.param)):
        words.append(f"param={error.param}")
    if (seconds := retry_after_s(error)) is not None:
        words.append(f"retry-after-s={seconds:g}")
    return status, f"{error.message} [{' '.join(words)}]"
