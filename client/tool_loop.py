"""The loop of a conversation with tools: ask, call the functions, send their results, until there is an answer.

`ToolLoop` decides without I/O. `run_tools` and the streams send requests and call functions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, cast

from alignedserve.client.options import ChatTurn, Options
from alignedserve.client.tools import Tool, result_text, tools_of
from alignedserve.client.types import Chunk, Completion, Message, ToolCall, Usage
from alignedserve.errors import (
    IncompleteAnswerError,
    InvalidRequestError,
    ToolError,
    ToolFailedError,
    ToolRoundsError,
    UnknownToolError,
)

DEFAULT_ROUNDS = 10
OnToolError: TypeAlias = Literal["raise", "tell"]
""""raise": a call that fails ends the loop. "tell": the model reads the error as the call's result, and goes on."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """How a call ended. `value` is what the function returned, `text` what the model reads of it or of the `error`."""

    call: ToolCall
    text: str
    value: Any = None
    error: ToolError | None = None

    @property
    def message(self) -> Message:
        """The result as a turn of the conversation."""
        return Message("tool", self.text, name=self.call.name, tool_call_id=self.call.id)


@dataclass(frozen=True, slots=True)
class ToolRun:
    """A conversation with tools that has ended with an answer.

    `completion` is the answer. `messages` is the whole conversation with it. `results` are those of all calls, in
    order. `usage` is the sum over all `rounds`.
    """

    completion: Completion
    messages: tuple[ChatTurn, ...]
    results: tuple[ToolResult, ...]
    rounds: int
    usage: Usage

    @property
    def text(self) -> str:
        return self.completion.text

    @property
    def parsed(self) -> Any:
        """The answer as an object of `response_format`. See `Choice.parsed`."""
        return self.completion.parsed


@dataclass(slots=True)
class _Prepared:
    """A call with its arguments, or with the error for which it is not made."""

    call: ToolCall
    tool: Tool | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    error: ToolError | None = None


class ToolLoop:
    """Send `messages` with `options`, and `take` the answer. If it has calls, `give` their results; then send again."""

    def __init__(
        self, messages: Iterable[ChatTurn], options: Options, max_rounds: int, on_error: OnToolError, *, tasks: bool
    ) -> None:
        """`tasks`: functions may be coroutine functions. Raises InvalidRequestError."""
        if not isinstance(max_rounds, int) or max_rounds < 1:
            raise InvalidRequestError(
                f"max_rounds must be an integer of at least 1, got {max_rounds!r}", param="max_rounds"
            )
        if on_error not in ("raise", "tell"):
            raise InvalidRequestError(f'on_error must be "raise" or "tell", got {on_error!r}', param="on_error")
        if (options.get("n") or 1) != 1:
            raise InvalidRequestError("a conversation with tools goes on with one answer: n must be 1", param="n")
        self._tools = _functions(options, tasks=tasks)
        self.messages: list[ChatTurn] = list(messages)
        self._options = options
        self._left = max_rounds
        self._tell = on_error == "tell"
        self._answers: list[Completion] = []
        self._results: list[ToolResult] = []

    @property
    def options(self) -> Options:
        """Of the next request. A call is forced in the first round only; later ones have ids of their own."""
        options = cast(Options, {**self._options, "tools": list(self._tools.values())})
        if self._answers:
            if options.get("tool_choice") not in (None, "none"):
                options["tool_choice"] = "auto"
            if (name := options.get("request_id")) is not None:
                options["request_id"] = f"{name}-{len(self._answers) + 1}"
        return options

    def take(self, answer: Completion) -> list[_Prepared]:
        """The calls that the answer asks for; [] if it is the last one.

        Raises IncompleteAnswerError if it ends in a call, or before the one that was asked for; ToolRoundsError; with
        "raise" UnknownToolError and ToolArgumentsError.
        """
        self._answers.append(answer)
        self.messages.append(answer.message)
        forced = len(self._answers) == 1 and self._options.get("tool_choice") not in (None, "none", "auto")
        if not answer.tool_calls and not forced:
            return []
        if answer.choices[0].finish_reason != "tool_calls":
            where = "in a call" if answer.tool_calls else "before the call that was asked for"
            message = f"{answer.choices[0].finish_reason!r} ended the answer {where}: raise max_tokens, or stop later"
            raise IncompleteAnswerError(message, text=answer.text)
        if len(self._answers) == self._left:
            message = f"the model still calls functions after {self._left} rounds: raise max_rounds"
            raise ToolRoundsError(message, messages=self.messages)
        return [self._prepared(call) for call in answer.tool_calls]

    def _prepared(self, call: ToolCall) -> _Prepared:
        tool = self._tools.get(call.name)
        try:
            if tool is None:
                known = ", ".join(self._tools)
                raise UnknownToolError(f"there is no function {call.name!r}, only {known}", call=call)
            return _Prepared(call, tool, tool.arguments_of(call))
        except ToolError as error:
            error.messages = list(self.messages)
            if not self._tell:
                raise
            return _Prepared(call, error=error)

    def ended(self, call: _Prepared, value: Any, error: Exception | None = None) -> ToolResult:
        """The result of a call that returned a value or raised. With "raise", raises ToolFailedError."""
        if error is None:
            try:
                return ToolResult(call.call, result_text(value), value)
            except (TypeError, ValueError, RecursionError) as wrong:
                error = wrong
        if not isinstance(error, ToolError):
            message = f"{call.call.name}({call.call.arguments}) raised {type(error).__name__}: {error}"
            failed: ToolError = ToolFailedError(message, call=call.call, messages=self.messages)
            failed.__cause__ = error
            error = failed
        if not self._tell:
            raise error
        return ToolResult(call.call, f"error: {error.message}", error=error)

    def give(self, results: Sequence[ToolResult]) -> None:
        """The results of all calls, in their order."""
        self._results += results
        self.messages += [result.message for result in results]

    def result(self) -> ToolRun:
        usages = [answer.usage for answer in self._answers]
        usage = Usage(
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
            _sum(usage.reasoning_tokens for usage in usages),
            _sum(usage.cached_tokens for usage in usages),
        )
        return ToolRun(self._answers[-1], tuple(self.messages), tuple(self._results), len(self._answers), usage)


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum of those that are known; None if none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _functions(options: Options, *, tasks: bool) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for tool in tools_of(options.get("tools") or ()):
        if not isinstance(tool, Tool):
            message = "the loop calls functions: give functions or Tools, not dicts"
            raise InvalidRequestError(message, param="tools")
        if tool.name in tools:
            raise InvalidRequestError(f"two tools are called {tool.name!r}", param="tools")
        if not tasks and _is_async(tool.function):
            raise InvalidRequestError(f"{tool.name} is a coroutine function: use AsyncClient", param="tools")
        tools[tool.name] = tool
    if not tools:
        raise InvalidRequestError("the loop needs at least one function", param="tools")
    return tools


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# ---- blocking


def _call(loop: ToolLoop, prepared: _Prepared) -> ToolResult:
    if prepared.tool is None:
        return loop.ended(prepared, None, prepared.error)
    try:
        value = prepared.tool.function(**prepared.arguments)
    except Exception as error:
        return loop.ended(prepared, None, error)
    return loop.ended(prepared, value)


def run_tools(loop: ToolLoop, ask: Callable[..., Completion]) -> ToolRun:
    """`ask` sends a conversation with options. Calls of one answer are made one after the other."""
    while calls := loop.take(ask(loop.messages, **loop.options)):
        loop.give([_call(loop, call) for call in calls])
    return loop.result()


class ToolStream(Iterator[Chunk | ToolResult]):
    """The chunks of all answers of a conversation with tools, and the result of each call once it is there.

    Leaving early, by `close()`, the end of a `with` block or dropping the last reference, cancels the open request.
    """

    def __init__(self, loop: ToolLoop, send: Callable[..., Any]) -> None:
        self._loop = loop
        self._events = self._read(send)

    def _read(self, send: Callable[..., Any]) -> Iterator[Chunk | ToolResult]:
        while True:
            with send(self._loop.messages, **self._loop.options) as stream:
                yield from stream
                calls = self._loop.take(stream.completion())
            if not calls:
                return
            results = []
            for call in calls:
                results.append(_call(self._loop, call))
                yield results[-1]
            self._loop.give(results)

    def run(self) -> ToolRun:
        """Read the rest, and return the whole conversation. Raises the errors of reading."""
        for _ in self:
            pass
        return self._loop.result()

    def __next__(self) -> Chunk | ToolResult:
        return next(self._events)

    def close(self) -> None:
        """Cancel the open request."""
        cast(Any, self._events).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---- asyncio


async def _call_async(loop: ToolLoop, prepared: _Prepared) -> ToolResult:
    """A function that is no coroutine function runs in a thread."""
    if prepared.tool is None:
        return loop.ended(prepared, None, prepared.error)
    function = functools.partial(prepared.tool.function, **prepared.arguments)
    try:
        value = function() if _is_async(function) else await asyncio.to_thread(function)
        if inspect.isawaitable(value):
            value = await value
    except Exception as error:
        return loop.ended(prepared, None, error)
    return loop.ended(prepared, value)


async def _results(loop: ToolLoop, calls: Sequence[_Prepared]) -> list[ToolResult]:
    """The calls of one answer are made at the same time. If one raises, the others end first."""
    found = await asyncio.gather(*(_call_async(loop, call) for call in calls), return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return cast(list[ToolResult], found)


async def run_tools_async(loop: ToolLoop, ask: Callable[..., Awaitable[Completion]]) -> ToolRun:
    """As `run_tools`; calls of one answer are made at the same time."""
    while calls := loop.take(await ask(loop.messages, **loop.options)):
        loop.give(await _results(loop, calls))
    return loop.result()


class AsyncToolStream(AsyncIterator[Chunk | ToolResult]):
    """As `ToolStream`, for asyncio. The results of one answer's calls come together."""

    def __init__(self, loop: ToolLoop, send: Callable[..., Any]) -> None:
        self._loop = loop
        self._events = self._read(send)

    async def _read(self, send: Callable[..., Any]) -> AsyncIterator[Chunk | ToolResult]:
        while True:
            async with send(self._loop.messages, **self._loop.options) as stream:
                async for chunk in stream:
                    yield chunk
                calls = self._loop.take(await stream.completion())
            if not calls:
                return
            results = await _results(self._loop, calls)
            for result in results:
                yield result
            self._loop.give(results)

    async def run(self) -> ToolRun:
        """Read the rest, and return the whole conversation. Raises the errors of reading."""
        async for _ in self:
            pass
        return self._loop.result()

    async def __anext__(self) -> Chunk | ToolResult:
        return await anext(self._events)

    async def close(self) -> None:
        """Cancel the open request."""
        await cast(Any, self._events).aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
