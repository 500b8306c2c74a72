"""`X-Request-Id`: the client's own name for a request. It is recorded with the request, and sent back.

It need not be unique: clients send it again with a retry. So a request's id stays the gateway's own. `X-Session-Id`,
or the header of an agent that has one of its own, names the request's conversation likewise.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.gateway.http.asgi import App, Message, Receive, Scope, Send
from alignedserve.gateway.ledger.calls import sent_request_id, sent_session

HEADER, SESSION_HEADERS = b"x-request-id", (b"x-session-id", b"x-claude-code-session-id")
MOST_CHARACTERS = 256


def sent_id(headers: Iterable[tuple[bytes, bytes]], header: bytes = HEADER) -> str:
    """The header's printable characters, at most MOST_CHARACTERS; "" without one."""
    found = next((value for name, value in headers if name == header), b"")
    text = found[:MOST_CHARACTERS].decode("latin-1")
    return "".join(character for character in text if " " <= character <= "~").strip()


class RecordsRequestId:
    """ASGI middleware: calls of this request know the headers."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent_request_id.set(sent_id(scope["headers"]))
            sessions = (sent_id(scope["headers"], header) for header in SESSION_HEADERS)
            sent_session.set(next(filter(None, sessions), ""))
        await self._app(scope, receive, send)


def echoing(app: App) -> App:
    """Wraps `app` to send the header back. Ray Serve does it itself, and makes an id for a request without one."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        found = sent_id(scope["headers"]) if scope["type"] == "http" else ""

        async def send_with_id(message: Message) -> None:
            if found and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, found.encode())]}
            await send(message)

        await app(scope, receive, send_with_id)

    return handle
