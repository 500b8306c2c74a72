"""Gives workers the prompts of requests that the scheduler assigned to them (ADR 51)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from alignedserve.control.convert import keys_from_proto, spec_to_proto
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc

_MOST_BYTES = 4 << 20  # in a message to a worker, not counting the last request in it


class SpecSource(gw_grpc.SpecSourceServicer):
    """Returns the specifications of the requested requests that are open in the given epoch."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def ReadSpecs(
        self, request: pb.RequestKeys, context: grpc.aio.ServicerContext[pb.RequestKeys, gw.RequestSpecs]
    ) -> AsyncIterator[gw.RequestSpecs]:
        message, size = gw.RequestSpecs(), 0
        for spec in map(spec_to_proto, self._ledger.specs(keys_from_proto(request))):
            message.requests.append(spec)
            size += spec.ByteSize()
            if size > _MOST_BYTES:
                yield message
                message, size = gw.RequestSpecs(), 0
        yield message
