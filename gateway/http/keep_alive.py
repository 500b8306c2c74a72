"""Signs of life in streams that have nothing to say: proxies and clients end a connection that is silent."""

from __future__ import annotations

import asyncio

from alignedserve.cancellation import end_tasks
from alignedserve.gateway.http.asgi import Send

FIRST_S = 60.0
"""A stream begins so late at most: until then an error has a status of its own."""
PAUSE_S = 15.0  # load balancers wait for 60 s by default
COMMENT = b": nothing new\n\n"


class KeepAlive:
    """Sends the body of a stream that has started, and a comment whenever nothing was sent for PAUSE_S."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent_s = 0.0
        self._comments: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KeepAlive:
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        self._comments = loop.create_task(self._watch(loop))
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._comments is not None
        await end_tasks([self._comments])

    async def send(self, body: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + PAUSE_S - loop.time()))
            if loop.time() >= self._sent_s + PAUSE_S:
                await self.send(COMMENT)
