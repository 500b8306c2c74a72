"""The body of POST /v1/batches, and the query of lists: all checks that do not need the store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from pydantic import ConfigDict, Field, ValidationError

from alignedserve.errors import InvalidRequestError
from alignedserve.gateway.body.validation_errors import as_request_error, shown
from alignedserve.gateway.body.values import Between, Body, Metadata
from alignedserve.gateway.http.asgi import Scope

LEAST_KEPT_S, MOST_KEPT_S = 3600, 2_592_000
MOST_FILES, MOST_BATCHES = 10_000, 100


_CLOSED = ConfigDict(strict=True, extra="forbid")


class ExpiresAfter(Body):
    """When a file is deleted, if this is sooner than `batches.retention_days`."""

    model_config = _CLOSED

    anchor: Literal["created_at"] = Field(description="The time from which the seconds count.")
    seconds: Annotated[int, Between(LEAST_KEPT_S, MOST_KEPT_S)]


class BatchRequest(Body):
    """A new batch over an uploaded file."""

    model_config = _CLOSED

    input_file_id: Annotated[str, Between(1, 100)] = Field(description="A file of the same key.")
    endpoint: Literal["/v1/completions", "/v1/chat/completions", "/v1/responses"] = Field(
        description="The url of every line."
    )
    completion_window: Literal["24h"] = Field(description="Lines without an answer by then end with an error.")
    metadata: Metadata | None = Field(None, description="Returned with the batch.")
    output_expires_after: ExpiresAfter | None = Field(None, description="For the files with answers and errors.")


def parse_batch(body: Any) -> BatchRequest:
    """Raises InvalidRequestError, or a subclass of it, that names the invalid field."""
    try:
        return BatchRequest.model_validate(body)
    except ValidationError as error:
        raise as_request_error(error) from None


def parse_expiry(fields: Mapping[str, str]) -> int | None:
    """Seconds after which an uploaded file is deleted; None: those of the configuration. Raises InvalidRequestError."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequestError('expires_after[anchor] must be "created_at"', param="expires_after[anchor]")
    return _whole(seconds or "", "expires_after[seconds]", LEAST_KEPT_S, MOST_KEPT_S)


class Query:
    """The query of a list."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[str, str] = {
            name: found[-1] for name, found in parse_qs(scope["query_string"].decode("latin-1")).items()
        }

    def text(self, name: str) -> str:
        return self._values.get(name, "")

    def number(self, name: str, default: int, high: int) -> int:
        """Raises InvalidRequestError unless it is from 1 to `high`."""
        return _whole(self._values[name], name, 1, high) if name in self._values else default

    def one_of(self, name: str, default: str, *others: str) -> str:
        """Raises InvalidRequestError for another value."""
        found = self._values.get(name, default)
        if found not in (default, *others):
            choices = ", ".join((default, *others))
            raise InvalidRequestError(f"{name} must be one of {choices}; got {shown(found)}", param=name)
        return found


def _whole(text: str, name: str, low: int, high: int) -> int:
    if not re.fullmatch("[0-9]{1,12}", text) or not low <= int(text) <= high:
        raise InvalidRequestError(f"{name} must be a whole number from {low} to {high}, got {shown(text)}", param=name)
    return int(text)
