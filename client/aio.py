"""The asyncio client: `Client`'s methods, awaited. It differs from it in how calls are sent, and in nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from alignedserve.cancellation import task_is_cancelled
from alignedserve.client.attempts import Attempts
from alignedserve.client.calls import DEFAULT_ADDRESS, DEFAULT_RESUME_S, Call, CallPlanner, open_stub
from alignedserve.client.options import ChatTurn, Options
from alignedserve.client.types import Chunk, Completion, ModelCard
from alignedserve.proto.inference_pb2 import GenerateChunk

Result = TypeVar("Result")


class AsyncChunkStream(AsyncIterator[Chunk]):
    """The chunks of one answer, as they are made; `ChunkStream` says when the request is cancelled.

    Cancelling the task that waits for a chunk cancels the request as well.
    """

    def __init__(self, call: Call[Chunk], send: Callable[[Call[Chunk]], Any], patience_s: float) -> None:
        self._attempts = Attempts(call, patience_s)
        self._send = send
        self._parse = call.parse
        self._closed = False
        self._responses = send(call)

    @property
    def request_id(self) -> str | None:
        return self._attempts.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            try:
                message = await _answer(self._attempts.call, self._responses.read())
            except grpc.RpcError as error:
                if self._attempts.complete and not self._closed:
                    raise StopAsyncIteration from None  # all is there but the word that it is
                await self._go_on(error)
                continue
            if not isinstance(message, GenerateChunk):  # grpc.aio.EOF
                raise StopAsyncIteration
            self._attempts.take(message)
            return self._parse(message)

    async def _go_on(self, error: grpc.RpcError) -> None:
        wait_s = None if self._closed else self._attempts.again(error)
        if wait_s is None:
            raise self._attempts.error(error) from error
        await asyncio.sleep(wait_s)
        if self._closed:
            raise self._attempts.call.closed_here() from error
        self._responses = self._send(self._attempts.call)

    async def close(self) -> None:
        """Cancel the request unless its last chunk has been read. May be called again."""
        self._closed = True
        self._responses.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if "_responses" in self.__dict__:  # sending may have failed
            self._responses.cancel()  # gRPC's own object is part of a cycle: it would wait for the garbage collector


class AsyncClient:
    """A client for asyncio. Arguments, errors and what the methods do are `Client`'s.

    It may be built anywhere; it belongs to the event loop of its first call (RuntimeError in another one). Cancelling
    a task that waits for an answer cancels the request at the server.

    Example:
        async with AsyncClient("127.0.0.1:9000", timeout_s=60) as client:
            first, second = await asyncio.gather(client.generate("Return the"), client.generate("Raise a"))
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str | None = None,
        application: str | None = None,
        timeout_s: float | None = None,
        api_key: str | None = None,
        resume_s: float = DEFAULT_RESUME_S,
    ) -> None:
        self._planner = CallPlanner(address, model, application, timeout_s, api_key, resume_s)
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def generate(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Complete a prompt; see `Client.generate` for arguments and errors.

        Example:
            completion = await client.generate("Return the", max_tokens=32, temperature=0)
        """
        return await self._ask(self._planner.generate(prompt, prompt_token_ids, options))

    def stream(
        self, prompt: str | None = None, *, prompt_token_ids: Iterable[int] | None = None, **options: Unpack[Options]
    ) -> AsyncChunkStream:
        """Complete a prompt piece by piece, not awaited itself; see `Client.stream` for arguments and errors.

        Example:
            async for chunk in client.stream("Return the", max_tokens=32):
                print(chunk.text, end="", flush=True)
        """
        return self._follow(self._planner.stream(prompt, prompt_token_ids, options))

    async def chat(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> Completion:
        """Answer a conversation; see `Client.chat` for arguments and errors.

        Example:
            answer = await client.chat([{"role": "user", "content": "What does len return?"}], max_tokens=64)
        """
        return await self._ask(self._planner.chat(messages, options))

    def chat_stream(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> AsyncChunkStream:
        """Answer a conversation piece by piece, not awaited itself; see `Client.chat_stream`.

        Example:
            async for chunk in client.chat_stream([Message("user", "What does len return?")]):
                print(chunk.text, end="", flush=True)
        """
        return self._follow(self._planner.chat_stream(messages, options))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel a running request, whoever sent it; see `Client.cancel`.

        Example:
            was_running = await client.cancel("mine-1")
        """
        return await self._ask(self._planner.cancel(request_id, timeout_s))

    async def models(self, *, timeout_s: float | None = None) -> tuple[ModelCard, ...]:
        """The served models; see `Client.models`.

        Example:
            names = [model.id for model in await client.models()]
        """
        return await self._ask(self._planner.models(timeout_s))

    async def close(self) -> None:
        """Close the connection; see `Client.close`.

        Example:
            await client.close()
        """
        self._closed = True
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, call: Call[Result]) -> Result:
        attempts = Attempts(call, self._planner.patience_s(call))
        while True:
            try:
                return call.parse(await _answer(call, self._send(attempts.call)))
            except grpc.RpcError as error:
                wait_s = attempts.again(error)
                if wait_s is None:
                    raise attempts.error(error) from error
            await asyncio.sleep(wait_s)

    def _follow(self, call: Call[Chunk]) -> AsyncChunkStream:
        return AsyncChunkStream(call, self._send, self._planner.patience_s(call))

    def _send(self, call: Call[Any]) -> Any:
        if self._closed:
            raise RuntimeError("this client has been closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:  # a channel of grpc.aio is bound to the loop that it is made in
            self._channel = grpc.aio.insecure_channel(self._planner.address, options=self._planner.channel_options())
            self._stub, self._loop = open_stub(self._channel), loop
        elif self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; make one for each loop")
        return getattr(self._stub, call.method)(call.message, timeout=call.timeout_s, metadata=call.metadata)


async def _answer(call: Call[Any], response: Any) -> Any:
    """Wait for a response. Raises grpc.RpcError, and CancelledError where this side closed the call."""
    try:
        return await response
    except asyncio.CancelledError:
        if task_is_cancelled():
            raise
        raise call.closed_here() from None  # gRPC's word for a call that its own side closed
