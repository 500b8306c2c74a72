"""A worker's streams to the gateways: a gateway that does not read is treated as lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alignedserve.control.rpc import RpcServer
from alignedserve.control.tokens import TokenEmitter
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc


class Unread(gw_grpc.TokenSinkServicer):
    """Takes nothing out of its streams."""

    async def Push(self, request_iterator: Any, context: Any) -> pb.Empty:
        await asyncio.Event().wait()
        return pb.Empty()


async def test_a_gateway_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.control.link.MOST_UNREAD", 2)
    server = RpcServer("secret")
    server.add(gw_grpc.add_TokenSinkServicer_to_server, Unread())
    address = await server.start()
    lost: asyncio.Queue[str] = asyncio.Queue()
    emitter = TokenEmitter(pb.ProcessKey(role="decode", id="decode-0"), "secret", lost.put_nowait)
    event = gw.TokenEvent(token_ids=[100_000] * 500_000)  # more than the windows of HTTP/2 hold
    try:
        async with asyncio.timeout(20.0):
            while lost.empty():
                emitter.emit([(address, event)])
                await asyncio.sleep(0)
        assert lost.get_nowait() == address
    finally:
        await emitter.close()
        await server.stop(0.0)
