"""Checks before a request's body is read: the API key, for HTTP endpoints and for a gRPC server's methods, and the
content headers of POST requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import grpc

from alignedserve.control.rpc import refusal
from alignedserve.errors import AuthenticationError
from alignedserve.gateway.api_keys import ApiKeys, of_headers
from alignedserve.gateway.body.validation_errors import shown
from alignedserve.gateway.failures import UnsupportedMediaTypeError, error_object, grpc_status
from alignedserve.gateway.http.asgi import App, ErrorBody, Receive, Scope, Send, send_error
from alignedserve.gateway.ledger.calls import caller

_JSON, _FORM = b"application/json", b"multipart/form-data"
_BROWSERS = (b"origin", b"sec-fetch-site")  # a browser adds them when a page posts to another site


def guarded(app: App, keys: ApiKeys, error_body: ErrorBody = error_object) -> App:
    """Wraps `app` to require an API key. A request without a known key is answered with 401, its body unread."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller.set(keys.identify(scope["headers"], scope["method"]))
        except AuthenticationError as error:
            await send_error(send, error, {"www-authenticate": "Bearer"}, error_body)
            return
        await app(scope, receive, send)

    return check


def posted(app: App, error_body: ErrorBody = error_object, pages: Collection[str] = ()) -> App:
    """Wraps `app` to refuse, with 415, requests for which `check_media` raises UnsupportedMediaTypeError."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_media(scope["headers"], pages)
        except UnsupportedMediaTypeError as error:
            await send_error(send, error, {"accept-encoding": "identity"}, error_body)
            return
        await app(scope, receive, send)

    return check


def check_media(headers: Iterable[tuple[bytes, bytes]], pages: Collection[str] = ()) -> None:
    """Raises UnsupportedMediaTypeError for an encoded body, and for a web page's request whose type is not JSON.

    A web page may post text and forms to any address that the user's browser reaches, loopback included. For JSON the
    browser first sends a preflight request, which this server does not accept. POST requests without a body (a cancel,
    a stop) need the header for the same reason. Pages of the origins `pages` (`gateway.cors_origins`) may upload files.
    """
    kinds: list[bytes] = []
    origin = ""
    from_page = False
    for name, value in headers:
        if name == b"content-encoding":
            for encoding in value.split(b","):
                if encoding.strip().lower() not in (b"", b"identity"):
                    text = shown(encoding.strip().decode("latin-1"))
                    raise UnsupportedMediaTypeError(f"Content-Encoding {text} is not supported: send the body as it is")
        elif name == b"content-type":
            kinds.append(value)
        elif name in _BROWSERS:
            from_page = True
            origin = value.decode("latin-1") if name == b"origin" else origin
    allowed = [[_JSON]]
    if origin and (origin in pages or "*" in pages):
        allowed.append([_FORM])
    if from_page and [kind.partition(b";")[0].strip().lower() for kind in kinds] not in allowed:
        given = shown(b", ".join(kinds).decode("latin-1")) if kinds else "nothing"
        message = f"a web page's request (it has an Origin) needs Content-Type application/json, got {given}"
        raise UnsupportedMediaTypeError(message)


SERVES_OWN = "/ray.serve.RayServeAPIService/"  # Serve's own service: load balancers call it without a key


class ApiKeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Refuses every call without a known API key before its message is read. Calls of SERVES_OWN need no key."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        try:
            if not handler_call_details.method.startswith(SERVES_OWN):
                caller.set(self._keys.check(of_headers(handler_call_details.invocation_metadata or ())))
        except AuthenticationError as error:
            return refusal(*grpc_status(error))
        return await continuation(handler_call_details)
