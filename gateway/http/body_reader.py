"""Reads request bodies, with limits on how slow a client may be and on the memory that partial bodies may take."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from alignedserve.errors import OverloadedError, RequestError, TooLargeError
from alignedserve.gateway.http.asgi import App, ClientGoneError, DisconnectWatch, Message, Receive, Scope, Send
from alignedserve.gateway.http.pacing import LARGE_BYTES, Pace

NO_PROGRESS_S = 5.0
AVERAGE_S = 10.0
LEAST_BYTES_S = 1024.0  # bytes a second, on average over any AVERAGE_S
SMALL_BYTES = LARGE_BYTES  # bodies up to this size are read however much memory other bodies take
MOST_PARTIAL_BYTES = 256 << 20
REST_S = 0.05  # how long a refusal waits for the rest of a body, which usually follows the head at once
DISCARD_S = 30.0  # how long the rest of a refused body is read and dropped
_DISCARDED = "alignedserve.discarded_bytes"
_TOO_SLOW = 408


class SlowBodyError(RequestError):
    """The rest of the body did not arrive in time."""

    code = "request_timeout"
    http_status = _TOO_SLOW


class _Coming:
    """Reads a body in pieces while they arrive fast enough. `size`: bytes so far; `whole`: all have arrived."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._clock = asyncio.get_running_loop().time
        self._due_s = self._clock() + AVERAGE_S
        self.size = 0
        self.whole = False

    async def next(self) -> bytes:
        """The next piece. Raises SlowBodyError, ClientGoneError."""
        wait_s = min(NO_PROGRESS_S, self._due_s - self._clock())
        try:
            async with asyncio.timeout(wait_s):
                message = await self._receive()
        except TimeoutError:
            why = (
                f"no data for {NO_PROGRESS_S:g} s"
                if wait_s == NO_PROGRESS_S
                else f"fewer than {LEAST_BYTES_S:g} bytes a second over {AVERAGE_S:g} s"
            )
            raise SlowBodyError(f"the request body arrived too slowly: {why}") from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        # A fast start extends the deadline by at most AVERAGE_S from now.
        self._due_s = min(self._due_s + len(piece) / LEAST_BYTES_S, self._clock() + AVERAGE_S)
        self.size += len(piece)
        self.whole = not message.get("more_body", False)
        return piece


class BodyReader:
    """Reads the bodies of one gateway. `partial_bytes`: bytes of bodies that are incomplete or wait for their turn.

    Bodies are read even while they wait: Serve would buffer unread bytes itself, without a limit.
    """

    def __init__(self, limit_bytes: int, most_partial_bytes: int = MOST_PARTIAL_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._most_partial_bytes = most_partial_bytes
        self._pace = Pace()
        self.partial_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. A large body waits for its turn (`Pace`).

        Raises TooLargeError as soon as the body is known to exceed the limit, SlowBodyError, ClientGoneError, and
        OverloadedError if partial bodies take too much memory or too many large requests are waiting.
        """
        _check_length(scope, self._limit_bytes)
        coming = _Coming(receive)
        pieces: list[bytes] = []
        try:
            while not coming.whole:
                pieces.append(await coming.next())
                self.partial_bytes += len(pieces[-1])
                if coming.size > self._limit_bytes:
                    raise too_large(self._limit_bytes)
                if coming.size > SMALL_BYTES and self.partial_bytes > self._most_partial_bytes:
                    raise OverloadedError("this gateway holds too much of unfinished request bodies; try again later")
            if coming.size > LARGE_BYTES:
                with DisconnectWatch(receive) as watch:
                    await watch.unless_gone(self._pace.take(coming.size))
            return b"".join(pieces)
        finally:
            self.partial_bytes -= coming.size

    async def pieces(self, scope: Scope, receive: Receive, limit_bytes: int) -> AsyncIterator[bytes]:
        """The body in pieces as it arrives, of at most `limit_bytes`; nothing is kept. Raises as `read` does."""
        _check_length(scope, limit_bytes)
        coming = _Coming(receive)
        while not coming.whole:
            piece = await coming.next()
            if coming.size > limit_bytes:
                raise too_large(limit_bytes)
            yield piece

    @staticmethod
    def discard_whole(scope: Scope) -> None:
        """Should this request be refused, its body is read and dropped whatever its size, for at most DISCARD_S.

        A client that writes when the connection is closed may never read the answer.
        """
        scope[_DISCARDED] = math.inf

    async def _discard(self, scope: Scope, rest: _Coming) -> None:
        """Reads and drops the rest. Returns when it is complete, too slow or over the limit, or the client is gone."""
        most_bytes = scope.get(_DISCARDED, self._limit_bytes)
        with contextlib.suppress(SlowBodyError, ClientGoneError, TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while not rest.whole and rest.size <= most_bytes:
                    await rest.next()

    def closing_where_unread(self, app: App) -> App:
        """Wraps `app` so that an answer sent before the whole body has arrived closes the connection.

        The rest of the body is read and dropped first, so that the client reads the answer. The limits on slow and
        large bodies apply.
        """

        async def closing(scope: Scope, receive: Receive, send: Send) -> None:
            headers = dict(scope.get("headers", ()))
            if not headers.keys() & {b"content-length", b"transfer-encoding"}:
                await app(scope, receive, send)
                return
            unread = True
            status = 0

            async def reading() -> Message:
                nonlocal unread
                message = await receive()
                unread = unread and bool(message.get("more_body", False))
                return message

            rest = _Coming(reading)

            async def sending(message: Message) -> None:
                nonlocal rest, status
                if unread and message["type"] == "http.response.start":
                    status, rest = message["status"], _Coming(reading)  # its time limits start now
                    if status != _TOO_SLOW and b"expect" not in headers:  # "Expect: 100-continue" is answered at once
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(REST_S):
                                await self._discard(scope, rest)
                    if unread:
                        message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
                elif unread and status != _TOO_SLOW and not message.get("more_body", False):
                    await send({**message, "more_body": True})
                    await self._discard(scope, rest)
                    message = {"type": "http.response.body"}
                await send(message)

            await app(scope, reading, sending)

        return closing


def _check_length(scope: Scope, limit_bytes: int) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
            raise too_large(limit_bytes)


def too_large(limit_bytes: int) -> TooLargeError:
    """The error for a body of more than `limit_bytes`."""
    return TooLargeError(f"the body is over the limit of {limit_bytes / (1 << 20):g} MiB (gateway.max_body_mib)")
