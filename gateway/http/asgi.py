"""Helpers for plain ASGI: JSON bodies and responses, error responses, and detection of client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar
from urllib.parse import quote

import orjson

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.failures import MalformedJsonError, as_error, error_object, retry_headers
from alignedserve.gateway.tracing.current import note_error

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[Scope, Receive], Awaitable[dict[str, Any]]]
ErrorBody = Callable[[AlignedServeError], dict[str, Any]]  # an error as an API shows it
T = TypeVar("T")

IGNORED_HEADER = "x-alignedserve-ignored-fields"
IGNORED = "ignored_fields"  # the same in a batch's lines
_MAX_NAME = 64
_MAX_NAMES = 2048  # characters of the header; proxies refuse responses with long headers


class ClientGoneError(Exception):
    """The client closed its connection before it got an answer."""


def parse_json(body: bytes) -> Any:
    """Parses strict JSON: no NaN, no infinity, no lone surrogates, at most 1,024 levels. Raises MalformedJsonError."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedJsonError(f"the body is not valid JSON: {error}") from error


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names ignored fields. The names come from the client, so they are quoted and truncated."""
    shown: list[str] = []
    room = _MAX_NAMES
    for name in names:
        quoted = quote(name[:_MAX_NAME], safe=".")
        room -= len(quoted) + 2
        if room < 0:
            shown.append("...")
            break
        shown.append(quoted)
    return {IGNORED_HEADER: ", ".join(shown)} if shown else {}


async def start(send: Send, status: int, content_type: str, headers: Mapping[str, str]) -> None:
    pairs = [(b"content-type", content_type.encode())]
    pairs += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def send_bytes(
    send: Send, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    await start(send, status, content_type, {"content-length": str(len(body)), **(headers or {})})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    await send_bytes(send, orjson.dumps(value), "application/json", status, headers)


async def send_error(
    send: Send,
    error: AlignedServeError,
    headers: Mapping[str, str] | None = None,
    body: ErrorBody = error_object,
) -> None:
    await send_json(send, body(error), error.http_status, {**retry_headers(error), **(headers or {})})


def report(error: BaseException) -> AlignedServeError:
    """The error that the client gets. An error of another type is a bug: it is logged with its traceback."""
    if not isinstance(error, AlignedServeError):
        logger.error("a request failed", exc_info=error)
    found = as_error(error)
    note_error(found)
    return found


def json_app(handler: Handler) -> App:
    """The ASGI application of a handler that returns a JSON object or raises the error that the client gets."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            value = await handler(scope, receive)
        except ClientGoneError:
            return
        except Exception as error:
            await send_error(send, report(error))
            return
        await send_json(send, value)

    return answer


class DisconnectWatch:
    """Detects that the client has disconnected, and then calls `on_gone`. Enter it after the body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        self.on_gone: Callable[[], object] = lambda: None
        self.gone = False

    def __enter__(self) -> DisconnectWatch:
        self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    def __exit__(self, *exception: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. When the client disconnects, `work` is cancelled and ClientGoneError raised."""
        task = asyncio.get_running_loop().create_task(work)
        self.on_gone = task.cancel
        try:
            return await task
        except asyncio.CancelledError:
            if self.gone:
                raise ClientGoneError from None
            raise
        finally:
            self.on_gone = lambda: None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self.gone = True
        self.on_gone()
