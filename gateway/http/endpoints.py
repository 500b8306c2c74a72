"""POST endpoints that generate, from the request body to the last event of the response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from alignedserve import logs
from alignedserve.errors import CancelledError, OverloadedError
from alignedserve.gateway.body.planning import CallPlan, ServedModel
from alignedserve.gateway.body.requests import GenerationRequest
from alignedserve.gateway.failures import UnsupportedFeatureError
from alignedserve.gateway.http import keep_alive
from alignedserve.gateway.http.asgi import (
    IGNORED,
    ClientGoneError,
    DisconnectWatch,
    Receive,
    Scope,
    Send,
    ignored_header,
    parse_json,
    report,
    send_error,
    send_json,
    start,
)
from alignedserve.gateway.http.body_reader import BodyReader
from alignedserve.gateway.ledger.calls import Call, Delta
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.reply.replies import Reply

EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
REQUEST_ID_HEADER = "x-alignedserve-request-id"  # Serve's proxy already sets x-request-id


class GenerateEndpoint:
    """The ASGI application of one endpoint. `parse` and `plan` raise the errors that the client gets."""

    def __init__(
        self,
        ledger: Ledger,
        intake: Intake,
        model: ServedModel,
        bodies: BodyReader,
        parse: Callable[[Any], GenerationRequest],
        plan: Callable[[ServedModel, Any], Awaitable[CallPlan]],
        reply: type[Reply],
    ) -> None:
        self._ledger = ledger
        self._intake = intake
        self._model = model
        self._bodies = bodies
        self._parse = parse
        self._plan = plan
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._intake.check(len(self._ledger))
            body = await self._bodies.read(scope, receive)
        except Exception as error:
            await self._refuse(send, error)
            return
        with DisconnectWatch(receive) as watch:
            try:
                request, call = await watch.unless_gone(self._open(body))
            except Exception as error:
                await self._refuse(send, error)
                return
            del body  # frees its memory: the answer may take a long time
            logs.request_id.set(call.plan.id)
            watch.on_gone = lambda: self._gone(call)
            if watch.gone:
                self._gone(call)
            try:
                headers = {REQUEST_ID_HEADER: call.plan.id, **ignored_header(request.ignored)}
                reply = self._reply(call, self._model, self._ledger.end, request)
                await self._answer(reply, send, headers, watch)
            finally:
                self._ledger.close(call)

    async def answer_offline(self, body: Any, priority: int) -> dict[str, Any]:
        """The whole reply to a body, without HTTP, for a line of a batch. Raises the errors that a client would get.

        `ignored_fields`: those of the body that the server does not know, as the header has them over HTTP.
        """
        with self._intake.admit(len(self._ledger)):
            request = await self.read(body, offline=True)
            if request.reply.stream:
                raise UnsupportedFeatureError("stream is not supported in a batch", param="stream")
            plan = await self._plan(self._model, request)
            call = self._ledger.open(replace(plan, priority=priority, offline=True))
        try:
            reply = self._reply(call, self._model, self._ledger.end, request)
            while deltas := await call.next():
                reply.collect(deltas)
            return {**reply.body(), **({IGNORED: list(request.ignored)} if request.ignored else {})}
        finally:
            self._ledger.close(call)

    # ---- for subclasses

    async def read(self, body: Any, *, offline: bool = False) -> GenerationRequest:
        """The request of a body. `offline`: it is a line of a batch. Raises the errors that the client gets."""
        return self._parse(body)

    async def before_end(self, reply: Reply) -> None:
        """Called when an answer over HTTP is complete, before the client gets its end."""

    # ---- internal

    async def _open(self, body: bytes) -> tuple[GenerationRequest, Call]:
        with self._intake.admit(len(self._ledger)):
            request = await self.read(parse_json(body))
            return request, self._ledger.open(await self._plan(self._model, request))

    async def _refuse(self, send: Send, error: Exception) -> None:
        if isinstance(error, ClientGoneError):
            return
        headers = self._intake.hold_header() if isinstance(error, OverloadedError) else {}
        await self._send_error(send, error, headers)

    async def _send_error(self, send: Send, error: Exception, headers: Mapping[str, str]) -> None:
        await send_error(send, report(error), headers, body=self._reply.error_body)

    def _gone(self, call: Call) -> None:
        self._ledger.close(call)
        call.fail(CancelledError("the client disconnected"))

    async def _answer(self, reply: Reply, send: Send, headers: Mapping[str, str], watch: DisconnectWatch) -> None:
        call = reply.call
        if call.plan.reply.stream:
            await self._stream(reply, send, headers, watch)
            return
        try:
            while deltas := await call.next():
                reply.collect(deltas)
            await self.before_end(reply)
            body = reply.body()
        except Exception as error:
            if not watch.gone:
                await self._send_error(send, error, headers)
            return
        await send_json(send, body, headers=headers)

    async def _stream(self, reply: Reply, send: Send, headers: Mapping[str, str], watch: DisconnectWatch) -> None:
        """Streams the reply. The status line is sent with the first tokens, or after FIRST_S: an earlier error has its
        own status.
        """
        first: list[Delta] | None = None
        try:
            async with asyncio.timeout(keep_alive.FIRST_S):
                first = await reply.call.next()
        except TimeoutError:
            pass
        except Exception as error:
            if not watch.gone:
                await self._send_error(send, error, headers)
            return
        await start(send, 200, EVENT_STREAM, {**STREAMED, **headers})
        ending = await self._stream_body(reply, send, first, watch)
        if ending is not None:
            await send({"type": "http.response.body", "body": ending})

    async def _stream_body(
        self, reply: Reply, send: Send, first: list[Delta] | None, watch: DisconnectWatch
    ) -> bytes | None:
        """What is left to be sent; None if the client has gone. `first`: what has come already."""
        try:
            async with keep_alive.KeepAlive(send) as stream:
                deltas = await reply.call.next() if first is None else first
                while deltas:
                    if frames := reply.frames(deltas):
                        await stream.send(b"".join(frames))
                    deltas = await reply.call.next()
            await self.before_end(reply)
            return reply.ending()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return None if watch.gone else reply.broken(report(error))
