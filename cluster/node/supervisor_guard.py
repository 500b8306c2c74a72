"""An eye on the supervisor: one that hangs is ended, so that Ray Serve starts its successor.

Serve alone takes a minute: it calls a replica unhealthy after three health checks without an answer, and then waits
for it to end in order. The agent of its node looks first; every other role there ends one that stays stopped, since the
agent may have been stopped with it.
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
AGENT_FIRST_S = 1.0  # by how much every other role is more patient than the node's agent
_SERVING = sv.Heartbeat(state="ready")


class SupervisorGuard:
    """`look` is to be called every `LOOK_S`. Looks only at a supervisor of its own node that may be ended, and ends one
    that has counted as hung for `patience_s`."""

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
        """End it where it hangs. `heard_at`: when it last sent anything; None where it has no open stream to here."""
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
    """What every role but an agent does beside its work. The supervisor answers the heartbeats of agents alone: what
    is seen here is one that is stopped."""
    guard = SupervisorGuard(role.settings.node_id, role.config.supervisor, AGENT_FIRST_S)
    while True:
        await asyncio.sleep(LOOK_S)
        if role.host is not None:
            guard.on_view(role.host.view)
            try:
                await guard.look(None)
            except OSError:  # no descriptor is free, say: the guard goes on
                logger.warning("whether the supervisor is stopped cannot be seen", exc_info=True)
                await asyncio.sleep(END_TIMEOUT_S)
