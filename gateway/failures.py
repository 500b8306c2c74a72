"""Converts errors for clients: OpenAI's error object and an HTTP status, or a gRPC status with details."""

from __future__ import annotations

import math
from typing import Any

import grpc

from alignedserve.errors import (
    AccountingError,
    AlignedServeError,
    AuthenticationError,
    CancelledError,
    ChecksumError,
    DeadlineError,
    GeometryMismatchError,
    InvalidRequestError,
    ModelError,
    NotFoundError,
    NumericsError,
    OverloadedError,
    RequestError,
    StaleError,
    TooLargeError,
    TransferError,
    UnavailableError,
)
from alignedserve.request import FinishReason

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
_UNAVAILABLE_RETRY_S = 1.0


class MissingFieldError(InvalidRequestError):
    """A required field is missing."""

    code = "missing_required_parameter"


class WrongTypeError(InvalidRequestError):
    """A value has a wrong type."""

    code = "invalid_type"


class MalformedJsonError(InvalidRequestError):
    """The body is not valid JSON."""

    code = "invalid_json"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together exceed the model's positions or the cluster's capacity.

    `details` has `tokens` of the prompt (at least so many) and `limit`, its most tokens, if the number is known.
    """

    code = "context_length_exceeded"


class UnsupportedFeatureError(InvalidRequestError):
    """The request asks for an unsupported feature; ignoring it would change the result."""

    code = "unsupported_parameter"


class ModelNotFoundError(NotFoundError):
    """The server does not have this model."""

    code = "model_not_found"


class NotPossibleError(RequestError):
    """The cluster cannot carry out the order in its present state or configuration."""

    code = "not_possible"
    http_status = 409


class MethodNotAllowedError(RequestError):
    """The path exists, but not for this HTTP method."""

    code = "method_not_allowed"
    http_status = 405


class UnsupportedMediaTypeError(RequestError):
    """The body's encoding or content type is not accepted."""

    code = "unsupported_media_type"
    http_status = 415


class ShuttingDownError(UnavailableError):
    """This gateway is ending. Another gateway may resume the call; `alignedserve.client` does this itself."""

    code = "shutting_down"


class RequestLostError(UnavailableError):
    """The request was lost repeatedly without a token. It may crash its workers, so clients should not retry it
    automatically.
    """

    code = "request_lost"


# Outcomes of requests that are the cluster's doing. Others are answers, and errors for the client to mend.
FAULT_CODES = (
    FinishReason.ERROR.value,
    *(
        fault.code
        for fault in (
            AlignedServeError,
            ModelError,
            TransferError,
            ChecksumError,
            GeometryMismatchError,
            NumericsError,
            AccountingError,
            StaleError,
            UnavailableError,
            ShuttingDownError,
            RequestLostError,
        )
    ),
)


def as_error(error: BaseException) -> AlignedServeError:
    """The error to report. Any other exception is a bug: the client gets a general message without its text."""
    if isinstance(error, AlignedServeError):
        return error
    return AlignedServeError("the gateway failed to answer; see its log for the cause")


def error_object(error: AlignedServeError) -> dict[str, Any]:
    """OpenAI's error object: message, type, param, code."""
    status = error.http_status
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def retry_after_s(error: AlignedServeError) -> float | None:
    """Seconds after which the client may try again; None if the error is not temporary."""
    if isinstance(error, OverloadedError):
        return error.retry_after_s
    return _UNAVAILABLE_RETRY_S if isinstance(error, UnavailableError) else None


def retry_headers(error: AlignedServeError) -> dict[str, str]:
    """`Retry-After` in whole seconds, at least 1, for temporary errors.

    The `openai` package retries after a 408 unless its header `x-should-retry` is "false". It is set because the
    request's time has passed.
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
    """Status code and details. The details are the message, followed by fields in brackets that
    `alignedserve.client.failures` parses.
    """
    status = next((code for kind, code in _GRPC if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    words = [f"code={error.code}"]
    if isinstance(error, RequestError) and error.param and not any(map(str.isspace, error.param)):
        words.append(f"param={error.param}")
    if (seconds := retry_after_s(error)) is not None:
        words.append(f"retry-after-s={seconds:g}")
    return status, f"{error.message} [{' '.join(words)}]"
