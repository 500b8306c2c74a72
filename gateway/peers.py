"""The other gateways: a client may cancel a call through any gateway, which asks the others for it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from alignedserve.control.rpc import TokenChannel, one_answer, open_channel
from alignedserve.errors import UnavailableError
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

ANSWER_WITHIN_S = 1.0


class GatewayPeers:
    """Asks all gateways that the supervisor knows, in parallel. No answer within ANSWER_WITHIN_S means not found."""

    def __init__(self, own_id: str, token: str) -> None:
        self._own_id = own_id
        self._token = token
        self._channels: dict[str, TokenChannel] = {}  # by address

    async def follow(self, view: sv.ClusterView) -> None:
        """Opens channels to the view's other gateways, and closes those to gateways that it no longer has."""
        addresses = {
            peer.address
            for peer in view.peers
            if peer.process.role == "gateway" and peer.process.id != self._own_id and peer.address
        }
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close()
        for address in addresses - self._channels.keys():
            self._channels[address] = open_channel(address, self._token)

    async def cancel(self, call_id: str, owner: bytes | None) -> bool:
        """Cancels a call at the other gateways; whether a gateway had it. `owner`: as in `Ledger.cancel_call`."""
        asked = gw.CallId(call_id=call_id, owner=owner or b"", whosever=owner is None)
        found = await asyncio.gather(*(self._cancel_at(channel, asked) for channel in self._channels.values()))
        return any(found)

    async def close(self) -> None:
        while self._channels:
            await self._channels.popitem()[1].close()

    async def _cancel_at(self, channel: TokenChannel, asked: gw.CallId) -> bool:
        try:
            answer = await one_answer(gw_grpc.GatewayPeerStub(channel).CancelCall(asked, timeout=ANSWER_WITHIN_S))
        except UnavailableError as error:
            logger.debug("another gateway cannot be reached: %s", error.message)
            return False
        return bool(answer.found)


class PeerService(gw_grpc.GatewayPeerServicer):
    """Answers the other gateways."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def CancelCall(self, request: gw.CallId, context: grpc.aio.ServicerContext[Any, Any]) -> gw.CallFound:
        owner = None if request.whosever else request.owner
        return gw.CallFound(found=self._ledger.cancel_call(request.call_id, owner))
