"""The other gateways: a client may cancel a call through any gateway, which asks the others for it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import orjson

from alignedserve.control.rpc import TokenChannel, one_answer, open_channel
from alignedserve.errors import UnavailableError
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.live.history import RecentRequests, requests_of
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
        found = await self._ask_all("CancelCall", asked)
        return any(answer.found for answer in found)

    async def requests(self, query: gw.RequestsQuery) -> list[dict[str, Any]]:
        """What the other gateways know of requests (`alignedserve.gateway.live.history`)."""
        found = await self._ask_all("Requests", query)
        return [one for answer in found for one in orjson.loads(answer.json)]

    async def close(self) -> None:
        while self._channels:
            await self._channels.popitem()[1].close()

    async def _ask_all(self, method: str, question: Any) -> list[Any]:
        """The answers of those that answer."""
        found = await asyncio.gather(*(self._ask(channel, method, question) for channel in self._channels.values()))
        return [answer for answer in found if answer is not None]

    async def _ask(self, channel: TokenChannel, method: str, question: Any) -> Any:
        try:
            return await one_answer(
                getattr(gw_grpc.GatewayPeerStub(channel), method)(question, timeout=ANSWER_WITHIN_S)
            )
        except UnavailableError as error:
            logger.debug("another gateway cannot be reached: %s", error.message)
            return None


class PeerService(gw_grpc.GatewayPeerServicer):
    """Answers the other gateways."""

    def __init__(self, ledger: Ledger, recent: RecentRequests) -> None:
        self._ledger, self._recent = ledger, recent

    async def CancelCall(self, request: gw.CallId, context: grpc.aio.ServicerContext[Any, Any]) -> gw.CallFound:
        owner = None if request.whosever else request.owner
        return gw.CallFound(found=self._ledger.cancel_call(request.call_id, owner))

    async def Requests(
        self, request: gw.RequestsQuery, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gw.RequestsFound:
        return gw.RequestsFound(json=orjson.dumps(requests_of(self._ledger, self._recent, request)).decode())
