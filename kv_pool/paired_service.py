"""Serves paired copies, in which this process takes part: one stream, and one session, for each worker that asks.

Prefill instances offer this service for their candidate buffers, and a shard's process for reads from other nodes.
Torch is imported when the first stream is expected or opens, so a shard that no other node reads does not need it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from alignedserve.control.link import Outbox, first_message, from_any_thread, serve_stream
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.proto import paired_copies_pb2_grpc as pc_grpc
from alignedserve.transfer.block_store import BlockStore

if TYPE_CHECKING:
    from alignedserve.transfer.paired.server import PairServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Session:
    process: pb.ProcessKey
    server: PairServer
    outbox: Outbox[pc.PairEvent]


class PairedCopiesService(pc_grpc.PairedCopiesServicer):
    """Opens a session only after the copies of the worker's earlier session have ended. For one event loop."""

    def __init__(
        self,
        settings: RoleSettings,
        process: pb.ProcessKey,
        stores: Callable[[], Mapping[str, BlockStore]],
        channels: Sequence[str],
        copy_timeout_s: float,
        *,
        writable: bool,
    ) -> None:
        """`stores` may be copied from and, if `writable`, to. The mapping is empty while the process starts.

        `channels`: the channels that a worker may ask for; the first is the default.
        """
        self._settings, self._process, self._stores = settings, process, stores
        self._channels, self._timeout_s, self._writable = channels, copy_timeout_s, writable
        self._over: Callable[[pb.ProcessKey], bool] = lambda process: False
        self._sessions: dict[str, _Session] = {}
        self._closing: set[asyncio.Task[bool]] = set()
        self._importing: asyncio.Task[None] | None = None

    def expect(self) -> None:
        """Workers may open sessions soon: import the server's modules in the background."""
        if self._importing is None:
            self._importing = asyncio.get_running_loop().create_task(asyncio.to_thread(_import_server))

    def refuse(self, over: Callable[[pb.ProcessKey], bool]) -> None:
        """End the sessions of workers for which `over` returns True, and refuse new ones.

        `over` returns True for processes that have ended or are being fenced.
        """
        self._over = over
        for session in self._sessions.values():
            if over(session.process):
                session.outbox.close()

    async def Pair(
        self, request_iterator: AsyncIterator[pc.PairCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pc.PairEvent]:
        hello: pc.PairHello = await first_message(request_iterator, "hello", context)
        self.expect()
        assert self._importing is not None
        try:
            await asyncio.shield(self._importing)
        except ImportError as error:
            why = f"{self._settings.id} cannot take part in copies: {error}; install torch on its node"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        await self._end_earlier(hello.process, context)
        outbox = Outbox[pc.PairEvent]()
        try:
            server = self._serve(hello, outbox)
        except AlignedServeError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        self._sessions[hello.process.id] = _Session(hello.process, server, outbox)
        server.start(self._process)
        try:
            async for event in serve_stream(request_iterator, outbox, server.on_command):
                yield event
        finally:
            self._close_soon(server)

    async def _end_earlier(self, process: pb.ProcessKey, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """End the earlier session of `process`. Aborts the call if `process` cannot have a session (yet)."""
        if not self._stores():
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._settings.id} has no stores yet")
        earlier = self._sessions.get(process.id)
        if self._over(process) or (earlier is not None and earlier.process.incarnation > process.incarnation):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this {process.id} was declared dead")
        if earlier is not None and not await asyncio.to_thread(earlier.server.close):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a copy of an earlier session has not ended yet")

    def _serve(self, hello: pc.PairHello, outbox: Outbox[pc.PairEvent]) -> PairServer:
        """Raises GeometryMismatchError and ConfigError, as PairServer does."""
        from alignedserve.transfer.paired.server import PairServer
        from alignedserve.transfer.paired.transport import SERVING_RANK, Wiring

        channel = hello.channel if hello.channel in self._channels else self._channels[0]
        settings = self._settings
        wiring = Wiring.between_workers(channel, SERVING_RANK, settings.host, settings.devices[0], self._timeout_s)
        send, break_off = from_any_thread(outbox.put), from_any_thread(outbox.close)
        return PairServer(hello, self._stores(), wiring, send, break_off, writable=self._writable)

    def _close_soon(self, server: PairServer) -> None:
        """Close `server` in the background. Its session stays listed: the worker's next one waits for its end."""
        closing = asyncio.get_running_loop().create_task(asyncio.to_thread(server.close))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Return when no copy runs any more, or when waiting for a hanging copy has timed out."""
        if self._importing is not None:
            await asyncio.wait([self._importing])
        for session in self._sessions.values():
            self._close_soon(session.server)
        if self._closing:
            await asyncio.wait(self._closing)


def _import_server() -> None:
    """Runs in a thread, because importing torch takes seconds."""
    import alignedserve.transfer.paired.gloo
    import alignedserve.transfer.paired.server  # noqa: F401
