"""The package's exceptions. They can be pickled, because Ray sends exceptions between processes.

AlignedServeError
├── ConfigError                 the configuration is unusable (CLI: exit status 2)
│   ├── UnknownKeyError         no configuration class has this key
│   ├── TraceError              a trace cannot be read; names the file, line and column
│   └── ResourceError           this machine lacks a requested resource (memory, GPU, port)
├── ModelError                  the model folder is missing, broken or not supported
│   └── UnsupportedModelError   the architecture or one of its features would give wrong tokens
├── RequestError                the client's request cannot be served (HTTP 4xx)
│   ├── InvalidRequestError     malformed or out of range (400)
│   │   └── GrammarError        a grammar is wrong, too large, or not supported, or its answer cannot go on
│   ├── AuthenticationError     the API key is missing or unknown (401)
│   ├── NotFoundError           unknown model or request (404)
│   ├── TooLargeError           the body is over the limit (413)
│   ├── PinsFullError           pinned prefixes would hold too much of a shard of the pool (409)
│   └── OverloadedError         the cluster has no room now; `retry_after_s` says when to retry (429)
├── DeadlineError               the request's time limit passed
├── CancelledError              the client cancelled the request
├── TransferError               a copy of KV blocks failed or could not be trusted
│   ├── ChecksumError           a block differs from what was written (kv_pool.verify)
│   └── GeometryMismatchError   two stores hold blocks of different shapes
├── BatchError                  requests of a client's batch failed; `results` has an answer or an error for each
├── IncompleteAnswerError       an answer that was to be parsed was cut before its end
├── ToolError                   a client could not carry out a model's call of a function; `call`, `messages`
│   ├── UnknownToolError        there is no function of this name
│   ├── ToolArgumentsError      the arguments are not those of the function
│   ├── ToolFailedError         the function raised an exception, which is the cause
│   └── ToolRoundsError         the model still called functions in the last round
├── NumericsError               the model computed NaN or infinite logits for some rows of a batch
├── AccountingError             block accounting is inconsistent: a bug in AlignedServe
├── StaleError                  a message belongs to an older epoch or incarnation
└── UnavailableError            a required process is missing (503)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AlignedServeError(Exception):
    """Base class of the errors that the package raises on purpose.

    `message` says what was wrong, where, and what to do. `details` holds ids as plain values. A `code` in it comes from
    the server, and may be more specific than the `code` of the class.
    """

    code = "internal_error"
    http_status = 500
    retry_after_s: float | None = None
    """Seconds after which a retry makes sense, if the server gave a time."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        if "code" in details:
            self.code = details["code"]

    @property
    def request_id(self) -> str | None:
        """The id of the failed request, if it is known. Logs contain the same id."""
        return self.details.get("request_id")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[AlignedServeError], message: str, details: dict[str, Any]) -> AlignedServeError:
    return kind(message, **details)


class ConfigError(AlignedServeError):
    code = "invalid_config"


class UnknownKeyError(ConfigError):
    code = "unknown_key"


class TraceError(ConfigError):
    """`details` holds `file` and, if known, `line` and `column`, both counted from 1."""

    code = "invalid_trace"


class ResourceError(ConfigError):
    code = "insufficient_resources"


class ModelError(AlignedServeError):
    code = "model_error"


class UnsupportedModelError(ModelError):
    code = "unsupported_model"


class RequestError(AlignedServeError):
    """The client's request cannot be served; `param` names the invalid field."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, **details: Any) -> None:
        super().__init__(message, param=param, **details)
        self.param = param


class InvalidRequestError(RequestError):
    code = "invalid_value"


class GrammarError(InvalidRequestError):
    code = "invalid_grammar"


class AuthenticationError(RequestError):
    code = "invalid_api_key"
    http_status = 401


class NotFoundError(RequestError):
    code = "not_found"
    http_status = 404


class TooLargeError(RequestError):
    code = "request_too_large"
    http_status = 413


class PinsFullError(RequestError):
    """Pins would hold more than `kv_pool.pinned_fraction` of a shard."""

    code = "pins_full"
    http_status = 409


class OverloadedError(RequestError):
    """The cluster has no room now. It may have room `retry_after_s` seconds later."""

    code = "overloaded"
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)
        self.retry_after_s = retry_after_s


class DeadlineError(AlignedServeError):
    code = "deadline_exceeded"
    http_status = 408


class CancelledError(AlignedServeError):
    code = "cancelled"
    http_status = 499


class IncompleteAnswerError(AlignedServeError):
    """An answer that was to be parsed was cut (`alignedserve.client`). `text` is what there is of it."""

    code = "incomplete_answer"

    def __init__(self, message: str, *, text: str = "", **details: Any) -> None:
        super().__init__(message, text=text, **details)
        self.text = text


class ToolError(AlignedServeError):
    """A model's call of a function could not be carried out (`alignedserve.client`).

    `call` is the call, None if there is not just one; `messages` is the conversation up to it.
    """

    code = "tool_error"

    def __init__(self, message: str, *, call: Any = None, messages: Sequence[Any] = (), **details: Any) -> None:
        super().__init__(message, call=call, messages=list(messages), **details)
        self.call = call
        self.messages = list(messages)


class UnknownToolError(ToolError):
    code = "unknown_tool"


class ToolArgumentsError(ToolError):
    code = "invalid_tool_arguments"


class ToolFailedError(ToolError):
    """The function raised; its exception is the cause."""

    code = "tool_failed"


class ToolRoundsError(ToolError):
    code = "too_many_tool_rounds"


class BatchError(AlignedServeError):
    """Requests of a batch failed (`alignedserve.client`). The first error is the cause, and gives its `code`.

    `results` holds an answer or an error for each prompt that was sent, in the order of the prompts.
    """

    code = "batch_failed"

    def __init__(self, message: str, *, results: Sequence[Any] = (), **details: Any) -> None:
        super().__init__(message, results=list(results), **details)
        self.results = list(results)

    @property
    def errors(self) -> list[AlignedServeError]:
        """The errors among the results, in order."""
        return [result for result in self.results if isinstance(result, AlignedServeError)]


class TransferError(AlignedServeError):
    code = "transfer_failed"


class ChecksumError(TransferError):
    code = "checksum_mismatch"


class GeometryMismatchError(TransferError):
    code = "geometry_mismatch"


class NumericsError(AlignedServeError):
    """The model computed NaN or infinite logits for `rows` of the batch. The other rows are valid."""

    code = "numerics"

    def __init__(self, message: str, *, rows: Sequence[int] = (), **details: Any) -> None:
        super().__init__(message, rows=tuple(rows), **details)
        self.rows = tuple(rows)


class AccountingError(AlignedServeError):
    code = "accounting"


class StaleError(AlignedServeError):
    code = "stale"


class RankLostError(AlignedServeError):
    """The ranks of an instance cannot compute together any more: it must be replaced."""

    code = "rank_lost"


class UnavailableError(AlignedServeError):
    code = "unavailable"
    http_status = 503

    def __init__(self, message: str, *, retry_after_s: float | None = None, **details: Any) -> None:
        super().__init__(message, **details, **({} if retry_after_s is None else {"retry_after_s": retry_after_s}))
        self.retry_after_s = retry_after_s


def by_code(code: str) -> type[AlignedServeError]:
    """The error class with this `code`; the base class if the code is unknown."""
    pending: list[type[AlignedServeError]] = [AlignedServeError]
    while pending:
        kind = pending.pop()
        if kind.code == code:
            return kind
        pending.extend(kind.__subclasses__())
    return AlignedServeError
