"""Both ends of a long-lived bidirectional stream: a client that reconnects, and a server's outbox."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

import grpc

from alignedserve.cancellation import end_tasks, task_is_cancelled
from alignedserve.errors import AlignedServeError, UnavailableError

Out = TypeVar("Out")
In = TypeVar("In")

logger = logging.getLogger(__name__)


MOST_UNREAD = 65536  # messages: a peer that lets so many pile up does not read at all


class Outbox(Generic[Out]):
    """Messages for one stream, in order. `put` never blocks; iterating ends after `close`.

    With `most` messages unread nothing more is kept, and iterating raises UnavailableError: the stream breaks, and the
    next one begins with what both sides bring each other up to date by.
    """

    def __init__(self, most: int | None = None) -> None:
        self._queue: asyncio.Queue[Out | None] = asyncio.Queue()
        self._most = MOST_UNREAD if most is None else most
        self._overflown = False

    def put(self, message: Out) -> None:
        if self._queue.qsize() < self._most:
            self._queue.put_nowait(message)
        else:
            self._overflown = True

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Out]:
        while (message := await self._queue.get()) is not None:
            if self._overflown:
                raise UnavailableError(f"the peer has left {self._most} messages unread")
            yield message


class DuplexLink(Generic[Out, In]):
    """A client's end of a bidirectional stream that is opened again whenever it breaks.

    On each (re)connection the messages of `first_messages` go out before any other. What was queued when a stream
    broke is dropped: both sides bring each other up to date by their first messages, so nothing stale is replayed.
    `send` while the link is down queues nothing and returns False.
    """

    def __init__(
        self,
        open_call: Callable[[], Any],
        on_message: Callable[[In], Awaitable[None] | None],
        first_messages: Callable[[], Iterable[Out]] = tuple,
        *,
        on_down: Callable[[], Awaitable[None] | None] | None = None,
        reconnect: bool = True,
        retry_s: float = 0.1,
    ) -> None:
        self._open_call = open_call
        self._on_message = on_message
        self._first_messages = first_messages
        self._on_down = on_down
        self._reconnect = reconnect
        self._retry_s = retry_s
        self._outbox: Outbox[Out] | None = None
        self._task: asyncio.Task[None] | None = None
        self._call: Any = None
        self._broken_off = ""
        self.broken_by = ""
        """What the last stream broke by: gRPC's status and its details."""
        self.refusal = ""
        """Why the peer will have nothing to do with this process, as it said last; trying again does not help."""

    @property
    def up(self) -> bool:
        return self._outbox is not None

    def send(self, message: Out) -> bool:
        """Queue a message for the open stream; False, and nothing happens, while there is none."""
        if self._outbox is None:
            return False
        self._outbox.put(message)
        return True

    def start(self) -> asyncio.Task[None]:
        """Run in a task of the current loop, until `close` (or the first break, with `reconnect=False`)."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self.run())
        return self._task

    async def run(self) -> None:
        while True:
            await self._one_stream()
            # gRPC keeps a cancel to itself that comes while it connects: where that then fails, nothing is raised here.
            if task_is_cancelled():
                raise asyncio.CancelledError
            if not self._reconnect:
                return
            await asyncio.sleep(self._retry_s)

    async def _one_stream(self) -> None:
        outbox: Outbox[Out] = Outbox()
        try:
            call = self._call = self._open_call()
        except Exception:  # whatever it was, the link must come back
            logger.exception("a stream cannot be opened")
            return
        writer = asyncio.get_running_loop().create_task(_drain(call, outbox))
        try:
            for message in self._first_messages():
                outbox.put(message)
            self._outbox = outbox
            async for message in call:
                self.refusal = ""
                try:
                    await settle(self._on_message(message))
                except Exception:  # one message that cannot be handled must not end the link
                    logger.exception("a message could not be handled")
        except grpc.aio.AioRpcError as error:
            code = error.code()
            self.broken_by = f"{code.name}: {error.details()}"
            if code is grpc.StatusCode.FAILED_PRECONDITION:
                self.refusal = error.details() or code.name
            quiet = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            logger.log(logging.DEBUG if quiet else logging.WARNING, "stream broke: %s", self.broken_by)
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            why = self._broken_off or "a peer did not read what was sent to it"
            logger.warning("%s: its stream is opened anew", why)  # gRPC's own cancel
        except Exception:  # whatever it was, the link must come back
            logger.exception("a stream ended with an error of our own")
        finally:
            self._outbox = self._call = None
            self._broken_off = ""
            writer.cancel()
            call.cancel()
            try:
                await asyncio.wait([writer])  # to await it would take its cancellation for one of ours, or ours for its
            finally:
                await self._tell_down()

    def break_off(self, reason: str) -> None:
        """End the stream that is open now, as if it had broken."""
        if self._call is not None:
            self._broken_off = reason
            self._call.cancel()

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])
            self._task = None

    async def _tell_down(self) -> None:
        if self._on_down is not None:
            try:
                await settle(self._on_down())
            except Exception:  # whatever it was, the link must come back
                logger.exception("the end of a stream could not be handled")


async def _drain(call: Any, outbox: Outbox[Any]) -> None:
    try:
        async for message in outbox:
            await call.write(message)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the reading side sees the same break and says so
    except UnavailableError as error:
        logger.warning("a stream is broken off: %s", error)
        call.cancel()


async def settle(value: Awaitable[None] | None) -> None:
    """Await a callback's result where it is awaitable."""
    if inspect.isawaitable(value):
        await value


def from_any_thread(call: Callable[..., object]) -> Callable[..., None]:
    """What any thread may call to have `call` called on the current loop; once that has closed, nothing happens."""
    loop = asyncio.get_running_loop()

    def soon(*arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: this process is ending
            loop.call_soon_threadsafe(call, *arguments)

    return soon


async def first_message(requests: AsyncIterator[Any], kind: str, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The `kind` that a stream begins with. One that begins with anything else, or ends before, is refused."""
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("body") != kind:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be {kind}")
    return getattr(first, kind)


async def serve_stream(
    requests: AsyncIterator[In], outbox: Outbox[Out], on_message: Callable[[In], Awaitable[None] | None]
) -> AsyncIterator[Out]:
    """A server's end: yields the outbox while a task reads; ends when the client does, or the outbox is closed."""

    async def read() -> None:
        try:
            async for message in requests:
                try:
                    await settle(on_message(message))
                except AlignedServeError as error:  # the peer's mistake: it ends nothing but its message
                    logger.warning("refused a message: %s", error)
                except Exception:  # as in DuplexLink
                    logger.exception("a message could not be handled")
        except grpc.aio.AioRpcError:
            logger.debug("a peer's stream broke")
        finally:
            outbox.close()

    reader = asyncio.get_running_loop().create_task(read())
    try:
        async for message in outbox:
            yield message
        if reader.done() and not reader.cancelled() and (error := reader.exception()):
            raise error
    finally:
        reader.cancel()
