"""What the supervisor decides to do: the core lists it, the server carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.cluster.supervisor.plan import PlannedRole
from alignedserve.proto import supervisor_pb2 as sv


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the process, or have a spare take the role, where `spare_id` names one."""

    planned: PlannedRole
    generation: int
    spare_id: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """Tell the process to end: nothing needs it any more."""

    role_id: str


@dataclass(frozen=True, slots=True)
class Fence:
    """End the process, whatever state it is in, and say `ended` once it is known to be dead."""

    role_id: str
    generation: int
    hello: sv.RoleHello | None
    reason: str


@dataclass(frozen=True, slots=True)
class FenceGuest:
    """The same for a process that somebody else starts, and replaces; say `process_ended`."""

    hello: sv.RoleHello
    reason: str


Action = Launch | End | Fence | FenceGuest
