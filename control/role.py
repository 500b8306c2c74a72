"""How every role joins the supervisor: one open stream, heartbeats up, the cluster's view and orders down."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from alignedserve.cancellation import end_tasks
from alignedserve.control.link import DuplexLink, settle
from alignedserve.control.rpc import TokenChannel, open_channel
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.proto import supervisor_pb2_grpc as sv_grpc

logger = logging.getLogger(__name__)

ORPHANED = "no supervisor was heard of"  # the reason of such an end begins so

SERVING_STATES = ("ready", "draining", "drained")  # a process in one of these answers its peers
OPEN_GAUGE = "open_requests"  # of a gateway's heartbeat


def new_incarnation(after: int = 0) -> int:
    """Grows with each start of a process: the start's Unix time in nanoseconds, or more where that is not over `after`,
    the newest in the cluster: a clock may have been set back since, or be ahead on another node."""
    return max(time.time_ns(), after + 1)


def started_ticks(pid: int) -> int:
    """When the process began, in the kernel's ticks since this machine did. Raises OSError where there is none."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class RoleHost:
    """A role's side of `Supervisor.Join`.

    `heartbeat` is called on the loop every `heartbeat_s` and whenever `report` is; `on_view` for each new view;
    `on_end` when the supervisor orders the role to end, or when no supervisor was heard of for `orphan_after_s`.
    `locate` is asked for the supervisor's address after the stream broke: a restarted one has another.
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
        heartbeat_s: float = 1.0,
        orphan_after_s: float = 60.0,
        locate: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        self.process = process
        self.view = sv.ClusterView()
        self.joined = False
        """Whether the stream is open, and a view has come on it."""
        self.supervisor_address = supervisor_address
        """Where the supervisor was found last."""
        self._hello = sv.RoleHello(
            process=process,
            pid=os.getpid(),
            node_id=node_id,
            address=address,
            device=device,
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
        self._answered = False  # on the stream that is open; one that only tries to connect is open, too
        self._channel: TokenChannel | None = None
        self._link: DuplexLink[sv.RoleReport, sv.RoleOrder] = DuplexLink(
            self._open, self._on_order, self._first, on_down=self._on_down
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ordered_at(self) -> float | None:
        """When the supervisor last sent anything, on `time.monotonic`'s clock; None while the stream is not open."""
        return self._ordered_at if self._link.up else None

    @property
    def unheard_s(self) -> float:
        """Seconds since a supervisor was known to be there."""
        return time.monotonic() - self._heard_at

    def start(self) -> None:
        """Join, and keep joined, in tasks of the current loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._link.run()), loop.create_task(self._beat())]

    def report(self) -> None:
        """Send a heartbeat now: something changed."""
        self._link.send(sv.RoleReport(heartbeat=self._heartbeat()))

    def leave(self, address: str) -> None:
        """The supervisor at that address leads now: go there, also from one that still answers."""
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
