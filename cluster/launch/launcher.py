"""What the supervisor needs of whatever starts processes: Ray, or plain subprocesses."""

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
    """A role's process that was found running: an earlier supervisor started it.

    `view` is what it was told last (empty: nothing yet): sizes of stores and numbers of instances hold on. `pid` is 0
    where the launcher does not know it.
    """

    settings: RoleSettings
    view: sv.ClusterView = field(default_factory=sv.ClusterView)
    pid: int = 0

    @property
    def planned(self) -> PlannedRole:
        return PlannedRole(self.settings.role, self.settings.id, self.settings.device, self.settings.node_id)

    def peer(self, told: sv.ClusterView, now_ns: int) -> sv.Peer | None:
        """What was told of it last, so that it can be watched and ended before it has joined; None where its pid is not
        known. An incarnation that nobody was told of is `now_ns`: it was started before that.
        """
        role_id, node_id = self.settings.id, self.settings.node_id
        for peer in told.peers:
            if (peer.process.id, peer.pid, peer.node_id) == (role_id, self.pid, node_id):
                return peer
        key = pb.ProcessKey(role=self.settings.role, id=role_id, incarnation=now_ns)
        return sv.Peer(process=key, pid=self.pid, node_id=node_id) if self.pid else None


class Launcher(ABC):
    """Starts and, as the last resort, kills the processes of roles. Used on one event loop.

    A role's id names its process: at most one runs under an id. `launch` returns once the process is on its way; that
    it came up, it says itself by joining the supervisor.
    """

    elastic = False
    """Whether nodes may come that `nodes` does not know yet; after `nodes`."""

    @abstractmethod
    async def nodes(self) -> Sequence[Node]:
        """The machines that there are; the supervisor's own first."""

    @abstractmethod
    async def place(
        self, cluster_id: str, shape: Shape, ids: Sequence[tuple[str, str]], room: NodeRoom, *, on_gpu: bool
    ) -> None:
        """Have room on nodes for these instances, `(role, id)`, and for no others; which is which, `placement` says.

        `shape`: how many there are to be in the long run; `room`: where there is memory for those that are new.
        Raises ResourceError where nodes that would have the room can never come.
        """

    @abstractmethod
    async def placement(self) -> Placement:
        """What nodes there are now, and where the instances belong that `place` was told of.

        Raises UnavailableError where that cannot be found out now.
        """

    @abstractmethod
    async def vet(self, config: Config) -> None:
        """Find out whether a cluster of this configuration could start once the one that runs had ended; nothing that
        runs is touched. Raises AlignedServeError where no node has what it asks for, or can open its model.
        """

    @abstractmethod
    async def release(self) -> None:
        """Give back what was reserved, for good: every instance has ended, or is to."""

    @abstractmethod
    async def find(self) -> Sequence[Running]:
        """The processes of this cluster that run already; also those that do not answer now, without their view, as
        long as their node counts as alive."""

    @abstractmethod
    async def launch(self, settings: RoleSettings, spare_id: str = "") -> None:
        """Start a process, or have the spare `spare_id` become it, which loses its own id. A spare that cannot any more
        is killed, and a process started. Raises AlignedServeError where that is impossible.
        """

    @abstractmethod
    def watch(self, role_id: str, on_exit: Callable[[str], None]) -> None:
        """Call `on_exit(reason)` once, on the loop, when the process that has this id now (launched or found) ends."""

    @abstractmethod
    async def kill(self, role_id: str) -> None:
        """End the process at once, if there is one; returns when it was told to, which may be before it has ended."""

    @abstractmethod
    async def announce(self, supervisor_address: str, *, leave: bool = False) -> None:
        """Tell everyone where the supervisor is now: who lost it asks its node's agent, or remembers. `leave`: go there
        now, also from one that still answers."""

    @abstractmethod
    async def close(self) -> None:
        """Stop watching; end nothing."""
