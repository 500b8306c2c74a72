"""The gateway's link to the scheduler, at the address in the supervisor's view."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from alignedserve.control.convert import failure_from_proto, key_to_proto, keys_from_proto, keys_to_proto
from alignedserve.control.link import DuplexLink
from alignedserve.control.rpc import TokenChannel, one_answer, open_channel
from alignedserve.errors import UnavailableError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.proto import scheduler_pb2_grpc as sc_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.request import RequestKey

logger = logging.getLogger(__name__)

_CONFIRM_S = 0.5
TELLS_WITHIN_S = 1.0


class SchedulerLink:
    """The stream to the cluster's scheduler, at the address in the view. Implements `SchedulerPort`.

    A stream that was opened may still fail to connect. So the link counts as up from the scheduler's first message (it
    answers `hello` with its capacity), or after _CONFIRM_S without a failure.
    """

    def __init__(self, process: pb.ProcessKey, token: str, ledger: Ledger, intake: Intake, model: ServedModel) -> None:
        """Set `address`, of the gateway's own gRPC server, before the first `follow`."""
        self.gateway_id: str = process.id
        self.address = ""
        self.up = False
        self._process = process
        self._token = token
        self._ledger = ledger
        self._intake = intake
        self._model = model
        self._target: tuple[str, int] | None = None  # address and incarnation of the scheduler
        self._channel: TokenChannel | None = None
        self._link: DuplexLink[sc.GatewayMessage, sc.SchedulerMessage] | None = None
        self._down_since_s = time.monotonic()
        self._confirm: asyncio.TimerHandle | None = None

    @property
    def down_for_s(self) -> float:
        """Seconds since the link was last up, or since it was created; 0 while it is up."""
        return 0.0 if self.up else time.monotonic() - self._down_since_s

    @property
    def trouble(self) -> str:
        """Why the link is down; "" while it is up."""
        if self.up:
            return ""
        if self._target is None or self._link is None:
            return "the supervisor has not named a scheduler"
        return f"the last scheduler, at {self._target[0]}, is unreachable: {self._link.broken_by or 'no answer yet'}"

    async def follow_view(self, view: sv.ClusterView) -> None:
        """Connects to the scheduler in the view, if there is one."""
        for peer in view.peers:
            if peer.process.role == "scheduler" and peer.address and peer.state not in ("failed", "lost"):
                await self.follow(peer.address, peer.process.incarnation)

    async def follow(self, address: str, incarnation: int) -> None:
        """Connects to the scheduler at `address`, and disconnects from the previous scheduler."""
        if self._target == (address, incarnation):
            return
        await self.close()
        logger.info("the scheduler is at %s", address)
        self._target = (address, incarnation)
        self._channel = open_channel(address, self._token)
        stub = sc_grpc.SchedulerStub(self._channel)
        self._link = DuplexLink(stub.Link, self._on_message, self._first_messages, on_down=self._on_down)
        self._link.start()

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
        if self._channel is not None:
            await self._channel.close()
        self._link = self._channel = self._target = None
        self._on_down()

    def submit(self, requests: Sequence[pb.RequestHead], specs: bytes) -> bool:
        return self.up and self._send(submit=sc.Submission(requests=requests, specs=specs))

    def cancel(self, keys: Sequence[RequestKey]) -> bool:
        return self.up and self._send(cancel=keys_to_proto(keys))

    def ask(self, keys: Sequence[RequestKey]) -> bool:
        return self.up and self._send(open=keys_to_proto(keys))

    async def told(self, request_ids: Sequence[str]) -> dict[str, Any]:
        """What the scheduler knows of requests, by id: alignedserve.scheduler.process.telling.stays_json.

        Empty if there is no scheduler.
        """
        if self._channel is None:
            return {}
        query = sc.StaysQuery(request_ids=request_ids)
        try:
            found = await one_answer(sc_grpc.SchedulerStub(self._channel).Stays(query, timeout=TELLS_WITHIN_S))
        except UnavailableError as error:
            logger.debug("the scheduler does not tell of requests: %s", error.message)
            return {}
        told: dict[str, Any] = orjson.loads(found.json)
        return told

    def _send(self, **body: Any) -> bool:
        return self._link is not None and self._link.send(sc.GatewayMessage(**body))

    def _first_messages(self) -> Iterable[sc.GatewayMessage]:
        running = [key_to_proto(key) for key in self._ledger.on_link_up()]
        hello = sc.GatewayHello(process=self._process, address=self.address, running=running)
        self._confirm = asyncio.get_running_loop().call_later(_CONFIRM_S, self._on_up)
        return (sc.GatewayMessage(hello=hello),)

    def _on_up(self) -> None:
        self._stop_confirming()
        if not self.up:
            self.up = True
            self._ledger.resubmit()

    def _on_down(self) -> None:
        self._stop_confirming()
        self._intake.forget()
        if self.up:
            self.up = False
            self._down_since_s = time.monotonic()

    def _stop_confirming(self) -> None:
        if self._confirm is not None:
            self._confirm.cancel()
            self._confirm = None

    def _on_message(self, message: sc.SchedulerMessage) -> None:
        self._on_up()
        kind = message.WhichOneof("body")
        if kind == "rejected":
            rejected = message.rejected
            error = failure_from_proto(rejected.failure)
            self._ledger.on_rejected(keys_from_proto(pb.RequestKeys(keys=rejected.keys)), error)
        elif kind == "lost":
            self._ledger.on_lost(keys_from_proto(pb.RequestKeys(keys=message.lost.keys)), message.lost.reason)
        elif kind == "unknown":
            self._ledger.on_unknown(keys_from_proto(message.unknown))
        elif kind == "whose":
            self._send(claim=keys_to_proto(self._ledger.open_among(keys_from_proto(message.whose))))
        elif kind == "capacity":
            if message.capacity.max_request_tokens:  # 0: a scheduler that has just started does not know it yet
                self._model.capacity_tokens = message.capacity.max_request_tokens
        elif kind == "intake":
            intake = message.intake
            self._intake.tell(intake.requests, intake.again_s, limited=intake.limited)
