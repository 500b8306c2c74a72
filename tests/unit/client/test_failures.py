"""The error that a failed call's status is mapped to."""

from __future__ import annotations

import grpc
import pytest

from alignedserve.client.failures import error_from_status
from alignedserve.errors import (
    AlignedServeError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    TooLargeError,
    UnavailableError,
)


class Failed(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__()
        self._status, self._details = status, details

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        (grpc.StatusCode.CANCELLED, "the request was cancelled [code=cancelled]", CancelledError),
        (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", CancelledError),
        (
            grpc.StatusCode.CANCELLED,
            "Stream removed (Received RST_STREAM with error code 8)",
            UnavailableError,
        ),
        (grpc.StatusCode.UNKNOWN, "Received http2 header with status: 500", UnavailableError),
        (grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)", UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineError),
        (grpc.StatusCode.INVALID_ARGUMENT, "no [param=stop]", InvalidRequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "full [retry-after-s=2]", OverloadedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max (9 vs. 4)", TooLargeError),
        (grpc.StatusCode.INTERNAL, "the gateway failed", AlignedServeError),
    ],
)
def test_a_status_and_its_words_become_an_error(
    status: grpc.StatusCode, details: str, kind: type[AlignedServeError]
) -> None:
    error = error_from_status(Failed(status, details), 1.5)
    assert type(error) is kind
    assert error.details["status"] == status.name


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("Application metadata not set.", "name the application (application=...)"),
        ("Application 'chta' not found.", "the server has no application named 'chta'"),
    ],
)
def test_a_call_for_no_application_of_several_says_what_to_give(details: str, said: str) -> None:
    words = f"{details} Ping /ray.serve.RayServeAPIService/ListApplications for available applications."
    error = error_from_status(Failed(grpc.StatusCode.NOT_FOUND, words), None)
    assert said in str(error)
    assert "Ping" not in str(error)
    assert isinstance(error, NotFoundError)
    assert error.param == "application"


def test_an_address_that_does_not_speak_grpc_is_told() -> None:
    for details in ("Received http2 header with status: 404", "Trying to connect an http1.x server (HTTP status 400)"):
        error = error_from_status(Failed(grpc.StatusCode.UNIMPLEMENTED, details), None)
        assert error.message == f"this address does not speak gRPC (is it the port of the HTTP API?): {details}"
