"""Gives a restarted node agent the file descriptors of the memory that its predecessor created."""

from __future__ import annotations

import asyncio

from alignedserve.errors import TransferError, UnavailableError
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.transfer.segments import SegmentClient


class AgentHandover:
    """Follows the node agent of `node_id` in the cluster's view.

    `segments` is the client with which this process made all its mappings.
    """

    def __init__(self, segments: SegmentClient, node_id: str) -> None:
        self._segments, self._node_id = segments, node_id
        self._agent = 0

    async def on_view(self, view: sv.ClusterView) -> None:
        """Give a new node agent the descriptors of this process.

        Raises TransferError if the node agent has other memory under the same names: this process must be replaced.
        """
        agents = (peer for peer in view.peers if peer.process.role == "node_agent" and peer.node_id == self._node_id)
        agent = next((peer.process.incarnation for peer in agents if peer.state == "ready"), 0)
        if not agent or agent == self._agent:
            return
        if self._agent:
            try:
                refused = await asyncio.to_thread(self._segments.adopt_all)
            except UnavailableError:
                return  # the node agent has ended again; a later view names its successor
            if refused:
                raise TransferError(f"the node agent has other memory under these names: {', '.join(refused)}")
        self._agent = agent
