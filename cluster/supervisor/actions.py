"""The supervisor's actions: the core returns them, the server carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.cluster.supervisor.plan import PlannedRole
from alignedserve.proto import supervisor_pb2 as sv


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the process, or let a spare take the role (`SupervisorCore.take_spare`)."""

    planned: PlannedRole
    generation: int


@dataclass(frozen=True, slots=True)
class End:
    """Tell the process to end, because nothing needs it any more."""

    role_id: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Fence the process, and call `ended` once it is known to be dead."""

    role_id: str
    generation: int
    hello: sv.RoleHello | None
    reason: str


@dataclass(frozen=True, slots=True)
class FenceGuest:
    """Fence a process that Ray Serve starts and replaces, and call `process_ended`."""

    hello: sv.RoleHello
    reason: str


Action = Launch | End | Fence | FenceGuest
