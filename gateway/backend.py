"""The gateway's side of the cluster: token events in, the link to the scheduler, and the supervisor's view of all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc

from alignedserve.admin import admin_key
from alignedserve.control.convert import failure_from_proto, key_to_proto, keys_from_proto, keys_to_proto, spec_to_proto
from alignedserve.control.link import DuplexLink
from alignedserve.control.role import SERVING_STATES, RoleHost
from alignedserve.control.rpc import RpcServer, TokenChannel, open_channel
from alignedserve.errors import UnavailableError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.ledger.intake import Intake
from alignedserve.gateway.ledger.ledger import Ledger
from alignedserve.gateway.peers import GatewayPeers, PeerService
from alignedserve.gateway.pulse import Work, Works
from alignedserve.gateway.role_service import GatewayRole
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import gateway_pb2 as gw
from alignedserve.proto import gateway_pb2_grpc as gw_grpc
from alignedserve.proto import scheduler_pb2 as sc
from alignedserve.proto import scheduler_pb2_grpc as sc_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc
from alignedserve.request import RequestKey

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
WORKER_TIMEOUT_S = 1.0
INTEGRITY_TIMEOUT_S = 15.0
ORDER_TIMEOUT_S = 10.0
_WORKERS = ("prefill", "decode")
_TICK_S = 1.0
_CONFIRM_S = 0.5
_MOST_TOKENS = 1 << 20  # of a message to a worker, but for the last request in it
_UNHEARD_S = 5.0  # a supervisor that was replaced is found sooner

Locate = Callable[[], Awaitable[str | None]]


class SchedulerLink:
    """The open stream to the cluster's scheduler, wherever the view says it is. Implements `SchedulerPort`.

    A stream that was opened may still fail to connect, so it counts as up from the scheduler's first message on (it
    answers `hello` with its capacity), or after _CONFIRM_S without a failure.
    """

    def __init__(
        self, process: pb.ProcessKey, address: str, token: str, ledger: Ledger, intake: Intake, model: ServedModel
    ) -> None:
        self.gateway_id: str = process.id
        self.address = address
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
        """Seconds since there was a scheduler; 0 while there is one."""
        return 0.0 if self.up else time.monotonic() - self._down_since_s

    @property
    def trouble(self) -> str:
        """Why it is down; "" while it is up."""
        if self.up:
            return ""
        if self._target is None or self._link is None:
            return "the supervisor has named none"
        return (
            f"the last one, at {self._target[0]}, is not reached: {self._link.broken_by or 'it has not answered yet'}"
        )

    async def follow(self, address: str, incarnation: int) -> None:
        """Connect to the scheduler at `address`, leaving the one before."""
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

    def submit(self, requests: Sequence[pb.RequestHead]) -> bool:
        return self.up and self._send(submit=sc.Submission(requests=requests))

    def cancel(self, keys: Sequence[RequestKey]) -> bool:
        return self.up and self._send(cancel=keys_to_proto(keys))

    def ask(self, keys: Sequence[RequestKey]) -> bool:
        return self.up and self._send(open=keys_to_proto(keys))

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
        elif kind == "whose":
            self._send(claim=keys_to_proto(self._ledger.open_among(keys_from_proto(message.whose))))
        elif kind == "capacity":
            if message.capacity.max_request_tokens:  # 0: a scheduler that has just started does not know it yet
                self._model.capacity_tokens = message.capacity.max_request_tokens
        elif kind == "intake":
            intake = message.intake
            self._intake.tell(intake.requests, intake.again_s, limited=intake.limited)


class TokenSink(gw_grpc.TokenSinkServicer):
    """Receives every worker's token events, in the gateway's own event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._incarnations: dict[tuple[str, str], int] = {}

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
                    continue  # its successor is already here
                self._ledger.on_tokens(batch)
        finally:
            if sender is not None:
                self._ledger.on_worker_gone(sender.role, sender.id)
        return pb.Empty()


class SpecSource(gw_grpc.SpecSourceServicer):
    """Gives workers what they are to begin with: prompts stay here until then."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def ReadSpecs(
        self, request: pb.RequestKeys, context: grpc.aio.ServicerContext[pb.RequestKeys, gw.RequestSpecs]
    ) -> AsyncIterator[gw.RequestSpecs]:
        message, tokens = gw.RequestSpecs(), 0
        for spec in self._ledger.specs(keys_from_proto(request)):
            message.requests.append(spec_to_proto(spec))
            tokens += spec.prefix_length
            if tokens > _MOST_TOKENS:
                yield message
                message, tokens = gw.RequestSpecs(), 0
        yield message


class Backend:
    """All that this gateway has open in the cluster: its own gRPC server, its places at supervisor and scheduler.

    `heartbeat` and `on_view` come from the server around it; `locate` finds a supervisor that was restarted.
    """

    def __init__(
        self,
        process: pb.ProcessKey,
        supervisor_address: str,
        token: str,
        ledger: Ledger,
        intake: Intake,
        model: ServedModel,
        *,
        host: str = "127.0.0.1",
        locate: Locate | None = None,
    ) -> None:
        self.process = process
        self.address = ""
        self.view = sv.ClusterView()
        self.admin_key = admin_key(token)
        self.joined = False
        self.ended_because = ""
        self._token = token
        self._ledger = ledger
        self._intake = intake
        self._model = model
        self._supervisor_address = supervisor_address
        self._locate = locate
        self._server = RpcServer(token, host)
        self._host: RoleHost | None = None
        self._link: SchedulerLink | None = None
        self._status_channel: tuple[str, TokenChannel] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._peers = GatewayPeers(process.id, token)
        self._start_timeout_s = 0.0

    async def start(
        self,
        heartbeat: Callable[[], sv.Heartbeat],
        on_view: Callable[[sv.ClusterView], None],
        *,
        node_id: str = "",
        heartbeat_s: float = 1.0,
        orphan_after_s: float = 60.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        """`start_timeout_s`: what a role that is replaced on purpose may take to come back."""
        self._start_timeout_s = start_timeout_s
        self._server.add(gw_grpc.add_TokenSinkServicer_to_server, TokenSink(self._ledger))
        self._server.add(gw_grpc.add_SpecSourceServicer_to_server, SpecSource(self._ledger))
        self._server.add(gw_grpc.add_GatewayPeerServicer_to_server, PeerService(self._ledger))
        role = GatewayRole(self.process.id, self._ledger, heartbeat)
        self._server.add(sv_grpc.add_RoleServicer_to_server, role)
        self.address = await self._server.start()
        self._link = SchedulerLink(self.process, self.address, self._token, self._ledger, self._intake, self._model)
        self._ledger.attach(self._link)

        async def take_view(view: sv.ClusterView) -> None:
            self.joined = True
            self.view = view
            on_view(view)
            await self._follow_scheduler(view)
            await self._peers.follow(view)

        self._host = RoleHost(
            self.process,
            self.address,
            self._supervisor_address,
            self._token,
            heartbeat,
            take_view,
            self.end,
            node_id=node_id,
            heartbeat_s=heartbeat_s,
            orphan_after_s=orphan_after_s,
            locate=self._locate_supervisor,
        )
        self._host.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    @property
    def scheduler_up(self) -> bool:
        return self._link is not None and self._link.up

    async def cancel_call(self, call_id: str, owner: bytes | None) -> bool:
        """A cancel by id, whichever replica has the call. False where none has one of that owner (None: of anybody)."""
        return self._ledger.cancel_call(call_id, owner) or await self._peers.cancel(call_id, owner)

    def report(self) -> None:
        if self._host is not None:
            self._host.report()

    async def status(self) -> sv.ClusterStatus | None:
        """What the supervisor says of everyone, asked now; None where it cannot be reached."""
        status: sv.ClusterStatus | None = await self._ask_supervisor("GetStatus", STATUS_TIMEOUT_S)
        return status

    async def check_integrity(self) -> sv.IntegrityReport | None:
        """What every process of the cluster finds in its books, now; None where the supervisor cannot be reached."""
        report: sv.IntegrityReport | None = await self._ask_supervisor("CheckIntegrity", INTEGRITY_TIMEOUT_S)
        return report

    async def ask_workers(self) -> Works:
        """How far instances are with their work, as they say themselves now."""
        workers = [peer for peer in self.view.peers if peer.process.role in _WORKERS and peer.state in SERVING_STATES]
        said = await asyncio.gather(*(self._ask_worker(peer) for peer in workers))
        return {
            (peer.process.id, peer.process.incarnation): Work(beat.busy, beat.progress, beat.step_s)
            for peer, beat in zip(workers, said, strict=True)
            if beat is not None
        }

    async def _ask_worker(self, peer: sv.Peer) -> sv.Heartbeat | None:
        channel = open_channel(peer.address, self._token)
        try:
            beat: sv.Heartbeat = await sv_grpc.RoleStub(channel).Describe(pb.Empty(), timeout=WORKER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.debug("%s does not say how far it is: %s", peer.process.id, error.code().name)
            return None
        finally:
            await channel.close()
        return beat

    async def _ask_supervisor(self, method: str, timeout_s: float) -> Any:
        try:
            return await getattr(await self._supervisor(), method)(pb.Empty(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            logger.debug("the supervisor cannot be asked: %s", error.code().name)
            return None

    async def scale(self, prefill: int, decode: int) -> sv.ScaleReply:
        """Have so many instances; 0: as many as there are. Raises UnavailableError, and why it was refused."""
        reply: sv.ScaleReply = await self._order("Scale", sv.ScaleRequest(prefill=prefill, decode=decode))
        if reply.HasField("refused"):
            raise failure_from_proto(reply.refused)
        return reply

    async def restart(self, roles: Sequence[str]) -> sv.Restart:
        """Have every process of these roles replaced. Raises UnavailableError, and why it was refused."""
        reply: sv.RestartReply = await self._order("RestartRoles", sv.RestartRequest(roles=roles))
        if reply.HasField("refused"):
            raise failure_from_proto(reply.refused)
        return reply.restart

    async def stop(self) -> sv.StopReply:
        """Have the cluster end. Raises UnavailableError."""
        reply: sv.StopReply = await self._order("Stop", pb.Empty())
        return reply

    async def _order(self, method: str, request: Any) -> Any:
        try:
            return await getattr(await self._supervisor(), method)(request, timeout=ORDER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the supervisor cannot be reached: {error.code().name}") from error

    async def _supervisor(self) -> sv_grpc.SupervisorStub:
        address = self._supervisor_address
        if self._status_channel is None or self._status_channel[0] != address:
            if self._status_channel is not None:
                await self._status_channel[1].close()
            self._status_channel = (address, open_channel(address, self._token))
        return sv_grpc.SupervisorStub(self._status_channel[1])

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._link is not None:
            await self._link.close()
        if self._host is not None:
            await self._host.close()
        await self._peers.close()
        if self._status_channel is not None:
            await self._status_channel[1].close()
        await self._server.stop()

    async def _follow_scheduler(self, view: sv.ClusterView) -> None:
        assert self._link is not None
        for peer in view.peers:
            if peer.process.role == "scheduler" and peer.address and peer.state not in ("failed", "lost"):
                await self._link.follow(peer.address, peer.process.incarnation)

    async def _locate_supervisor(self) -> str | None:
        self.joined = False
        if self._locate is None:
            return None
        address = await self._locate()
        if address:
            self._supervisor_address = address
        return address

    def _trouble(self) -> str:
        """Why there is no scheduler; "" while there is one."""
        trouble = "" if self._link is None else self._link.trouble
        unheard_s = 0.0 if self._host is None else self._host.unheard_s
        if trouble and unheard_s > _UNHEARD_S:
            trouble += f"; the supervisor at {self._supervisor_address} has not been heard of for {unheard_s:.0f} s"
        return trouble

    def _patience_s(self) -> float:
        """How long requests wait for a scheduler that is being replaced on purpose; 0 where it is not, or nobody says
        so any more."""
        ordered = bool(self.view.restart.since_ns) and not self.view.restart.done
        heard = self._host is not None and self._host.unheard_s <= _UNHEARD_S
        return self._start_timeout_s if ordered and heard else 0.0

    def end(self, reason: str) -> None:
        """This gateway is to be replaced."""
        if not self.ended_because:
            logger.warning("this gateway is to end: %s", reason)
            self.ended_because = reason

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._ledger.tick(self._trouble(), self._patience_s())
            except Exception:  # the ticker must outlive any one request's trouble
                logger.exception("the ledger's tick failed")
