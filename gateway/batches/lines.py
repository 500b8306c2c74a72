"""Answers one line of a batch as a request of the lowest priority, as often as it takes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import orjson

from alignedserve.errors import AlignedServeError, OverloadedError, UnavailableError
from alignedserve.gateway.batches.batches import LineAnswer
from alignedserve.gateway.batches.gate import Gate
from alignedserve.gateway.batches.jsonl import Line
from alignedserve.gateway.failures import RequestLostError, error_object
from alignedserve.gateway.http.asgi import IGNORED, report
from alignedserve.gateway.http.pacing import LARGE_BYTES, Pace
from alignedserve.request import BATCH_PRIORITY

# Takes a body and a priority, returns the whole reply, and raises the errors that a client would get.
Endpoint = Callable[[Any, int], Awaitable[dict[str, Any]]]
MOST_TRIES = 5  # of a line that ends its workers, or that the server fails to answer
FIRST_PAUSE_S, MOST_PAUSE_S = 0.25, 8.0
_LARGE_BYTES_S = 2 << 20  # a quarter of what clients' bodies may take of the event loop


class LineAnswerer:
    """`endpoints`: by path."""

    def __init__(self, endpoints: Mapping[str, Endpoint], gate: Gate) -> None:
        self._endpoints = endpoints
        self._gate = gate
        self._pace = Pace(bytes_s=_LARGE_BYTES_S, most_waiting_bytes=math.inf)  # the gate bounds what waits

    async def answer(self, path: str, line: Line) -> LineAnswer:
        """The answer of a line, or its error. What an overload or a missing process prevents is tried again."""
        if len(line.text) > LARGE_BYTES:
            await self._pace.take(len(line.text))
        value = orjson.loads(line.text)
        tries, pause_s = 0, FIRST_PAUSE_S
        while True:
            try:
                body = await self._endpoints[path](value["body"], BATCH_PRIORITY)
                return _row(line, value["custom_id"], response=_response(200, body), failed=False)
            except OverloadedError as error:
                await asyncio.sleep(self._gate.refused(error.retry_after_s))
                continue
            except Exception as error:
                found = report(error)
                its_own_fault = not isinstance(found, UnavailableError) or isinstance(found, RequestLostError)
                tries += its_own_fault
                if found.http_status < 500 or tries >= MOST_TRIES:
                    return _row(line, value["custom_id"], response=_response(found.http_status, error_object(found)))
                await asyncio.sleep(pause_s)
                pause_s = min(MOST_PAUSE_S, 2 * pause_s)


def unanswered(line: Line, error: AlignedServeError) -> LineAnswer:
    """What the errors file says of a line that was not answered."""
    custom_id = orjson.loads(line.text)["custom_id"]
    return _row(line, custom_id, error={"code": error.code, "message": error.message})


def _response(status: int, body: dict[str, Any]) -> dict[str, Any]:
    ignored = body.pop(IGNORED, None)
    response = {"status_code": status, "request_id": body.get("id", ""), "body": body}
    return response if ignored is None else {**response, IGNORED: ignored}


def _row(line: Line, custom_id: str, *, failed: bool = True, response: Any = None, error: Any = None) -> LineAnswer:
    row = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return LineAnswer(line.index, failed, orjson.dumps(row))
