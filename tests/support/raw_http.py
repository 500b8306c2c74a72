"""HTTP as bytes: for requests that no client library sends, and answers as they come."""

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
    """`closed`: the server has ended the connection after it."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    closed: bool

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object. Raises AssertionError where the answer is none."""
        assert self.headers["content-type"] == "application/json", (self.status, self.body)
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert error.keys() == ERROR_KEYS
        assert error["message"]
        return error


def ask(port: int, *parts: bytes, timeout_s: float = 10.0) -> list[RawAnswer]:
    """Sends `parts`, one after the other, and reads an answer to them; where the connection is left open, then one to
    `GET /live` over it. Raises OSError, TimeoutError.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        send(connection, parts)
        answers = [read(connection, "HEAD" if parts[0].startswith(b"HEAD ") else "GET")]
        if not answers[0].closed:
            send(connection, [b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"])
            answers.append(read(connection))
        return answers


def send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    """A server may have answered, and gone, before all is sent."""
    for number, part in enumerate(parts):
        if number:
            time.sleep(_PAUSE_S)  # else they come as one
        try:
            connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            return


def read(connection: socket.socket, method: str = "GET") -> RawAnswer:
    """The next answer, after any `100 Continue`."""
    answer = http.client.HTTPResponse(connection, method=method)
    answer.begin()
    body = answer.read()
    return RawAnswer(answer.status, answer.headers, body, answer.will_close)
