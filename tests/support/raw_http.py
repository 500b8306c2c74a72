"""HTTP as bytes, for requests that no client library sends, and for unparsed answers."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ERROR_KEYS = {"message", "type", "param", "code"}
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """`closed`: the server has closed the connection after the answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    closed: bool

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object. Raises AssertionError if the answer is not one."""
        assert self.headers["content-type"] == "application/json", (self.status, self.body)
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert error.keys() == ERROR_KEYS
        assert error["message"]
        return error


def ask(port: int, *parts: bytes, timeout_s: float = 10.0) -> list[RawAnswer]:
    """Send `parts` one after another, and read the answer. If the connection stays open, also read an answer to
    `GET /live` over it. Raises OSError and TimeoutError.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        send(connection, parts)
        answers = [read(connection, "HEAD" if parts[0].startswith(b"HEAD ") else "GET")]
        if not answers[0].closed:
            send(connection, [b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"])
            answers.append(read(connection))
        return answers


def send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    """A server may answer and close the connection before all is sent."""
    for number, part in enumerate(parts):
        if number:
            time.sleep(_PAUSE_S)  # else they arrive as one part
        try:
            connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            return


def read(connection: socket.socket, method: str = "GET") -> RawAnswer:
    """The next answer, without any `100 Continue`."""
    answer = http.client.HTTPResponse(connection, method=method)
    answer.begin()
    body = answer.read()
    return RawAnswer(answer.status, answer.headers, body, answer.will_close)
