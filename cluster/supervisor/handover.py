"""The take-over by a successor while both supervisors live: at a redeploy, or a move to another node.

The successor sends two calls. The first pauses the predecessor: it places and starts nothing, refuses commands, and
finishes what it had begun before it answers, while the successor finds running processes. Fencing that has begun goes
on, and the successor learns of the death. Once processes can find the successor, its second call takes over the
cluster: the predecessor closes its server, and every process joins the successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from alignedserve.cluster.launch.launcher import Launcher, Running
from alignedserve.cluster.supervisor.core import SupervisorCore
from alignedserve.control.rpc import open_channel
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

logger = logging.getLogger(__name__)

PAUSE_S = 20.0  # a successor that has not called again by then is dead
ASK_TIMEOUT_S = 2.0
ASK_S = 15.0  # time limit for a predecessor that lives but does not answer
RETRY_S = 0.25
FOLLOWED_WITHIN_S = 15.0
FOLLOWED_LOOK_S = 0.1
# Replies of another server, which has the port of an ended predecessor by now
_OTHER_SERVER_CODES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


class Leaving:
    """The predecessor's side. `pause` is called at the beginning and at the end of a pause."""

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self.address = ""  # of the successor that leads the cluster; "" until one does
        self._pause = pause
        self._resume: asyncio.TimerHandle | None = None  # ends the pause; restarted by each call of the successor
        self._left = asyncio.Event()  # set with `address`; for good
        self._begun: set[asyncio.Future[None]] = set()  # work in progress, which a reply waits for

    def finish(self, work: asyncio.Future[None]) -> None:
        """Finish this work before a successor gets an answer."""
        self._begun.add(work)
        work.add_done_callback(self._begun.discard)

    @contextlib.contextmanager
    def finishes(self) -> Iterator[None]:
        """`finish` for the work in the context."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finish(done)
        try:
            yield
        finally:
            done.set_result(None)

    async def asked(self, address: str) -> None:
        """Pause (""), or leave the cluster to the supervisor at `address`. Returns when that is done.

        If that takes longer than the successor's time limit, the successor calls again.
        """
        self._pause(True)
        if self._resume is not None:
            self._resume.cancel()
        self._resume = asyncio.get_running_loop().call_later(PAUSE_S, self._go_on)
        while self._begun:
            await asyncio.wait(self._begun)
        if address:
            self._resume.cancel()
            self.address = address
            self._left.set()

    async def wait(self) -> None:
        await self._left.wait()

    def _go_on(self) -> None:
        if self._left.is_set():
            return
        logger.warning("the successor that requested a pause has not taken over: going on")
        self._pause(False)


class Predecessor:
    """The successor's side. A slow predecessor is called again, because it would end the cluster if it did not learn of
    its successor."""

    def __init__(self, peer: sv.Peer, token: str) -> None:
        self.peer = peer
        self.ended = False
        """No supervisor listens at its address, so it leads no cluster any more."""
        self.view = sv.ClusterView()
        """The last view that it sent; empty: it has not answered."""
        self._token = token

    async def pause(self) -> sv.HandOverReply | None:
        """Pause it. Returns its configuration; None if it has `ended`, or did not answer within `ASK_S`."""
        return await self._ask("")

    async def leave_to(self, address: str) -> bool:
        """Make it leave the cluster. Returns whether it did. If it hangs, its node agent ends it."""
        if await self._ask(address) is None and not self.ended:
            logger.error("the supervisor at %s could not be told that %s leads the cluster", self.peer.address, address)
            return False
        return True

    async def _ask(self, address: str) -> sv.HandOverReply | None:
        deadline = time.monotonic() + ASK_S
        while not self.ended:
            try:
                return await self._ask_once(address)
            except grpc.aio.AioRpcError as error:
                self.ended = "refused" in (error.details() or "").lower() or error.code() in _OTHER_SERVER_CODES
                late = time.monotonic() > deadline
                what = "has ended" if self.ended else f"does not answer: {error.code().name}"
                level = logging.INFO if self.ended else logging.WARNING
                logger.log(level, "the supervisor at %s %s", self.peer.address, what)
            if late:
                break
            await asyncio.sleep(RETRY_S)
        return None

    async def _ask_once(self, address: str) -> sv.HandOverReply:
        channel = open_channel(self.peer.address, self._token)
        try:
            stub = sv_grpc.SupervisorStub(channel)
            reply: sv.HandOverReply = await stub.HandOver(sv.HandOverRequest(address=address), timeout=ASK_TIMEOUT_S)
            self.view = reply.view
            return reply
        finally:
            await channel.close()


def newest_view(found: Sequence[Running], predecessor: Predecessor | None = None) -> sv.ClusterView:
    """The newest view that processes or the successor received; empty if there is none."""
    views = [running.view for running in found] + ([predecessor.view] if predecessor is not None else [])
    return max(views, key=lambda view: view.version, default=sv.ClusterView())


def adopt(core: SupervisorCore, told: sv.ClusterView, found: Sequence[Running], now: float) -> None:
    """Take over what the view of the one before says."""
    core.has_served = told.was_ready
    core.roster.adopt(told.incarnations)
    core.nodes.adopt(told, [(running.planned, running.settings.agent_socket) for running in found])
    core.scaling.adopt(told, [running.planned for running in found], now)
    core.planner.adopt(told.model_info, told.store_plan)
    core.rolling.adopt(told, now)


def log_found(found: Sequence[Running], predecessor: Predecessor | None) -> None:
    if found:
        level = logging.INFO if predecessor is not None else logging.WARNING
        what = "found running" if predecessor is not None else "the supervisor was lost; another goes on with"
        logger.log(level, "%s: %s", what, ", ".join(running.settings.id for running in found))


def known_processes(found: Sequence[Running], told: sv.ClusterView) -> list[sv.Peer]:
    """The found processes with known pids, and the gateways, as the last view describes them."""
    now_ns = time.time_ns()
    known = [running.peer(told, now_ns) for running in found]
    return [peer for peer in known if peer is not None] + [p for p in told.peers if p.process.role == "gateway"]


def newest_incarnation(view: sv.ClusterView) -> int:
    """The newest incarnation in the cluster, including its supervisor."""
    named = (peer.process.incarnation for peer in view.peers)
    return max((view.told_by, *view.incarnations.values(), *named))


async def newer_leader(launcher: Launcher, incarnation: int) -> str:
    """The address of a supervisor that processes follow and that is newer than `incarnation`; "" if there is none."""
    told = newest_view(await launcher.find()).supervisor
    return told.address if told.process.incarnation > incarnation else ""


async def wait_followed(launcher: Launcher, incarnation: int) -> None:
    """Wait until processes follow this supervisor or a newer one. A predecessor that could not be told learns of its
    successor only from them, and Ray Serve ends it as soon as the successor is up."""
    deadline = time.monotonic() + FOLLOWED_WITHIN_S
    while (found := await launcher.find()) and newest_view(found).supervisor.process.incarnation < incarnation:
        if time.monotonic() > deadline:
            logger.error("no role follows this supervisor after %g s", FOLLOWED_WITHIN_S)
            return
        await asyncio.sleep(FOLLOWED_LOOK_S)
