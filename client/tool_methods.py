"""The methods of both clients for conversations with tools."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, Protocol, Unpack

from alignedserve.client.options import ChatTurn, Options
from alignedserve.client.tool_loop import (
    DEFAULT_ROUNDS,
    AsyncToolStream,
    OnToolError,
    ToolLoop,
    ToolRun,
    ToolStream,
    run_tools,
    run_tools_async,
)
from alignedserve.client.types import Completion


class _Chats(Protocol):
    def chat(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> Completion: ...

    def chat_stream(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> Any: ...


class _AsyncChats(Protocol):
    def chat(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> Awaitable[Completion]: ...

    def chat_stream(self, messages: Iterable[ChatTurn], **options: Unpack[Options]) -> Any: ...


class ToolMethods:
    """Conversations in which the model calls functions."""

    def run_tools(
        self: _Chats,
        messages: Iterable[ChatTurn],
        *,
        max_rounds: int = DEFAULT_ROUNDS,
        on_error: OnToolError = "raise",
        **options: Unpack[Options],
    ) -> ToolRun:
        """Ask, call the functions that the model calls, send their results, until it answers.

        Args:
            messages: as for `chat`.
            max_rounds: maximum number of requests.
            on_error: what happens if a call is wrong or its function raises. "raise": the error ends the loop. "tell":
                the model gets the error as the result of the call.
            options: as for `chat`, for each request; `tools` are functions or `Tool`s. A call that `tool_choice` forces
                is forced in the first request only.

        Raises:
            UnknownToolError: there is no function of the name that the model calls.
            ToolArgumentsError: the arguments do not fit the function's parameters.
            ToolFailedError: a function raised; its exception is the cause.
            ToolRoundsError: the model still calls functions in the last request.
            IncompleteAnswerError: `max_tokens` cut a call.

        Example:
            run = client.run_tools([Message("user", "How warm is it in Bern?")], tools=[look], max_tokens=200)
            print(run.text, [result.call.name for result in run.results])
        """
        return run_tools(ToolLoop(messages, options, max_rounds, on_error, tasks=False), self.chat)

    def stream_tools(
        self: _Chats,
        messages: Iterable[ChatTurn],
        *,
        max_rounds: int = DEFAULT_ROUNDS,
        on_error: OnToolError = "raise",
        **options: Unpack[Options],
    ) -> ToolStream:
        """As `run_tools`, as a stream: the chunks of all answers, and a `ToolResult` after each call.

        Errors of requests and calls are raised by the iterator.

        Example:
            stream = client.stream_tools([Message("user", "How warm is it in Bern?")], tools=[look])
            for event in stream:
                print(event.text, end="", flush=True)
            print(stream.run().usage)
        """
        return ToolStream(ToolLoop(messages, options, max_rounds, on_error, tasks=False), self.chat_stream)


class AsyncToolMethods:
    """As `ToolMethods`, for asyncio."""

    async def run_tools(
        self: _AsyncChats,
        messages: Iterable[ChatTurn],
        *,
        max_rounds: int = DEFAULT_ROUNDS,
        on_error: OnToolError = "raise",
        **options: Unpack[Options],
    ) -> ToolRun:
        """Converse with tools; see `Client.run_tools`. Calls of one answer are made at the same time.

        Coroutine functions are awaited, other functions run in threads.

        Example:
            run = await client.run_tools([Message("user", "How warm is it in Bern?")], tools=[look])
        """
        return await run_tools_async(ToolLoop(messages, options, max_rounds, on_error, tasks=True), self.chat)

    def stream_tools(
        self: _AsyncChats,
        messages: Iterable[ChatTurn],
        *,
        max_rounds: int = DEFAULT_ROUNDS,
        on_error: OnToolError = "raise",
        **options: Unpack[Options],
    ) -> AsyncToolStream:
        """As a stream. Do not await this method; see `Client.stream_tools`.

        Example:
            async for event in client.stream_tools([Message("user", "How warm is it in Bern?")], tools=[look]):
                print(event.text, end="", flush=True)
        """
        return AsyncToolStream(ToolLoop(messages, options, max_rounds, on_error, tasks=True), self.chat_stream)
