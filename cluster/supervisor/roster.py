"""The planned processes, the processes that have joined, and the missing roles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from alignedserve.cluster.supervisor.managed_process import ManagedProcess, Phase, Slot
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, REQUIRED_ROLES, SPARE, SPARED_ROLES, PlannedRole
from alignedserve.control.role import OPEN_GAUGE
from alignedserve.proto import common_pb2 as pb

logger = logging.getLogger(__name__)

DRAINED = "drained"


class Roster:
    """The planned processes, each in a slot, and guests: gateways, which Ray Serve starts and replaces."""

    def __init__(self, planned: Sequence[PlannedRole]) -> None:
        self.slots = {role.id: Slot(role) for role in planned}  # by id, until `remove`
        self._generations: dict[str, int] = {}  # of removed slots, by id; a new slot of that id continues from it
        self._incarnations: dict[str, int] = {}  # of the last process of ids that have no slot now
        self.guests: dict[str, ManagedProcess] = {}  # gateways that have joined, by id, until `drop_guest`
        self.lost_guests: dict[str, float] = {}
        """Guests whose streams have broken, and until when they may reconnect."""
        self.ending_guests: set[str] = set()  # ids of guests that are being fenced
        self.found_guests: dict[str, ManagedProcess] = {}
        """Guests of an earlier supervisor that have not joined this one, by id."""

    def member(self, key: pb.ProcessKey) -> ManagedProcess | None:
        """The live process of this role, id and incarnation."""
        slot = self.slots.get(key.id)
        member = slot.member if slot is not None else self.guests.get(key.id)
        return member if member is not None and member.key == key else None

    def found(self, key: pb.ProcessKey) -> ManagedProcess | None:
        """The process with this key, if only an earlier supervisor has seen it; otherwise None."""
        slot = self.slots.get(key.id)
        member = slot.found if slot is not None else self.found_guests.get(key.id)
        return member if member is not None and member.key == key else None

    def watched(self) -> list[ManagedProcess]:
        """All processes whose kernel state is watched: those that have joined, and those that may join."""
        expected = [slot.found for slot in self.slots.values() if slot.found is not None]
        return [member for member, _ in self.members()] + expected + list(self.found_guests.values())

    def add(self, planned: PlannedRole) -> Slot:
        """Add a slot. Late messages about an earlier process with this id do not apply to the new one."""
        generation = self._generations.get(planned.id, 0)
        slot = Slot(planned, generation=generation, incarnation=self._incarnations.pop(planned.id, 0))
        self.slots[planned.id] = slot
        return slot

    def sort(self) -> None:
        """By role, in display order."""
        order = {role: rank for rank, role in enumerate((*REQUIRED_ROLES, SPARE))}
        slots = sorted(self.slots.values(), key=lambda slot: order[slot.planned.role])
        self.slots.clear()
        self.slots.update({slot.planned.id: slot for slot in slots})

    def remove(self, role_id: str) -> None:
        slot = self.slots.pop(role_id)
        self._generations[role_id], self._incarnations[role_id] = slot.generation, slot.incarnation

    def adopt(self, incarnations: Mapping[str, int]) -> None:
        """Take over the incarnations of an earlier supervisor's roster."""
        self._incarnations |= incarnations
        for role_id in self._incarnations.keys() & self.slots.keys():
            self.slots[role_id].incarnation = self._incarnations.pop(role_id)

    def incarnations(self) -> dict[str, int]:
        """The incarnation of the last process that joined, by id, also of removed instances, whose ids are reused."""
        gone = {name: last for name, last in self._incarnations.items() if name.rpartition("-")[0] in MODEL_ROLES}
        there = {name: slot.incarnation for name, slot in self.slots.items()}
        return {name: last for name, last in (gone | there).items() if last}

    def newest(self) -> int:
        """The greatest known incarnation."""
        there = (slot.incarnation for slot in self.slots.values())
        guests = (member.key.incarnation for member in self.guests.values())
        return max((*self._incarnations.values(), *there, *guests), default=0)

    def members(self) -> list[tuple[ManagedProcess, bool]]:
        """All processes that have joined and are not known to be dead, and whether their streams have broken."""
        planned = [
            (slot.member, slot.phase is not Phase.JOINED) for slot in self.slots.values() if slot.member is not None
        ]
        return planned + [(member, member.key.id in self.lost_guests) for member in self.guests.values()]

    def open_requests(self) -> int:
        """Open requests of all gateways, from their last heartbeats."""
        return int(sum(member.beat.gauges[OPEN_GAUGE] for member in self.guests.values()))

    def guests_drained(self) -> bool:
        """Whether no gateway holds or accepts requests."""
        return all(member.state == DRAINED for member in self.guests.values())

    def drop_lost_guests(self, now: float, spared: Callable[[str, float], bool]) -> bool:
        """Forget lost guests whose time is over, except those for which `spared(node, time)` is true. Returns whether
        there were any."""
        due = [(role_id, until) for role_id, until in self.lost_guests.items() if now >= until]
        over = [role_id for role_id, until in due if not spared(self.guests[role_id].hello.node_id, until)]
        for role_id in over:
            self.drop_guest(role_id, "its stream broke, and it has not come back")
        return bool(over)

    def drop_guest(self, role_id: str, reason: str) -> None:
        """Forget a guest that is known, or taken, to be dead."""
        if (guest := self.guests.pop(role_id, None)) is not None:
            level = logging.INFO if guest.state == DRAINED else logging.WARNING
            logger.log(level, "%s has ended: %s", role_id, reason)
        self.found_guests.pop(role_id, None)
        self.lost_guests.pop(role_id, None)
        self.ending_guests.discard(role_id)

    def is_fenced(self, role_id: str) -> bool:
        """Whether the process is being ended. Its messages are ignored then."""
        slot = self.slots.get(role_id)
        return slot.phase is Phase.ENDING if slot is not None else role_id in self.ending_guests

    def forgive(self, seconds: float, now: float) -> None:
        """Ignore missing heartbeats of the last `seconds`."""
        for member in self.watched():
            member.hang_detector.forgive(seconds, now)
        for slot in self.slots.values():
            if slot.phase is Phase.LOST:
                slot.since = now

    def all_ready(self) -> bool:
        """Whether all processes except spares are ready."""
        return all(slot.ready or slot.draining for slot in self.slots.values() if slot.planned.role != SPARE)

    def ready_spare(self, node_id: str = "") -> Slot | None:
        """A ready spare on that node, or on any node if none is given."""
        spares = (slot for slot in self.slots.values() if slot.planned.role == SPARE and slot.ready)
        return next((slot for slot in spares if not node_id or slot.planned.node_id == node_id), None)

    def take_spare(self, planned: PlannedRole, now: float) -> str:
        """The id of a spare on that node which takes this role from now on; "" if there is none."""
        spare = self.ready_spare(planned.node_id) if planned.role in SPARED_ROLES else None
        if spare is None:
            return ""
        spare.give_away(now)
        return spare.planned.id

    def starting(self, role_id: str, generation: int) -> Slot | None:
        """The slot whose process of this generation is to be started; None if it is not (any more)."""
        slot = self.slots.get(role_id)
        return slot if slot is not None and (slot.phase, slot.generation) == (Phase.STARTING, generation) else None

    def missing(self) -> list[str]:
        """Roles of which no instance is ready."""
        ready = {slot.planned.role for slot in self.slots.values() if slot.ready}
        return [role for role in REQUIRED_ROLES if role not in ready]

    def degraded(self) -> list[str]:
        """Instances that are not ready while others of their role are, as "decode-1: starting"; and all alarms."""
        missing = set(self.missing())
        late = [
            f"{slot.planned.id}: {slot.member.state if slot.phase is Phase.JOINED and slot.member else slot.phase}"
            for slot in self.slots.values()
            if not slot.ready and not slot.draining and slot.planned.role not in (*missing, SPARE)
        ]
        return late + [f"{member.key.id}: {alarm}" for member, _ in self.members() for alarm in member.beat.alarms]
