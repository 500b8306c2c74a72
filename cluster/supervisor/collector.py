"""Collects the current metrics: every process reports, and the pages are merged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.control.link import Outbox
from alignedserve.control.samples import merge
from alignedserve.metrics import Page
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

REPORT_WAIT_S = 0.5


class Collector:
    """`outboxes` are the open streams by role id."""

    def __init__(self, outboxes: Mapping[str, Outbox[sv.RoleOrder]]) -> None:
        self._outboxes = outboxes
        self._waiting: dict[str, asyncio.Event] = {}  # by id, set by each process's report; empty between rounds
        self._round: asyncio.Task[None] | None = None  # the current or the last round

    def heard(self, role_id: str) -> None:
        """A heartbeat has arrived."""
        if (event := self._waiting.get(role_id)) is not None:
            event.set()

    async def refresh(self) -> None:
        """Make every process report now. Concurrent callers share one round. Late processes are left out."""
        if self._round is None or self._round.done():
            self._round = asyncio.get_running_loop().create_task(self._ask_all())
        await asyncio.shield(self._round)

    async def _ask_all(self) -> None:
        self._waiting = {role_id: asyncio.Event() for role_id in self._outboxes}
        for outbox in self._outboxes.values():
            outbox.put(sv.RoleOrder(report=pb.Empty()))
        waits = [asyncio.ensure_future(event.wait()) for event in self._waiting.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=REPORT_WAIT_S)
            for wait in late:
                wait.cancel()
        self._waiting = {}


def cluster_metrics(roster: Roster, launches: int) -> str:
    """The last metrics of all processes, and those of the supervisor itself."""
    ready: dict[str, int] = {}
    for slot in roster.slots.values():
        ready[slot.planned.role] = ready.get(slot.planned.role, 0) + slot.ready
    own = Page()
    for role, count in ready.items():
        own.gauge("ready_instances", "instances of a role that are ready", count, role=role)
    own.counter("role_starts_total", "processes that the supervisor has started", launches)
    return merge([*(member.beat.metrics for member, _ in roster.members()), own.text()])
