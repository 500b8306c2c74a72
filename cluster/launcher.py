"""What the supervisor needs of whatever starts processes: Ray, or plain subprocesses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alignedserve.cluster.plan import Node
from alignedserve.control.runtime import RoleSettings
from alignedserve.proto import supervisor_pb2 as sv


@dataclass(frozen=True, slots=True)
class Running:
    """A role's process that was found running: an earlier supervisor started it.

    `view` is what it was told last (empty: nothing yet): sizes of stores and numbers of instances hold on.
    """

    settings: RoleSettings
    view: sv.ClusterView = field(default_factory=sv.ClusterView)


class Launcher(ABC):
    """Starts and, as the last resort, kills the processes of roles. Used on one event loop.

    A role's id names its process: at most one runs under an id. `launch` returns once the process is on its way; that
    it came up, it says itself by joining the supervisor.
    """

    @abstractmethod
    async def nodes(self) -> Sequence[Node]:
        """The machines that there are; the supervisor's own first."""

    @abstractmethod
    async def find(self) -> Sequence[Running]:
        """The processes of this cluster that run already."""

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
    async def announce(self, supervisor_address: str) -> None:
        """Tell the node agents where the supervisor is now: roles that lost it ask them."""

    @abstractmethod
    async def close(self) -> None:
        """Stop watching; end nothing."""
