"""HTTP/2 without TLS, stream by stream, for half-sent requests that a client library would not send."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http.client import HTTPMessage
from types import TracebackType
from typing import Self

import h2.connection
import h2.errors
import h2.events

from support.raw_http import RawAnswer


class RawH2:
    """An HTTP/2 connection: `async with RawH2(port) as connection`. Await one `answer` at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection = h2.connection.H2Connection()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._connection.initiate_connection()
        self._flush()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def send(self, method: str, path: str, fields: Mapping[str, str] | None = None, *, end: bool = True) -> int:
        """Open a stream with these headers; without `end` more follows. Returns its number."""
        number = self._connection.get_next_available_stream_id()
        pseudo = {":method": method, ":path": path, ":scheme": "http", ":authority": "a"}
        self._connection.send_headers(number, [*pseudo.items(), *(fields or {}).items()], end_stream=end)
        self._flush()
        return number

    def send_body(self, number: int, content: bytes, *, end: bool = True) -> None:
        self._connection.send_data(number, content, end_stream=end)
        self._flush()

    def reset(self, number: int) -> None:
        self._connection.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
        self._flush()

    async def answer(self, number: int) -> RawAnswer:
        """The whole answer of a stream. Raises ConnectionResetError if the stream or the connection has ended."""
        headers = HTTPMessage()
        body = b""
        while data := await self._reader.read(65536):
            for event in self._connection.receive_data(data):
                if isinstance(event, h2.events.DataReceived) and event.stream_id == number:
                    body += event.data
                    self._connection.acknowledge_received_data(event.flow_controlled_length, number)
                elif isinstance(event, h2.events.ResponseReceived) and event.stream_id == number:
                    for name, value in event.headers:
                        headers[name.decode()] = value.decode()
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id == number:
                    return RawAnswer(int(headers[":status"]), headers, body, closed=False)
                elif isinstance(event, h2.events.StreamReset) and event.stream_id == number:
                    raise ConnectionResetError(f"stream {number}: {event.error_code}")
            self._flush()
        raise ConnectionResetError("the connection is closed")

    def _flush(self) -> None:
        self._writer.write(self._connection.data_to_send())
