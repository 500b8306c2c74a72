"""Requests to gateways that are given up in every way there is."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import httpx

from alignedserve.client import AlignedServeError, AsyncClient

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
    """The head of a POST of a JSON body of so many bytes."""
    fields = f"Host: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


class Callers:
    """`ways` are coroutine functions `(prompt_token_ids, max_tokens, leave)`: each sends a request, gives it up once
    `leave` is set, and returns how it ended: "left", "ended" or an error's code. All generate past end tokens.

    Requests go to the first gateway, cancels by id to the second. `h2c`: HAProxy is in front, which speaks HTTP/2.
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
            self.drop_http,
            self.drop_http_stream,
            *((self.drop_h2c,) if h2c else ()),
            *(partial(self.leave_socket, how) for how in LEAVE),
            self.drop_grpc,
            self.cancel_grpc,
            self.cancel_http,
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

    async def drop_http(self, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return await _until(leave, self._http.post("/v1/completions", json=body))

    async def drop_http_stream(self, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        async def read() -> None:
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass

        return await _until(leave, read())

    async def drop_h2c(self, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        """Over HTTP/2 without TLS, on a connection of its own: httpcore counts streams wrong after a cancel."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": len(prompt) % 2 == 0}
        url = f"http://{self._address}/v1/completions"
        async with httpx.AsyncClient(timeout=60.0, http1=False, http2=True) as http:
            return await _until(leave, http.post(url, json=body))

    async def leave_socket(self, how: str, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        """Headers and body in two pieces, as most libraries send them; `how` is one of LEAVE."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": len(prompt) % 2 == 0}
        content = json.dumps(body).encode()
        host, _, port = self._address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head_of(len(content)))
            await writer.drain()
            await asyncio.sleep(0.01)  # else the kernel puts them together again
            writer.write(content)
            reading = asyncio.ensure_future(reader.read())
            leaving = asyncio.ensure_future(leave.wait())
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if reading.done():
                return "ended"
            LEAVE[how](writer)
            await asyncio.wait((reading,))  # where only one half is closed, the other end closes the rest
            return "left"
        finally:
            writer.close()

    async def drop_grpc(self, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        return await _until(leave, self._read(prompt, max_tokens))

    async def cancel_grpc(self, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        name = f"named-{next(_names)}"
        return await self._until_told(prompt, max_tokens, leave, name, lambda: self._other_grpc.cancel(name))

    async def cancel_http(self, prompt: list[int], max_tokens: int, leave: asyncio.Event) -> str:
        name = f"named-{next(_names)}"
        path = f"/v1/requests/{name}/cancel"
        return await self._until_told(prompt, max_tokens, leave, name, lambda: self._other_http.post(path))

    async def time_out(self, prompt: list[int], max_tokens: int, timeout_s: float) -> str:
        """Ends by its own limit, unless it ends before."""
        try:
            await self._read(prompt, max_tokens, timeout_s=timeout_s)
        except AlignedServeError as error:
            return error.code
        return "ended"

    async def _read(self, prompt: list[int], max_tokens: int, **options: Any) -> None:
        async with self._grpc.stream(
            prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, **options
        ) as stream:
            async for _ in stream:
                pass

    async def _until_told(
        self,
        prompt: list[int],
        max_tokens: int,
        leave: asyncio.Event,
        name: str,
        cancel: Callable[[], Awaitable[Any]],
    ) -> str:
        reading = asyncio.ensure_future(self._read(prompt, max_tokens, request_id=name))
        leaving = asyncio.ensure_future(leave.wait())
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        while not reading.done():  # it may not have arrived yet
            await cancel()
            await asyncio.wait((reading,), timeout=0.05)
        try:
            await reading
        except AlignedServeError as error:
            return error.code
        return "ended"


async def _until(leave: asyncio.Event, request: Any) -> str:
    """Give a request up by cancelling the task that waits for it: its connection, or its gRPC call, is dropped."""
    asking = asyncio.ensure_future(request)
    leaving = asyncio.ensure_future(leave.wait())
    await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if asking.done():
        await asking
        return "ended"
    asking.cancel()
    await asyncio.wait((asking,))
    return "left"
