"""From one supervisor to the next while both live: an update of the application, or its move to another node.

The successor asks twice. First to pause: while it looks at what runs, nothing is placed or started, nobody's order is
taken, and what was begun before is finished before it is answered. Who is being ended goes on being ended: that is one
certain process, and the successor hears of its death. Then, once roles can find it, the successor asks for the cluster
itself: the predecessor closes its server, and every role joins the successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from alignedserve.cluster.launch.launcher import Launcher, Running
from alignedserve.control.rpc import open_channel
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

logger = logging.getLogger(__name__)

PAUSE_S = 20.0  # a successor that has not come by then has died
ASK_TIMEOUT_S = 2.0
ASK_S = 15.0  # until one that is there but does not answer is given up
RETRY_S = 0.25
FOLLOWED_WITHIN_S = 15.0
FOLLOWED_LOOK_S = 0.1
_SOMEBODY_ELSE = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)  # has the port by now


class Leaving:
    """A supervisor's side: `pause` is told of its beginning and its end."""

    def __init__(self, pause: Callable[[bool], None]) -> None:
        self.address = ""
        self._pause = pause
        self._resume: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()
        self._begun: set[asyncio.Future[None]] = set()

    def finish(self, work: asyncio.Future[None]) -> None:
        """This is over before a successor is answered."""
        self._begun.add(work)
        work.add_done_callback(self._begun.discard)

    @contextlib.contextmanager
    def finishes(self) -> Iterator[None]:
        """`finish`, for what is done within."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finish(done)
        try:
            yield
        finally:
            done.set_result(None)

    async def asked(self, address: str) -> None:
        """To pause (""), or to leave the cluster to the supervisor at that address; returns once it is as asked.

        Where that takes longer than the successor waits, it asks again.
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
        logger.warning("the successor that asked to pause has not come: going on")
        self._pause(False)


class Predecessor:
    """A successor's side. One that is alive but slow is asked again: whoever is not told to let go would end the
    cluster under its successor."""

    def __init__(self, peer: sv.Peer, token: str) -> None:
        self.peer = peer
        self.ended = False
        """Nobody listens at its address: it is known to lead nothing any more."""
        self.view = sv.ClusterView()
        """What it said last of the cluster; empty: it has not answered."""
        self._token = token

    async def pause(self) -> sv.HandOverReply | None:
        """Its configuration, where it lives; None where it has `ended`, or has not answered within `ASK_S`."""
        return await self._ask("")

    async def leave_to(self, address: str) -> bool:
        """Have it let go of the cluster; whether it has. One that hangs is ended by its node's agent."""
        if await self._ask(address) is None and not self.ended:
            logger.error("the supervisor at %s has not been told that %s leads the cluster", self.peer.address, address)
            return False
        return True

    async def _ask(self, address: str) -> sv.HandOverReply | None:
        deadline = time.monotonic() + ASK_S
        while not self.ended:
            try:
                return await self._ask_once(address)
            except grpc.aio.AioRpcError as error:
                self.ended = "refused" in (error.details() or "").lower() or error.code() in _SOMEBODY_ELSE
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
    """What was said last of the cluster, to roles or to its successor; empty where nothing was."""
    views = [running.view for running in found] + ([predecessor.view] if predecessor is not None else [])
    return max(views, key=lambda view: view.version, default=sv.ClusterView())


def known_processes(found: Sequence[Running], told: sv.ClusterView) -> list[sv.Peer]:
    """What was told of those who were found, as far as their pids are known, and of gateways."""
    now_ns = time.time_ns()
    known = [running.peer(told, now_ns) for running in found]
    return [peer for peer in known if peer is not None] + [p for p in told.peers if p.process.role == "gateway"]


def newest_incarnation(view: sv.ClusterView) -> int:
    """Of anyone in the cluster, its supervisor included."""
    named = (peer.process.incarnation for peer in view.peers)
    return max((view.told_by, *view.incarnations.values(), *named))


async def newer_leader(launcher: Launcher, incarnation: int) -> str:
    """The address of a supervisor that roles follow and that is newer than this incarnation; "" where there is none."""
    told = newest_view(await launcher.find()).supervisor
    return told.address if told.process.incarnation > incarnation else ""


async def wait_followed(launcher: Launcher, incarnation: int) -> None:
    """Returns once roles say that they follow this supervisor, or a newer one: only by that can a predecessor that was
    not told know of it, and Ray Serve ends that one as soon as this one is up."""
    deadline = time.monotonic() + FOLLOWED_WITHIN_S
    while (found := await launcher.find()) and newest_view(found).supervisor.process.incarnation < incarnation:
        if time.monotonic() > deadline:
            logger.error("no role follows this supervisor after %g s", FOLLOWED_WITHIN_S)
            return
        await asyncio.sleep(FOLLOWED_LOOK_S)
