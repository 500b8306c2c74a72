"""Copies that decode instances ask this prefill instance to take part in: a stream each, a session a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from alignedserve.config import Config
from alignedserve.control.link import Outbox, first_message, serve_stream
from alignedserve.control.runtime import RoleSettings
from alignedserve.errors import AlignedServeError
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.proto import paired_copies_pb2_grpc as pc_grpc
from alignedserve.transfer.block_store import BlockStore
from alignedserve.transfer.pair_choice import PAIRED
from alignedserve.transfer.paired.server import PairServer
from alignedserve.transfer.paired.transport import PREFILL_RANK, Wiring

logger = logging.getLogger(__name__)


class PairedCopiesService(pc_grpc.PairedCopiesServicer):
    """Before a session opens, what its decode instance asked for in an earlier one has ended."""

    def __init__(
        self,
        settings: RoleSettings,
        config: Config,
        process: pb.ProcessKey,
        stores: Callable[[], Mapping[str, BlockStore]],
    ) -> None:
        """`stores` are what may be copied from and to; empty while the instance starts."""
        self._settings, self._process, self._stores = settings, process, stores
        self._timeout_s = config.kv_pool.copy_timeout_s
        named = config.cluster.channel in PAIRED and not config.cluster.allow_slow_channel
        self._channels = (config.cluster.channel,) if named else PAIRED
        self._sessions: dict[str, PairServer] = {}
        self._closing: set[asyncio.Task[bool]] = set()

    async def Pair(
        self, request_iterator: AsyncIterator[pc.PairCommand], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pc.PairEvent]:
        hello: pc.PairHello = await first_message(request_iterator, "hello", context)
        stores = self._stores()
        if not stores:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._settings.id} has no buffers")
        earlier = self._sessions.get(hello.process.id)
        if earlier is not None and not await asyncio.to_thread(earlier.close):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a copy of an earlier session has not ended yet")
        loop, outbox = asyncio.get_running_loop(), Outbox[pc.PairEvent]()

        def send(event: pc.PairEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: this process is ending
                loop.call_soon_threadsafe(outbox.put, event)

        def break_off() -> None:
            with contextlib.suppress(RuntimeError):  # as in send
                loop.call_soon_threadsafe(outbox.close)

        try:
            session = PairServer(hello, stores, self._wiring(hello), send, break_off)
        except AlignedServeError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        self._sessions[hello.process.id] = session
        session.start(self._process)
        try:
            async for event in serve_stream(request_iterator, outbox, session.on_command):
                yield event
        finally:
            self._close_soon(session)

    def _wiring(self, hello: pc.PairHello) -> Wiring:
        channel = hello.channel if hello.channel in self._channels else self._channels[0]
        settings = self._settings
        return Wiring.between_workers(channel, PREFILL_RANK, settings.host, settings.device, self._timeout_s)

    def _close_soon(self, session: PairServer) -> None:
        """It stays known until another follows, which waits for its end."""
        closing = asyncio.get_running_loop().create_task(asyncio.to_thread(session.close))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Returns when no copy runs any more, or one hangs."""
        for session in self._sessions.values():
            self._close_soon(session)
        if self._closing:
            await asyncio.wait(self._closing)
