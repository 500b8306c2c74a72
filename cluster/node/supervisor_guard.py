"""Ends a supervisor that hangs, so that Ray Serve starts its successor.

Serve alone needs a minute: it treats a replica as unhealthy after three failed health checks, and then waits for an
orderly end. The node agent acts first. Every other process on the node also ends a supervisor that stays stopped,
because the node agent may be stopped, too.
"""

from __future__ import annotations

import asyncio
import logging
import time

from alignedserve.cluster.launch.processes import end_process, look_at
from alignedserve.cluster.supervisor.hang_detector import LATE_S, HangDetector
from alignedserve.config import SupervisorConfig
from alignedserve.control.runtime import RoleServer
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

LOOK_S = 0.25
END_TIMEOUT_S = 5.0
AGENT_FIRST_S = 1.0  # additional patience of processes other than the node agent
_SERVING = sv.Heartbeat(state="ready")


class SupervisorGuard:
    """Ends a supervisor that has counted as hung for `patience_s`. It watches only a supervisor on its own node that
    may be ended. `look` must be called every `LOOK_S`."""

    def __init__(self, node_id: str, limits: SupervisorConfig, patience_s: float = 0.0) -> None:
        self._node_id = node_id
        self._limits = limits
        self._patience_s = patience_s
        self._hung_since: float | None = None
        self._peer: sv.Peer | None = None
        self._hang_detector = HangDetector(0.0)
        self._looked_at = 0.0

    def on_view(self, view: sv.ClusterView) -> None:
        named = view.HasField("supervisor") and view.supervisor.node_id == self._node_id and not view.ending
        peer = view.supervisor if named else None
        if peer is None or self._peer is None or peer.process != self._peer.process:
            self._peer = peer
            self._hang_detector = HangDetector(time.monotonic())

    async def look(self, heard_at: float | None) -> None:
        """End the supervisor if it hangs. `heard_at`: time of its last message; None without an open stream."""
        peer, now = self._peer, time.monotonic()
        slept_s, self._looked_at = now - self._looked_at, now
        if peer is None or (sight := look_at(peer.pid)) is None:
            return
        self._hang_detector.seen(sight, now)
        self._hang_detector.heard_at = max(self._hang_detector.heard_at, now if heard_at is None else heard_at)
        if slept_s > LATE_S:
            self._hang_detector.forgive(slept_s, now)
        hung = self._hang_detector.verdict(_SERVING, self._limits, now)
        if not hung:
            self._hung_since = None
            return
        self._hung_since = now if self._hung_since is None else self._hung_since
        if now - self._hung_since >= self._patience_s:
            self._peer = self._hung_since = None
            logger.warning("ending the supervisor (pid %d): %s", peer.pid, hung)
            await end_process(peer, END_TIMEOUT_S)


async def guard_supervisor(role: RoleServer) -> None:
    """Runs beside every role except node agents. Because the supervisor answers only heartbeats of node agents, this
    detects only a stopped supervisor."""
    guard = SupervisorGuard(role.settings.node_id, role.config.supervisor, AGENT_FIRST_S)
    while True:
        await asyncio.sleep(LOOK_S)
        if role.host is not None:
            guard.on_view(role.host.view)
            try:
                await guard.look(None)
            except OSError:  # for example no free file descriptor: go on
                logger.warning("cannot check whether the supervisor is stopped", exc_info=True)
                await asyncio.sleep(END_TIMEOUT_S)
