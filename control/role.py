"""How every role joins the supervisor: one stream carries heartbeats up, and the cluster's view and orders down."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from alignedserve.cancellation import end_tasks
from alignedserve.control.link import DuplexLink, settle
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.proc_stat import started_ticks
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

logger = logging.getLogger(__name__)

ORPHANED = "there was no supervisor"  # the end reason of an orphaned process begins with this

SERVING_STATES = ("ready", "draining", "drained")  # a process in one of these answers its peers
# Gauges of a gateway's heartbeat; the last two count from its start.
OPEN_GAUGE, REFUSED_GAUGE, RESUBMITTED_GAUGE = "open_requests", "refused_requests", "resubmitted_requests"


def new_incarnation(after: int = 0) -> int:
    """A number that grows with each start of a process: the Unix time in nanoseconds, but at least `after` + 1.

    `after` is the newest incarnation in the cluster. The clock may have been set back, or be ahead on another node.
    """
    return max(time.time_ns(), after + 1)


class RoleHost:
    """A role's side of `Supervisor.Join`.

    `heartbeat` is called on the loop every `heartbeat_s` seconds and for each `report`, `on_view` for each new view.
    `on_end` is called when the supervisor orders or refuses the role, or when there was no supervisor for
    `orphan_after_s` seconds. `locate` is called after the stream broke: a restarted supervisor has another address.
    """

    def __init__(
        self,
        process: pb.ProcessKey,
        address: str,
        supervisor_address: str,
        token: str,
        heartbeat: Callable[[], sv.Heartbeat],
        on_view: Callable[[sv.ClusterView], Awaitable[None] | None],
        on_end: Callable[[str], Awaitable[None] | None],
        *,
        node_id: str = "",
        device: str = "",
        metrics_port: int = 0,
        heartbeat_s: float = 1.0,
        orphan_after_s: float = 60.0,
        locate: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        self.process = process
        self.view = sv.ClusterView()
        self.joined = False
        """Whether the stream is open and has delivered a view."""
        self.supervisor_address = supervisor_address
        """The last known address of the supervisor."""
        self._hello = sv.RoleHello(
            process=process,
            pid=os.getpid(),
            node_id=node_id,
            address=address,
            device=device,
            metrics_port=metrics_port,
            started_ticks=started_ticks(os.getpid()),
        )
        self._token = token
        self._heartbeat = heartbeat
        self._on_view = on_view
        self._on_end = on_end
        self._heartbeat_s = heartbeat_s
        self._orphan_after_s = orphan_after_s
        self._locate = locate
        self._heard_at = self._ordered_at = time.monotonic()
        self._answered = False  # on the open stream; a stream that is still connecting counts as open, too
        self._channel: TokenChannel | None = None
        self._link: DuplexLink[sv.RoleReport, sv.RoleOrder] = DuplexLink(
            self._open, self._on_order, self._first, on_down=self._on_down
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ordered_at(self) -> float | None:
        """When the supervisor last sent a message (time.monotonic); None while the stream is not open."""
        return self._ordered_at if self._link.up else None

    @property
    def unheard_s(self) -> float:
        """Seconds since a supervisor was last known to be available."""
        return time.monotonic() - self._heard_at

    def start(self) -> None:
        """Joins, and stays joined, in tasks of the current loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._link.run()), loop.create_task(self._beat())]

    def report(self) -> None:
        """Sends a heartbeat now, because something has changed."""
        self._link.send(sv.RoleReport(heartbeat=self._heartbeat()))

    def leave(self, address: str) -> None:
        """Connects to the supervisor at `address`, which leads now, even if the previous supervisor still answers."""
        if address != self.supervisor_address:
            self._link.break_off("another supervisor leads the cluster")

    async def close(self) -> None:
        await end_tasks(self._tasks)
        await self._drop_channel()

    def _open(self) -> Any:
        if self._channel is None:
            self._channel = open_channel(self.supervisor_address, self._token)
        return sv_grpc.SupervisorStub(self._channel).Join()

    def _first(self) -> Iterable[sv.RoleReport]:
        self._ordered_at = time.monotonic()
        return (sv.RoleReport(hello=self._hello), sv.RoleReport(heartbeat=self._heartbeat()))

    async def _on_order(self, order: sv.RoleOrder) -> None:
        self._heard_at = self._ordered_at = time.monotonic()
        self._answered = True
        kind = order.WhichOneof("body")
        if kind == "view":
            self.joined, self.view = True, order.view
            await settle(self._on_view(order.view))
        elif kind == "report":
            self.report()
        elif kind == "end":
            await settle(self._on_end("the supervisor ordered it"))
        elif kind == "refused":
            await settle(self._on_end(f"the supervisor refused this process: {order.refused.message}"))

    async def _on_down(self) -> None:
        self._answered = self.joined = False
        address = await self._locate() if self._locate is not None else None
        if address and address != self.supervisor_address:
            logger.info("the supervisor is now at %s", address)
            self.supervisor_address = address
            await self._drop_channel()

    async def _drop_channel(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if self._answered:
                self._heard_at = time.monotonic()
            self.report()
            if self.unheard_s > self._orphan_after_s:
                await settle(self._on_end(f"{ORPHANED} for {self._orphan_after_s:g} s"))
                return
