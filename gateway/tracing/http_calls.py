"""Traces of calls over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alignedserve.errors import CancelledError
from alignedserve.gateway.http.asgi import App, Message, Receive, Scope, Send
from alignedserve.gateway.tracing.current import note_error

if TYPE_CHECKING:
    from alignedserve.gateway.tracing.tracing import Tracing


def traced(app: App, tracing: Tracing | None, path: str) -> App:
    """Wraps the endpoint at `path` to trace its calls. A sampled one has `traceparent` in its response."""
    if tracing is None:
        return app
    operation = "text_completion" if path == "/v1/completions" else "chat"

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        attributes = {
            "http.request.method": scope["method"],
            "http.route": path,
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
        }
        with tracing.call(operation, scope["headers"], attributes) as trace:
            if trace is None:
                await app(scope, receive, send)
                return
            begun = False

            async def send_with_parent(message: Message) -> None:
                nonlocal begun
                if message["type"] == "http.response.start":
                    begun = True
                    trace.span.set_attribute("http.response.status_code", message["status"])
                    header = (b"traceparent", trace.header.encode())
                    message = {**message, "headers": [*message.get("headers", ()), header]}
                await send(message)

            await app(scope, receive, send_with_parent)
            if not begun:
                note_error(CancelledError("the client disconnected"))

    return handle
