"""The node agent, one per node: owns the node's memory segments, and ends processes there."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from alignedserve.cluster.launch.processes import ProcessHandle, open_process
from alignedserve.cluster.node.supervisor_guard import LOOK_S, SupervisorGuard
from alignedserve.cluster.runtime_dir import leave_socket_folder, prepare_socket_folder
from alignedserve.cluster.supervisor.store_planner import MEMORY_GAUGE
from alignedserve.control.ended_processes import EndedProcesses
from alignedserve.control.role import SERVING_STATES
from alignedserve.control.runtime import RoleServer, RoleSettings
from alignedserve.memory import available_memory_bytes, describe_bytes, total_memory_bytes
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import node_agent_pb2 as na
from alignedserve.proto import node_agent_pb2_grpc as na_grpc
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.transfer.segments import SegmentServer

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 8.0
HANDOVER_S = 3.0  # time for processes that outlived the previous node agent to return their segments
HOLDERS = frozenset({"prefill", "decode", "kv_pool"})
# Owned by one incarnation, as a candidate buffer: it is never taken over.
OWNED_SEGMENT = re.compile(r"(.+)/[^/]+-(\d+)")
VIEW_INFO = "view"  # the last view without its peers, a ClusterView in base64


class NodeAgentServer(RoleServer, na_grpc.NodeAgentServicer):
    """Holds a handle to each process of its node from its first view, so that a reused pid does no harm."""

    role = "node_agent"

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings)
        self.segments = SegmentServer(settings.agent_socket, settings.token)
        self._handles: dict[tuple[str, int], ProcessHandle] = {}
        self._ended_processes = EndedProcesses()
        self._here: dict[tuple[str, int], sv.Peer] = {}  # the processes of this node in the last view
        self._memory_at_start = available_memory_bytes()
        self._guard = SupervisorGuard(settings.node_id, self.config.supervisor)
        self._guarding: asyncio.Task[None] | None = None
        self.set_supervisor(settings.supervisor_address)

    # ---- the role

    def servicers(self) -> Sequence[tuple[Callable[[Any, Any], None], object]]:
        return [(na_grpc.add_NodeAgentServicer_to_server, self)]

    async def on_start(self) -> None:
        self.segments.expect(HANDOVER_S)  # until the first view lists the processes
        await asyncio.to_thread(prepare_socket_folder, self.settings.agent_socket)
        await asyncio.to_thread(self.segments.start)
        self._guarding = asyncio.get_running_loop().create_task(self._guard_supervisor())
        self.set_state("ready")

    async def on_view(self, view: sv.ClusterView) -> None:
        """Open handles to the processes of this node, and close handles to processes that are gone."""
        self._guard.on_view(view)
        self._ended_processes.on_view(view)
        if not any(self._may_hold(peer) for peer in view.peers):
            self.segments.expect(0.0)
        self._drop_orphans()
        here = {
            (peer.process.id, peer.process.incarnation): peer
            for peer in view.peers
            if peer.node_id == self.settings.node_id and peer.pid != os.getpid()
        }
        self._here = here
        told = sv.ClusterView()
        told.CopyFrom(view)
        del told.peers[:]
        self._publish(**{VIEW_INFO: base64.b64encode(told.SerializeToString()).decode()})
        for key in [key for key in self._handles if key not in here]:
            self._handles.pop(key).close()
        for key, peer in here.items():
            if key not in self._handles and (handle := open_process(peer)) is not None:
                self._handles[key] = handle

    def _may_hold(self, peer: sv.Peer) -> bool:
        """Whether the process may have mapped segments of the previous node agent."""
        here = peer.node_id == self.settings.node_id and peer.process.role in HOLDERS
        return here and not peer.fenced and peer.state in (*SERVING_STATES, "lost")

    def _drop_orphans(self) -> None:
        """Drop segments whose only owner is dead. A process that has mapped one keeps its memory until it unmaps it."""
        for segment in self.segments.segments():
            owner = OWNED_SEGMENT.fullmatch(segment.name)
            if owner and self._ended_processes.has_ended(owner[1], int(owner[2])):
                logger.info("dropping segment %s: its owner has ended", segment.name)
                self.segments.drop(segment.name)

    async def _guard_supervisor(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._drop_orphans()  # also segments that were returned since the last view
            await self._guard.look(self.host.ordered_at if self.host is not None else None)

    async def on_close(self) -> None:
        if self._guarding is not None:
            self._guarding.cancel()
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        self.segments.close()
        leave_socket_folder(self.settings.agent_socket)

    def describe(self) -> sv.Heartbeat:
        held = self.segments.segments()
        total = sum(segment.size_bytes for segment in held)
        return sv.Heartbeat(
            holds=f"{len(held)} segments of {describe_bytes(total)}",
            gauges={MEMORY_GAUGE: float(self._memory_at_start)},
        )

    def set_supervisor(self, address: str) -> None:
        """Publish the supervisor's address for processes that lost it."""
        if address != self.segments.info.get("supervisor_address"):
            self._publish(supervisor_address=address)

    def _publish(self, **info: str) -> None:
        self.segments.info = {**self.segments.info, "cluster_id": self.settings.cluster_id, **info}

    def end(self, reason: str) -> None:
        super().end(reason)
        if self.host is not None and not self.host.view.peers:
            return
        if self.orphaned:
            # No supervisor can fence processes that hang here, and the others end themselves, so end them all.
            for handle in self._handles.values():
                handle.signal(signal.SIGKILL)

    # ---- gRPC

    async def Describe(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, na.NodeDescription]
    ) -> na.NodeDescription:
        return na.NodeDescription(
            node_id=self.settings.node_id,
            socket=self.settings.agent_socket,
            memory_total_bytes=total_memory_bytes(),
            memory_available_bytes=available_memory_bytes(),
            segments=[na.Segment(name=entry.name, bytes=entry.size_bytes) for entry in self.segments.segments()],
        )

    async def EndProcess(
        self, request: na.EndProcessRequest, context: grpc.aio.ServicerContext[na.EndProcessRequest, pb.Empty]
    ) -> pb.Empty:
        key = (request.process.id, request.process.incarnation)
        peer = self._here.get(key)
        if peer is None or peer.pid != request.pid:
            message = f"pid {request.pid} does not belong to a process of this cluster on this node: nothing was ended"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        handle = self._handles.pop(key, None) or open_process(peer)
        if handle is None:
            return pb.Empty()  # it has ended, and its pid may belong to a process of another program
        try:
            handle.signal(signal.SIGKILL)
            if not await handle.wait_ended(END_TIMEOUT_S):
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"process {request.pid} does not end")
        finally:
            handle.close()
        logger.info("%s (pid %d) has ended", request.process.id, request.pid)
        return pb.Empty()
