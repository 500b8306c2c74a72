"""Where API keys are asked for: around HTTP endpoints, and in front of a gRPC server's methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from alignedserve.control.rpc import refusal
from alignedserve.errors import AuthenticationError
from alignedserve.gateway.api_keys import ApiKeys, of_headers
from alignedserve.gateway.asgi import App, Receive, Scope, Send, send_error
from alignedserve.gateway.failures import grpc_status


def guarded(app: App, keys: ApiKeys) -> App:
    """`app`, for those only who send a key; others are answered before anything of their body is read."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            keys.check(of_headers(scope["headers"]))
        except AuthenticationError as error:
            await send_error(send, error, {"www-authenticate": "Bearer"})
            return
        await app(scope, receive, send)

    return check


class ApiKeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Ends every call that carries no key, before its message is read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        try:
            self._keys.check(of_headers(handler_call_details.invocation_metadata or ()))
        except AuthenticationError as error:
            return refusal(*grpc_status(error))
        return await continuation(handler_call_details)
