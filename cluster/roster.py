"""Who is planned, who has joined, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.cluster.members import Member, Phase, Slot
from alignedserve.cluster.plan import REQUIRED_ROLES, SPARE, PlannedRole
from alignedserve.control.role import OPEN_GAUGE
from alignedserve.proto import common_pb2 as pb

DRAINED = "drained"


class Roster:
    """The planned processes, each in a slot, and guests: gateways, which Ray Serve starts and replaces."""

    def __init__(self, planned: Sequence[PlannedRole]) -> None:
        self.slots = {role.id: Slot(role) for role in planned}
        self._generations: dict[str, int] = {}
        self.guests: dict[str, Member] = {}
        self.lost_guests: dict[str, float] = {}
        """Guests whose stream is gone, and until when they may come back."""
        self.ending_guests: set[str] = set()

    def member(self, key: pb.ProcessKey) -> Member | None:
        """The live process of this role, id and incarnation."""
        slot = self.slots.get(key.id)
        member = slot.member if slot is not None else self.guests.get(key.id)
        return member if member is not None and member.key == key else None

    def add(self, planned: PlannedRole) -> Slot:
        """One more process. What is said late of one that had this id before is not said of it."""
        slot = Slot(planned, generation=self._generations.get(planned.id, 0))
        self.slots[planned.id] = slot
        return slot

    def remove(self, role_id: str) -> None:
        self._generations[role_id] = self.slots.pop(role_id).generation

    def members(self) -> list[tuple[Member, bool]]:
        """Everyone who has joined and is not known to be dead, and whether its stream is gone."""
        planned = [
            (slot.member, slot.phase is not Phase.JOINED) for slot in self.slots.values() if slot.member is not None
        ]
        return planned + [(member, member.key.id in self.lost_guests) for member in self.guests.values()]

    def open_requests(self) -> int:
        """What gateways hold, as they said last."""
        return int(sum(member.beat.gauges[OPEN_GAUGE] for member in self.guests.values()))

    def guests_drained(self) -> bool:
        """Whether no gateway holds a request or takes one."""
        return all(member.state == DRAINED for member in self.guests.values())

    def drop_lost_guests(self, now: float) -> bool:
        """Forget those whose time is over; whether there were any."""
        over = [role_id for role_id, until in self.lost_guests.items() if now >= until]
        for role_id in over:
            self.drop_guest(role_id)
        return bool(over)

    def drop_guest(self, role_id: str) -> None:
        self.guests.pop(role_id, None)
        self.lost_guests.pop(role_id, None)
        self.ending_guests.discard(role_id)

    def is_fenced(self, role_id: str) -> bool:
        """Whether it is being ended: nothing that it says counts any more."""
        slot = self.slots.get(role_id)
        return slot.phase is Phase.ENDING if slot is not None else role_id in self.ending_guests

    def forgive(self, seconds: float, now: float) -> None:
        """Nobody is to blame for what was not heard in so many seconds until now."""
        for member, _ in self.members():
            member.vigil.forgive(seconds, now)
        for slot in self.slots.values():
            if slot.phase is Phase.LOST:
                slot.since = now

    def all_ready(self) -> bool:
        """Whether every role that the cluster needs is; spares come after that."""
        return all(slot.ready or slot.draining for slot in self.slots.values() if slot.planned.role != SPARE)

    def ready_spare(self) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.planned.role == SPARE and slot.ready), None)

    def missing(self) -> list[str]:
        """Roles of which no instance is ready."""
        ready = {slot.planned.role for slot in self.slots.values() if slot.ready}
        return [role for role in REQUIRED_ROLES if role not in ready]

    def degraded(self) -> list[str]:
        """Instances that are not ready though another of their role is, as "decode-1: starting"; and all alarms."""
        missing = set(self.missing())
        late = [
            f"{slot.planned.id}: {slot.member.state if slot.phase is Phase.JOINED and slot.member else slot.phase}"
            for slot in self.slots.values()
            if not slot.ready and not slot.draining and slot.planned.role not in (*missing, SPARE)
        ]
        return late + [f"{member.key.id}: {alarm}" for member, _ in self.members() for alarm in member.beat.alarms]
