"""A process gives a restarted node agent the descriptors of the memory that its predecessor made."""

from __future__ import annotations

import asyncio

from alignedserve.errors import TransferError, UnavailableError
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.transfer.segments import SegmentClient


class AgentHandover:
    """Follows the agent of `node_id` in the cluster's view.

    `segments` is the client that every mapping of this process was made with.
    """

    def __init__(self, segments: SegmentClient, node_id: str) -> None:
        self._segments, self._node_id = segments, node_id
        self._agent = 0

    async def on_view(self, view: sv.ClusterView) -> None:
        """Raises TransferError where the new agent has other memory under the same names: this process is of no use."""
        agents = (peer for peer in view.peers if peer.process.role == "node_agent" and peer.node_id == self._node_id)
        agent = next((peer.process.incarnation for peer in agents if peer.state == "ready"), 0)
        if not agent or agent == self._agent:
            return
        if self._agent:
            try:
                refused = await asyncio.to_thread(self._segments.adopt_all)
            except UnavailableError:
                return  # it has gone again: its successor is in a later view
            if refused:
                raise TransferError(f"the node agent has other memory under these names: {', '.join(refused)}")
        self._agent = agent
