"""Both ends of a long-lived bidirectional stream: a client that reconnects, and a server with an outbox."""

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
Peer = TypeVar("Peer")

logger = logging.getLogger(__name__)


MOST_UNREAD = 65536  # messages; a peer with more unread messages is assumed not to read at all


class Outbox(Generic[Out]):
    """Messages for one stream, in order. `put` never blocks; iteration ends after `close`.

    If `most` messages are unread, further messages are dropped and iteration raises UnavailableError. The stream then
    breaks; on the next stream, both sides send each other their state first.
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
    """The client's end of a bidirectional stream that is opened again when it breaks.

    On each connection, the messages of `first_messages` are sent before all others. Messages that were queued when a
    stream broke are dropped: both sides send their state in their first messages, so no old message is replayed.
    `send` returns False, and queues nothing, while the link is down.
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
        """Why the last stream broke: gRPC's status and its details."""
        self.refusal = ""
        """Why the peer last refused this process permanently (FAILED_PRECONDITION); "" if it did not."""

    @property
    def up(self) -> bool:
        return self._outbox is not None

    def send(self, message: Out) -> bool:
        """Queues a message for the open stream. Returns False, and queues nothing, while the link is down."""
        if self._outbox is None:
            return False
        self._outbox.put(message)
        return True

    def start(self) -> asyncio.Task[None]:
        """Runs the link in a task of the current loop until `close` (with `reconnect=False`, until the first break)."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self.run())
        return self._task

    async def run(self) -> None:
        """Opens streams until it is cancelled (with `reconnect=False`, one stream)."""
        while True:
            await self._one_stream()
            # gRPC swallows a cancellation while it connects: if the connection then fails, nothing is raised here.
            if task_is_cancelled():
                raise asyncio.CancelledError
            if not self._reconnect:
                return
            await asyncio.sleep(self._retry_s)

    async def _one_stream(self) -> None:
        outbox: Outbox[Out] = Outbox()
        try:
            call = self._call = self._open_call()
        except Exception:  # whatever the error, the link must reconnect
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
                except Exception:  # a message that cannot be handled must not end the link
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
            why = self._broken_off or "a peer did not read its messages"
            logger.warning("%s; reopening the stream", why)  # the call was cancelled, not this task
        except Exception:  # whatever the error, the link must reconnect
            logger.exception("a stream ended with an internal error")
        finally:
            self._outbox = self._call = None
            self._broken_off = ""
            writer.cancel()
            call.cancel()
            try:
                await asyncio.wait([writer])  # awaiting it would confuse its cancellation with this task's
            finally:
                await self._tell_down()

    def break_off(self, reason: str) -> None:
        """Ends the open stream, as if it had broken. `reason` is logged."""
        if self._call is not None:
            self._broken_off = reason
            self._call.cancel()

    async def close(self) -> None:
        """Ends the stream, and does not open it again."""
        if self._task is not None:
            await end_tasks([self._task])
            self._task = None

    async def _tell_down(self) -> None:
        if self._on_down is not None:
            try:
                await settle(self._on_down())
            except Exception:  # whatever the error, the link must reconnect
                logger.exception("the end of a stream could not be handled")


async def _drain(call: Any, outbox: Outbox[Any]) -> None:
    try:
        async for message in outbox:
            await call.write(message)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the reading side sees the same break and logs it
    except UnavailableError as error:
        logger.warning("breaking off a stream: %s", error)
        call.cancel()


async def settle(value: Awaitable[None] | None) -> None:
    """Awaits a callback's result if it is awaitable."""
    if inspect.isawaitable(value):
        await value


def from_any_thread(call: Callable[..., object]) -> Callable[..., None]:
    """A function that any thread may use to call `call` on the current loop. It does nothing after the loop closed."""
    loop = asyncio.get_running_loop()

    def soon(*arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: this process is ending
            loop.call_soon_threadsafe(call, *arguments)

    return soon


def follow_on(outboxes: dict[Peer, Outbox[Out]], peer: Peer, outbox: Outbox[Out]) -> None:
    """Messages for `peer` go to `outbox` from now on. Its earlier stream ends.

    A process that has stalled may hear of two streams in the wrong order. Its peer then opens its stream anew.
    """
    if (earlier := outboxes.get(peer)) is not None:
        earlier.close()
    outboxes[peer] = outbox


async def first_message(requests: AsyncIterator[Any], kind: str, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The body of a stream's first message. The stream is refused with INVALID_ARGUMENT if it has no first message or
    one of another kind.
    """
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("body") != kind:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be {kind}")
    return getattr(first, kind)


async def serve_stream(
    requests: AsyncIterator[In], outbox: Outbox[Out], on_message: Callable[[In], Awaitable[None] | None]
) -> AsyncIterator[Out]:
    """The server's end of a stream: yields the outbox's messages while a task reads. It ends when the client ends the
    stream or the outbox is closed.
    """

    async def read() -> None:
        try:
            async for message in requests:
                try:
                    await settle(on_message(message))
                except AlignedServeError as error:  # the peer's error: only this message is dropped
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
