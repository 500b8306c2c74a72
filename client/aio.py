"""The asyncio client. It has the methods of `Client`, and differs only in how calls are sent."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc

from alignedserve.cancellation import task_is_cancelled
from alignedserve.client.attempts import DEFAULT_BACKOFF, DEFAULT_RESUME_S, Attempts, Backoff, Tries
from alignedserve.client.batch import DEFAULT_CONCURRENCY, Batch
from alignedserve.client.calls import Call, CallPlanner, open_stub
from alignedserve.client.connections import (
    DEFAULT_ADDRESS,
    DEFAULT_CONNECT_TIMEOUT_S,
    Rotation,
    Transport,
    parse_addresses,
)
from alignedserve.client.failures import EndedEarlyError
from alignedserve.client.messages import join_chunks
from alignedserve.client.options import BatchItem, ChatItem, ChatTurn, Options, Progress
from alignedserve.client.tasks import run_batch
from alignedserve.client.tool_methods import AsyncToolMethods
from alignedserve.client.types import Chunk, ClientTimings, Completion, ModelCard
from alignedserve.errors import AlignedServeError, CancelledError
from alignedserve.grpc_poller import keep_poller
from alignedserve.proto.inference_pb2 import GenerateChunk

Result = TypeVar("Result")


class AsyncChunkStream(AsyncIterator[Chunk]):
    """The chunks of one request as they are generated; see `ChunkStream` for when the request is cancelled.

    Cancelling the task that waits for a chunk cancels the request as well.
    """

    def __init__(self, attempts: Attempts, send: Callable[[Attempts], Any], cut: asyncio.Event) -> None:
        self._attempts = attempts
        self._send = send
        self._chunks: list[Chunk] = []
        self._closed = False
        self._cut = cut  # ends a wait between attempts: this stream or its client was closed
        self._responses = send(attempts)

    @property
    def request_id(self) -> str:
        """The id of the request, for `AsyncClient.cancel` and logs."""
        return self._attempts.request_id

    @property
    def client_timings(self) -> ClientTimings:
        """Seconds measured by this client until now. `ttft_s` is set from the first token on."""
        return self._attempts.timings()

    async def completion(self) -> Completion:
        """Read the rest, and return the complete result; see `ChunkStream.completion`."""
        async for _ in self:
            pass
        return join_chunks(self._chunks, self._attempts.timings(), self._attempts.call.read)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            try:
                message = await _answer(self._attempts, self._responses.read())
                ended = not isinstance(message, GenerateChunk)  # grpc.aio.EOF, which has no type
                if ended and not self._attempts.complete:
                    raise EndedEarlyError
            except (grpc.RpcError, CancelledError) as error:
                if self._attempts.complete:
                    raise StopAsyncIteration from None  # all chunks arrived; only the final status is missing
                if isinstance(error, CancelledError):
                    raise
                await self._go_on(error)
                continue
            if ended:
                raise StopAsyncIteration
            self._attempts.take(message)
            chunk: Chunk = self._attempts.call.parse(message, self._attempts.timings())
            self._chunks.append(chunk)
            return chunk

    async def _go_on(self, error: grpc.RpcError) -> None:
        wait_s = None if self._closed else self._attempts.again(error)
        if wait_s is None:
            raise self._attempts.error(error) from error
        if await _cut_within(wait_s, self._cut):
            raise self._attempts.call.closed_here(self.request_id) from error
        self._responses = self._send(self._attempts)

    async def close(self) -> None:
        """Cancel the request unless its last chunk has been read. May be called repeatedly."""
        self._closed = True
        self._cut.set()
        self._responses.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if "_responses" in self.__dict__:  # sending may have failed
            self._responses.cancel()  # gRPC's object is in a reference cycle, and would wait for the garbage collector


class AsyncClient(AsyncToolMethods):
    """A client for asyncio. Arguments, errors and methods are those of `Client`.

    It may be created anywhere. It belongs to the event loop of its first call, and raises RuntimeError in another loop.
    Cancelling a task that waits for an answer cancels the request at the server.

    Example:
        async with AsyncClient("127.0.0.1:9000", timeout_s=60) as client:
            first, second = await asyncio.gather(client.generate("Return the"), client.generate("Raise a"))
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        model: str | None = None,
        application: str | None = None,
        timeout_s: float | None = None,
        api_key: str | None = None,
        max_retries: int = 2,
        backoff: Backoff = DEFAULT_BACKOFF,
        resume_s: float = DEFAULT_RESUME_S,
        tls: bool | grpc.ChannelCredentials = False,
        root_certificates: bytes | str | os.PathLike[str] | None = None,
        server_name: str | None = None,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        keepalive_s: float | None = None,
    ) -> None:
        self._planner = CallPlanner(model, application, timeout_s, api_key, max_retries)
        self._transport = Transport(tls, root_certificates, server_name, connect_timeout_s, keepalive_s)
        self._tries = Tries(Rotation(parse_addresses(address)), backoff, resume_s)
        self._channels: dict[str, tuple[grpc.aio.Channel, Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._cut = asyncio.Event()
        self._cuts = weakref.WeakSet([self._cut])  # of all calls that may wait between attempts

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
        """Complete a prompt as a stream. Do not await this method; see `Client.stream` for arguments and errors.

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
        """Answer a conversation as a stream. Do not await this method; see `Client.chat_stream`.

        Example:
            async for chunk in client.chat_stream([Message("user", "What does len return?")]):
                print(chunk.text, end="", flush=True)
        """
        return self._follow(self._planner.chat_stream(messages, options))

    @overload
    async def generate_many(
        self,
        prompts: Iterable[BatchItem] | AsyncIterable[BatchItem],
        *,
        concurrency: int = ...,
        progress: Progress = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    async def generate_many(
        self,
        prompts: Iterable[BatchItem] | AsyncIterable[BatchItem],
        *,
        concurrency: int = ...,
        progress: Progress = ...,
        return_exceptions: bool,
        **options: Unpack[Options],
    ) -> list[Completion | AlignedServeError]: ...

    async def generate_many(
        self,
        prompts: Iterable[BatchItem] | AsyncIterable[BatchItem],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress = False,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """Complete many prompts, several at a time; see `Client.generate_many` for arguments and errors.

        `prompts` may also be an asynchronous iterable. Cancelling the waiting task cancels open requests at the server.

        Example:
            answers = await client.generate_many(["Return the", "Raise a"], max_tokens=32, concurrency=8)
        """
        batch = Batch(prompts, self._planner.generate_item, options, concurrency, progress, return_exceptions)
        self._check_open()
        return await run_batch(batch, prompts, functools.partial(self._ask, begun=True))

    @overload
    async def chat_many(
        self,
        conversations: Iterable[ChatItem] | AsyncIterable[ChatItem],
        *,
        concurrency: int = ...,
        progress: Progress = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    async def chat_many(
        self,
        conversations: Iterable[ChatItem] | AsyncIterable[ChatItem],
        *,
        concurrency: int = ...,
        progress: Progress = ...,
        return_exceptions: bool,
        **options: Unpack[Options],
    ) -> list[Completion | AlignedServeError]: ...

    async def chat_many(
        self,
        conversations: Iterable[ChatItem] | AsyncIterable[ChatItem],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress = False,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> Any:
        """Answer many conversations, several at a time; see `Client.chat_many`.

        Example:
            questions = ["What does len return?", "What does open return?"]
            answers = await client.chat_many([[Message("user", text)] for text in questions], max_tokens=32)
        """
        batch = Batch(conversations, self._planner.chat_item, options, concurrency, progress, return_exceptions)
        self._check_open()
        return await run_batch(batch, conversations, functools.partial(self._ask, begun=True))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel a running request of any client; see `Client.cancel`.

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
        """Close the connections; see `Client.close`.

        Example:
            await client.close()
        """
        self._closed = True
        for cut in list(self._cuts):
            cut.set()
        for channel, _ in self._channels.values():
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, call: Call[Result], *, begun: bool = False) -> Result:
        """The result of a call; `begun`: it belongs to a batch that has begun."""
        attempts = self._tries.of(call)
        while True:
            try:
                response = await _answer(attempts, self._send(attempts, begun=begun))
            except grpc.RpcError as error:
                wait_s = attempts.again(error)
                if wait_s is None:
                    raise attempts.error(error) from error
            else:
                result: Result = attempts.result(response)
                return result
            if await _cut_within(wait_s, self._cut):
                raise call.closed_here(attempts.request_id)

    def _follow(self, call: Call[Chunk]) -> AsyncChunkStream:
        cut = asyncio.Event()
        self._cuts.add(cut)
        return AsyncChunkStream(self._tries.of(call), self._send, cut)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this client has been closed")

    def _send(self, attempts: Attempts, *, begun: bool = False) -> Any:
        if self._closed and (begun or attempts.again_sent):
            raise attempts.call.closed_here(attempts.request_id)
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; create one for each loop")
        address, call = attempts.address, attempts.call
        if address not in self._channels:  # a channel of grpc.aio belongs to the loop in which it is created
            channel = self._open(address)
            self._channels[address] = (channel, open_stub(channel))
        method = getattr(self._channels[address][1], call.method)
        return method(call.message, timeout=call.timeout_s, metadata=call.metadata)

    def _open(self, address: str) -> grpc.aio.Channel:
        keep_poller()
        credentials, options = self._transport.credentials(), self._transport.options(address)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)


async def _cut_within(seconds: float, cut: asyncio.Event) -> bool:
    """Wait between two attempts. Returns True at once if `cut` is set: there is no further attempt."""
    try:
        async with asyncio.timeout(seconds):
            return await cut.wait()
    except TimeoutError:
        return False


async def _answer(attempts: Attempts, response: Any) -> Any:
    """Wait for a response. Raises grpc.RpcError, and CancelledError if this side closed the call."""
    try:
        return await response
    except asyncio.CancelledError:
        if task_is_cancelled():
            raise
        raise attempts.call.closed_here(
            attempts.request_id
        ) from None  # gRPC raises this if its own side closed the call
