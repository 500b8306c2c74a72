"""The client's stream for paired copies. It is opened again when it or a connection of its copies breaks."""

from __future__ import annotations

import asyncio
import logging

from alignedserve.cancellation import end_tasks
from alignedserve.control.link import DuplexLink, from_any_thread
from alignedserve.control.rpc import TokenChannel
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.proto import paired_copies_pb2_grpc as pc_grpc
from alignedserve.transfer.paired.client import PairClient

logger = logging.getLogger(__name__)

RETRY_S = 0.1


class PairedLink:
    """Runs sessions of `client` with the process behind `channel`, one by one. Copies wait for the next session."""

    def __init__(self, client: PairClient, channel: TokenChannel) -> None:
        """Begin to connect. Must be called in the event loop."""
        self._client = client
        self._stub = pc_grpc.PairedCopiesStub(channel)
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End the session. Another link may begin the client's next one. Idempotent."""
        await end_tasks([self._running])

    async def _run(self) -> None:
        while True:
            await self._one_session()
            await asyncio.sleep(RETRY_S)

    async def _one_session(self) -> None:
        client, useless = self._client, asyncio.Event()
        link: DuplexLink[pc.PairCommand, pc.PairEvent] = DuplexLink(
            self._stub.Pair, client.on_event, lambda: [client.hello()], reconnect=False
        )
        client.begin(from_any_thread(link.send), from_any_thread(useless.set))
        stream, waiting = link.start(), asyncio.get_running_loop().create_task(useless.wait())
        try:
            await asyncio.wait([stream, waiting], return_when=asyncio.FIRST_COMPLETED)
            if link.refusal:
                logger.error("%s refuses to take part in copies: %s", client.peer, link.refusal)
        finally:
            waiting.cancel()
            await link.close()
            await asyncio.to_thread(client.broke, link.refusal or "the stream to it ended")
