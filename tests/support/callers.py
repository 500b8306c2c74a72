"""Requests to gateways whose clients give them up, in all ways."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self

import httpx

from alignedserve.client import AlignedServeError, AsyncClient
from support.raw_h2 import RawH2

BOTH = (False, True)  # not streamed, and streamed
_names = itertools.count()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection with an RST."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


LEAVE: dict[str, Callable[[asyncio.StreamWriter], object]] = {
    "fin": asyncio.StreamWriter.close,
    "rst": reset,
    "half-close": asyncio.StreamWriter.write_eof,
}


def head_of(length: int, path: str = "/v1/completions") -> bytes:
    """The head of a POST with a JSON body of the given number of bytes."""
    fields = f"Host: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


class Callers:
    """`ways` are coroutine functions `(prompt_token_ids, max_tokens, leave)`: each sends a request, gives it up once
    `leave` is set, and returns how it ended: "left", "ended" or an error's code. All generate past end tokens. Each way
    exists twice: streamed, and not. Those of `ways_while_sending` have sent only half of the body by then.

    Requests go to the first gateway, cancels by id to the second. `h2c`: HAProxy with HTTP/2 is in front.
    """

    def __init__(
        self, url: str, grpc_address: str, other_url: str, other_grpc_address: str, *, h2c: bool = False
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._address = url.removeprefix("http://")
        self._http = httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits)
        self._other_http = httpx.AsyncClient(base_url=other_url, timeout=60.0, limits=limits)
        self._grpc = AsyncClient(grpc_address, resume_s=0, max_retries=0)
        self._other_grpc = AsyncClient(other_grpc_address, resume_s=0, max_retries=0)
        self.ways: tuple[Callable[[list[int], int, asyncio.Event], Awaitable[str]], ...] = (
            *(partial(self.drop_http, stream) for stream in BOTH),
            *(partial(way, stream) for way in (self.drop_h2c, self.reset_h2c) for stream in BOTH if h2c),
            *(partial(self.leave_socket, how, stream) for how in LEAVE for stream in BOTH),
            *(partial(way, stream) for way in (self.drop_grpc, self.cancel_grpc, self.cancel_http) for stream in BOTH),
        )
        self.ways_while_sending = (
            partial(self.reset_h2c, False, whole=False),
            *(partial(self.leave_socket, how, False, whole=False) for how in LEAVE),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for http in (self._http, self._other_http):
            await http.aclose()
        for grpc in (self._grpc, self._other_grpc):
            await grpc.close()

    async def ask(self) -> str:
        """The answer to a request that its client does not give up."""
        body = {"prompt": [11, 12, 13], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        answer = await self._http.post("/v1/completions", json=body)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    async def drop_http(self, stream: bool, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        return await _until(leave, self._http.post("/v1/completions", json=_body(stream, prompt, max_tokens)))

    async def drop_h2c(self, stream: bool, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        """HTTP/2 without TLS, on a new connection, because httpcore counts streams wrong after a cancel."""
        url = f"http://{self._address}/v1/completions"
        async with httpx.AsyncClient(timeout=60.0, http1=False, http2=True) as http:
            return await _until(leave, http.post(url, json=_body(stream, prompt, max_tokens)))

    async def reset_h2c(
        self, stream: bool, prompt: list[int], max_tokens: int, leave: asyncio.Event, *, whole: bool = True
    ) -> str:
        """Only the stream ends (RST_STREAM). Its connection stays open, and carries another request."""
        content = json.dumps(_body(stream, prompt, max_tokens)).encode()
        fields = {"content-type": "application/json", "content-length": str(len(content))}
        async with RawH2(int(self._address.rpartition(":")[2])) as connection:
            number = connection.send("POST", "/v1/completions", fields, end=False)
            connection.send_body(number, content if whole else content[: len(content) // 2], end=whole)
            reading = asyncio.ensure_future(connection.answer(number))
            if await _ended(reading, leave):
                await reading
                return "ended"
            connection.reset(number)
            reading.cancel()
            await asyncio.wait((reading,))
            answer = await connection.answer(connection.send("GET", "/live"))
            assert answer.status == 200
            return "left"

    async def leave_socket(
        self, how: str, stream: bool, prompt: list[int], max_tokens: int, leave: asyncio.Event, *, whole: bool = True
    ) -> str:
        """Send headers and body in two parts, as most libraries do. `how` is one of LEAVE."""
        content = json.dumps(_body(stream, prompt, max_tokens)).encode()
        host, _, port = self._address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head_of(len(content)))
            await writer.drain()
            await asyncio.sleep(0.01)  # otherwise the kernel may send both in one segment
            writer.write(content if whole else content[: len(content) // 2])
            reading = asyncio.ensure_future(reader.read())
            if await _ended(reading, leave):
                return "ended"
            LEAVE[how](writer)
            await asyncio.wait((reading,))  # if only one half is closed, the other end closes the rest
            return "left"
        finally:
            writer.close()

    async def drop_grpc(self, stream: bool, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        return await _until(leave, self._read(stream, prompt, max_tokens))

    async def cancel_grpc(self, stream: bool, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        name = f"named-{next(_names)}"
        reading = self._read(stream, prompt, max_tokens, request_id=name)
        return await _until_told(leave, reading, lambda: self._other_grpc.cancel(name))

    async def cancel_http(self, stream: bool, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        name = f"named-{next(_names)}"
        path = f"/v1/requests/{name}/cancel"
        reading = self._read(stream, prompt, max_tokens, request_id=name)
        return await _until_told(leave, reading, lambda: self._other_http.post(path))

    async def time_out(self, prompt: list[int], max_tokens: int, timeout_s: float) -> str:
        """Runs to its token limit, unless it ends before."""
        try:
            await self._read(True, prompt, max_tokens, timeout_s=timeout_s)
        except AlignedServeError as error:
            return error.code
        return "ended"

    async def _read(self, stream: bool, prompt: list[int], max_tokens: int, **options: Any) -> None:
        options |= {"prompt_token_ids": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        if not stream:
            await self._grpc.generate(**options)
            return
        async with self._grpc.stream(**options) as chunks:
            async for _ in chunks:
                pass


def _body(stream: bool, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


async def _ended(reading: asyncio.Future[Any], leave: asyncio.Event) -> bool:
    """Wait for the call or for `leave`. Returns whether the call has ended."""
    leaving = asyncio.ensure_future(leave.wait())
    await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    return reading.done()


async def _until(leave: asyncio.Event, request: Coroutine[Any, Any, Any]) -> str:
    """Give a request up by cancelling the task that waits for it. That drops its connection or gRPC call."""
    asking = asyncio.ensure_future(request)
    if await _ended(asking, leave):
        try:
            await asking
        except AlignedServeError as error:
            return error.code
        return "ended"
    asking.cancel()
    await asyncio.wait((asking,))
    return "left"


async def _until_told(
    leave: asyncio.Event, request: Coroutine[Any, Any, Any], cancel: Callable[[], Awaitable[Any]]
) -> str:
    """Give a request up by `cancel`."""
    reading = asyncio.ensure_future(request)
    await _ended(reading, leave)
    while not reading.done():  # the request may not have arrived yet
        await cancel()
        await asyncio.wait((reading,), timeout=0.05)
    try:
        await reading
    except AlignedServeError as error:
        return error.code
    return "ended"
