"""The interface through which the supervisor starts processes, with Ray or as plain subprocesses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alignedserve.cluster.launch.node_room import NodeRoom
from alignedserve.cluster.supervisor.nodes import Placement
from alignedserve.cluster.supervisor.plan import Node, PlannedRole, Shape
from alignedserve.config import Config
from alignedserve.control.runtime import RoleSettings
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv


@dataclass(frozen=True, slots=True)
class Running:
    """A process that was found running because an earlier supervisor started it.

    `view` is the last view that it received (empty: none yet); its sizes of stores and numbers of instances stay valid.
    `pid` is 0 if the launcher does not know it.
    """

    settings: RoleSettings
    view: sv.ClusterView = field(default_factory=sv.ClusterView)
    pid: int = 0

    @property
    def planned(self) -> PlannedRole:
        return PlannedRole(self.settings.role, self.settings.id, self.settings.device, self.settings.node_id)

    def peer(self, told: sv.ClusterView, now_ns: int) -> sv.Peer | None:
        """The process as the last view `told` describes it, so that it can be watched and ended before it joins.

        None if its pid is unknown. An unknown incarnation becomes `now_ns`, because it was started before that.
        """
        role_id, node_id = self.settings.id, self.settings.node_id
        for peer in told.peers:
            if (peer.process.id, peer.pid, peer.node_id) == (role_id, self.pid, node_id):
                return peer
        key = pb.ProcessKey(role=self.settings.role, id=role_id, incarnation=now_ns)
        return sv.Peer(process=key, pid=self.pid, node_id=node_id) if self.pid else None


class Launcher(ABC):
    """Starts processes of roles and, as a last resort, kills them. It is used on one event loop.

    At most one process runs under a role's id. `launch` returns once the start is under way. The process joins the
    supervisor when it is up.
    """

    elastic = False
    """Whether further nodes may join later. Valid after `nodes` was called."""

    @abstractmethod
    async def nodes(self) -> Sequence[Node]:
        """The nodes, the supervisor's own first."""

    @abstractmethod
    async def place(
        self, cluster_id: str, shape: Shape, ids: Sequence[tuple[str, str]], room: NodeRoom, *, on_gpu: bool
    ) -> None:
        """Reserve room on nodes for these instances, `(role, id)`, and for no others; `placement` returns where.

        `shape` is the target number of instances; `room` says which nodes have memory for new ones. Raises
        ResourceError if no node can ever have the room.
        """

    @abstractmethod
    async def placement(self) -> Placement:
        """The current nodes, and the nodes of the instances that were given to `place`.

        Raises UnavailableError if that is unknown now.
        """

    @abstractmethod
    async def vet(self, config: Config) -> None:
        """Check whether a cluster of this configuration could start after the running one has ended.

        It does not change the running cluster. Raises AlignedServeError if no node has the required resources, or none
        can open the model.
        """

    @abstractmethod
    async def release(self) -> None:
        """Release all reserved room for good. All instances have ended, or will end."""

    @abstractmethod
    async def find(self) -> Sequence[Running]:
        """The processes of this cluster that already run. A process that does not answer is included without its view
        as long as its node counts as alive."""

    async def prepare(self, settings: RoleSettings, *, again: bool = False) -> RoleSettings:
        """Start what an instance has on further nodes, in place of its predecessor's. Takes as long as that imports.

        `again`: as of `launch`.
        Returns the settings to launch it with. Raises AlignedServeError, and then leaves nothing.
        """
        return settings

    @abstractmethod
    async def launch(self, settings: RoleSettings, spare_id: str = "", *, again: bool = False) -> None:
        """Start a process, or let the spare `spare_id` take its role and id.

        `again`: its last processes ended before they were ready, or soon after; this one starts in the plainest way.
        If the spare fails to do so, it is killed and a new process is started. Raises AlignedServeError if the start is
        impossible.
        """

    @abstractmethod
    def watch(self, role_id: str, on_exit: Callable[[str], None]) -> None:
        """Call `on_exit(reason)` once, on the loop, when the current process with this id (launched or found) ends."""

    @abstractmethod
    async def kill(self, role_id: str) -> None:
        """Kill the process, if there is one. May return before the process has ended."""

    @abstractmethod
    async def announce(self, supervisor_address: str, *, leave: bool = False) -> None:
        """Announce the supervisor's address to all processes, which connect there if they have lost their supervisor.
        With `leave`, they connect there now, even if their supervisor still answers."""

    @abstractmethod
    async def close(self) -> None:
        """Stop watching, without ending any process."""
