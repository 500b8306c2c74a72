"""Receives the token events of all workers, on one stream for each worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc


class TokenSink(gw_grpc.TokenSinkServicer):
    """Passes every worker's token events to the ledger, in the gateway's event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._incarnations: dict[tuple[str, str], int] = {}  # the newest incarnation of each worker, by role and id

    async def Push(
        self, request_iterator: AsyncIterator[gw.TokenBatch], context: grpc.aio.ServicerContext[gw.TokenBatch, pb.Empty]
    ) -> pb.Empty:
        sender: pb.ProcessKey | None = None
        try:
            async for batch in request_iterator:
                if sender is None:
                    sender = batch.sender
                    name = (sender.role, sender.id)
                    self._incarnations[name] = max(sender.incarnation, self._incarnations.get(name, 0))
                if batch.sender.incarnation < self._incarnations.get((batch.sender.role, batch.sender.id), 0):
                    continue  # its successor is already connected
                self._ledger.on_tokens(batch)
        finally:
            if sender is not None:
                self._ledger.on_worker_gone(sender.role, sender.id)
        return pb.Empty()
