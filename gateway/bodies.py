"""Reading request bodies: how slow a client may be, and how much may be held of bodies that have not come whole."""

from __future__ import annotations

import asyncio
import time

from alignedserve.errors import OverloadedError, RequestError, TooLargeError
from alignedserve.gateway.asgi import ClientGoneError, Message, Receive, Scope
from alignedserve.gateway.pacing import LARGE_BYTES, Pace

NO_PROGRESS_S = 5.0
AVERAGE_AFTER_S = 10.0
LEAST_BYTES_S = 1024.0  # on average, once AVERAGE_AFTER_S have passed
SMALL_BYTES = LARGE_BYTES  # a body of that size finds room however much others hold, and is read at once
MOST_PARTIAL_BYTES = 256 << 20


class SlowBodyError(RequestError):
    """The rest of the body did not come in time."""

    code = "request_timeout"
    http_status = 408


class BodyReader:
    """Reads the bodies of one gateway. `partial_bytes` are held of bodies that have not come whole."""

    def __init__(self, limit_bytes: int, most_partial_bytes: int = MOST_PARTIAL_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._most_partial_bytes = most_partial_bytes
        self._pace = Pace()
        self.partial_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises TooLargeError as soon as it is known to be over the limit, SlowBodyError,
        OverloadedError where too much is held of others, ClientGoneError."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._limit_bytes:
                raise too_large(self._limit_bytes)
        chunks: list[bytes] = []
        size, begun_s = 0, time.monotonic()
        try:
            while True:
                message = await _receive(receive, size, begun_s)
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk = message.get("body", b"")
                size += len(chunk)
                self.partial_bytes += len(chunk)
                chunks.append(chunk)
                if size > self._limit_bytes:
                    raise too_large(self._limit_bytes)
                if not message.get("more_body", False):
                    return b"".join(chunks)
                if size > SMALL_BYTES and self.partial_bytes > self._most_partial_bytes:
                    raise OverloadedError("this gateway holds too much of unfinished request bodies; try again later")
                if size > SMALL_BYTES:  # the client waits: what is not read yet fills the buffers between it and us
                    begun_s += await self._pace.take(len(chunk))
        finally:
            self.partial_bytes -= size


async def _receive(receive: Receive, size: int, begun_s: float) -> Message:
    """The next piece of a body of which `size` bytes have come since `begun_s`."""
    now_s = time.monotonic()
    average_until_s = begun_s + max(AVERAGE_AFTER_S, size / LEAST_BYTES_S)
    wait_s = min(NO_PROGRESS_S, average_until_s - now_s)
    try:
        async with asyncio.timeout(wait_s):
            return await receive()
    except TimeoutError:
        why = (
            f"nothing of it came for {NO_PROGRESS_S:g} s"
            if wait_s == NO_PROGRESS_S
            else f"{size} bytes came in {time.monotonic() - begun_s:.0f} s, fewer than {LEAST_BYTES_S:g} a second"
        )
        raise SlowBodyError(f"the request body came too slowly: {why}") from None


def too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(f"the body is over the limit of {limit_bytes / (1 << 20):g} MiB (gateway.max_body_mib)")
