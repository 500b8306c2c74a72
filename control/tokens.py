"""Sends a worker's token events to the gateways that own the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from alignedserve.cancellation import task_is_cancelled
from alignedserve.control.link import Outbox
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc

logger = logging.getLogger(__name__)


class TokenEmitter:
    """Sends token events, with one message to each gateway for each iteration. Use it from one event loop.

    If a gateway cannot be reached, its events are dropped and `on_gateway_lost(address)` is called: its requests cannot
    continue without these tokens.
    """

    def __init__(self, process: pb.ProcessKey, token: str, on_gateway_lost: Callable[[str], None]) -> None:
        self._process = process
        self._token = token
        self._on_gateway_lost = on_gateway_lost
        self._streams: dict[str, tuple[TokenChannel, Outbox[gw.TokenBatch], asyncio.Task[None]]] = {}
        self._told = ""  # the gateway whose loss was logged last, to log it only once

    def emit(self, events: Iterable[tuple[str, gw.TokenEvent]]) -> None:
        """Queues `(gateway_address, event)` pairs."""
        batches: dict[str, gw.TokenBatch] = {}
        for address, event in events:
            batch = batches.get(address)
            if batch is None:
                batch = batches[address] = gw.TokenBatch(sender=self._process)
            batch.events.append(event)
        for address, batch in batches.items():
            self._outbox(address).put(batch)

    def _outbox(self, address: str) -> Outbox[gw.TokenBatch]:
        if address not in self._streams:
            channel, outbox = open_channel(address, self._token), Outbox[gw.TokenBatch]()
            task = asyncio.get_running_loop().create_task(self._push(address, channel, outbox))
            self._streams[address] = (channel, outbox, task)
        return self._streams[address][1]

    async def _push(self, address: str, channel: TokenChannel, outbox: Outbox[gw.TokenBatch]) -> None:
        try:
            await gw_grpc.TokenSinkStub(channel).Push(aiter(outbox))
        except (Exception, asyncio.CancelledError) as error:  # gRPC cancels a call whose outbox overflows
            if isinstance(error, asyncio.CancelledError) and task_is_cancelled():
                raise
            # Whatever the error, the gateway no longer serves these requests.
            level = logging.DEBUG if address == self._told else logging.WARNING
            logger.log(level, "gateway %s cannot be reached: %s", address, error.__class__.__name__)
            self._told = address
        finally:
            self._streams.pop(address, None)
        self._on_gateway_lost(address)
        await channel.close()

    async def close(self) -> None:
        streams = list(self._streams.values())
        for _, outbox, _ in streams:
            outbox.close()
        tasks = [task for _, _, task in streams]
        if tasks:
            await asyncio.wait(tasks, timeout=0.5)
        for channel, _, task in streams:
            task.cancel()
            await channel.close()
