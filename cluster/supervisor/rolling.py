"""A rolling restart: every process of some roles is replaced, one after the other, without failing a request.

The order in the view names the incarnations to replace, so no progress is stored, and a supervisor's successor
continues from it. An instance drains first, as in `scaling.py`. If there is room, one more instance runs meanwhile. If
further nodes may join, room is known only once that instance has a place; it is given up after `ROOM_S` without one.
Shards, the scheduler and node agents are replaced as if they had died. Gateways and the supervisor report unhealthy,
and Ray Serve lets them end in order beside their successors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from alignedserve.cluster.supervisor.managed_process import ManagedProcess, Phase, Slot
from alignedserve.cluster.supervisor.plan import MODEL_ROLES, SPARE, Shape
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.cluster.supervisor.scaling import Scaling
from alignedserve.errors import ConfigError, UnavailableError
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

PROCESS_ROLES = ("kv_pool", "scheduler", "node_agent")
SERVE_ROLES = ("gateway", "supervisor")
ORDER = ("decode", "prefill", *PROCESS_ROLES, *SERVE_ROLES)
PATIENCE_S = 60.0  # in addition to the longest time of a step
MOST_FAILURES = 2
ROOM_S = 10.0  # time limit to place one more instance; Ray needs milliseconds if there is room


class Rolling:
    """`state` is the current or the last order, and shows its progress to users and successors.

    `step` must be called periodically, and when the state of a process changes. It changes slots through `Scaling`.
    """

    def __init__(self, roster: Roster, scaling: Scaling, longest_step_s: float) -> None:
        """`longest_step_s`: the longest time of a start and a gateway's drain together."""
        self.state = sv.Restart(done=True)  # `done` before the first order
        self._roster = roster
        self._scaling = scaling
        self._patience_s = longest_step_s + PATIENCE_S  # a step that takes longer stops the restart
        self._since = 0.0  # when the current step began
        self._reasons: dict[str, str] = {}  # by id, why processes ended during this restart
        self.supervisor_due = False
        """The supervisor itself is replaced next; stays so."""

    @property
    def running(self) -> bool:
        return not self.state.done

    def refuse_others(self) -> None:
        """Raises UnavailableError during a rolling restart."""
        if self.running:
            raise UnavailableError(
                f"a rolling restart is under way ({self.state.doing or 'it begins'}); `alignedserve status` shows it"
            )

    def begin(
        self, roles: Collection[str], since_ns: int, now: float, check: Callable[[Shape], None], incarnation: int
    ) -> None:
        """Replace all processes of `roles` that exist at `since_ns` (Unix time). `check` raises ConfigError if there is
        no room for a number of instances; `incarnation` is that of the supervisor itself. Raises UnavailableError, and
        ConfigError for an unknown role."""
        self.refuse_others()
        if unknown := sorted(set(roles) - set(ORDER)):
            raise ConfigError(f"unknown role {unknown[0]!r}; choose from {', '.join(ORDER)}")
        shape = self._scaling.shape
        self.state = sv.Restart(
            since_ns=since_ns,
            roles=[role for role in ORDER if role in roles],
            surplus=[role for role in MODEL_ROLES if _fits(replace(shape, **{role: getattr(shape, role) + 1}), check)],
            prefill=shape.prefill,
            decode=shape.decode,
            gateways=len(self._gateways()),
            old={slot.planned.id: 0 for slot in self._roster.slots.values() if slot.phase is Phase.STARTING}
            | {member.key.id: member.key.incarnation for member, _ in self._roster.members()},
            supervisor=incarnation,
        )
        self._scaling.failure = ""
        self._reasons.clear()
        self._since = now
        logger.info("a rolling restart of %s begins", ", ".join(self.state.roles))

    def retire_all(self) -> None:
        """Have Ray Serve end every gateway: the cluster itself is to end."""
        self.state.retiring[:] = sorted(self._roster.guests)

    def adopt(self, view: sv.ClusterView, now: float) -> None:
        """Continue a predecessor's rolling restart, if its view has one."""
        if view.HasField("restart"):
            self.state.CopyFrom(view.restart)
            self._since = now
        for slot in self._surplus():
            if not slot.used:  # it had no process yet, so it is given up, and added again if needed
                self._give_back(slot, now)

    def note_end(self, role_id: str, reason: str) -> None:
        """Note why a process ended unexpectedly, in case it does not start again."""
        if self.running:
            self._reasons[role_id] = reason

    def step(self, now: float, incarnation: int) -> list[Slot]:
        """Take the next step unless something must be waited for. Returns the slots whose processes must end now.

        `incarnation` is that of the supervisor itself.
        """
        before = self.state.doing
        ended = self._step(now, incarnation) if self.running else []
        if self.state.doing != before:
            self._since = now
        elif self.running and now - self._since > self._patience_s:
            self._stop(f"{self.state.doing} for {self._patience_s:g} s", now)
        return ended

    # ---- inside

    def _step(self, now: float, incarnation: int) -> list[Slot]:
        self._name_old()
        if (waited_for := self._waited_for(now)) is not None:
            self.state.doing = waited_for
            return []
        if spares := [slot for slot in self._old(SPARE) if slot.phase is not Phase.ENDING]:
            return spares  # first, because a successor that starts from an old spare would run old code
        for role in self.state.roles:
            if role in MODEL_ROLES:
                if self._step_instances(role, now):
                    return []
            elif role in PROCESS_ROLES:
                if old := self._old(role):
                    self.state.doing = f"{old[0].planned.id} is replaced"
                    return [old[0]]
            elif role == "gateway":
                if self._step_gateways(now):
                    return []
            elif incarnation == self.state.supervisor:
                self.state.doing = "the supervisor is replaced"
                self.supervisor_due = True
                return []
        self.state.done, self.state.doing = True, ""
        logger.info("the rolling restart is done")
        return []

    def _waited_for(self, now: float) -> str | None:
        """The process that must be ready before the next step, as a line for the status; None if there is none."""
        for slot in self._roster.slots.values():
            if slot.planned.role == SPARE or slot.ready:
                continue
            role_id = slot.planned.id
            if slot.draining:
                return f"{role_id} drains"
            if slot in self._surplus() and not self._has_room(slot, now):
                logger.info("there is no room for %s: the other instances drain without it", role_id)
                self.state.surplus.remove(slot.planned.role)
                self._give_back(slot, now)
                return f"{role_id} has no room"
            if slot.failures >= MOST_FAILURES and slot.phase is Phase.WAITING:
                self._stop(f"{role_id} does not start: {self._reasons.get(role_id, 'its process has ended')}", now)
            return f"{role_id} starts"
        return None

    def _surplus(self) -> list[Slot]:
        """Additional instances that run during the restart."""
        if not self.running:
            return []
        lasting = set(Shape(self.state.prefill, self.state.decode).ids())
        return [
            self._roster.slots[role_id] for role, role_id in self._scaling.shape.ids() if (role, role_id) not in lasting
        ]

    def _has_room(self, slot: Slot, now: float) -> bool:
        """Whether it has a place to start, or may still get one."""
        late = now - max(slot.launch_at, self._since) > ROOM_S
        return not late or slot.phase is not Phase.WAITING or self._scaling.has_place(slot)

    def _give_back(self, slot: Slot, now: float) -> None:
        role = slot.planned.role
        self._scaling.change(replace(self._scaling.shape, **{role: getattr(self.state, role)}), now)

    def _old(self, role: str) -> list[Slot]:
        return [
            slot
            for slot in self._roster.slots.values()
            if slot.planned.role == role and slot.member is not None and self._is_old(slot.member)
        ]

    def _name_old(self) -> None:
        """Note the incarnations of processes that were launched before the order and have joined since."""
        for member, _ in self._roster.members():
            if self.state.old.get(member.key.id) == 0:
                self.state.old[member.key.id] = member.key.incarnation

    def _is_old(self, member: ManagedProcess) -> bool:
        return self.state.old.get(member.key.id) == member.key.incarnation

    def _step_instances(self, role: str, now: float) -> bool:
        """Whether processes of the role have yet to be replaced."""
        shape, there_are_to_be = self._scaling.shape, getattr(self.state, role)
        count = getattr(shape, role)
        old = self._old(role)
        if old and count == there_are_to_be and role in self.state.surplus:
            if self._scaling.failure:
                self._stop(self._scaling.failure, now)
                return True
            self._scaling.change(replace(shape, **{role: count + 1}), now)
            self.state.doing = f"{role}-{count} starts, so that no {role} instance is missing meanwhile"
        elif old:
            old[0].draining_since = now
            self._scaling.pair()
            self.state.doing = f"{old[0].planned.id} drains"
        elif count > there_are_to_be:
            self._scaling.change(replace(shape, **{role: there_are_to_be}), now)
            self.state.doing = f"{role}-{count - 1} drains"
        else:
            return False
        return True

    def _gateways(self) -> list[ManagedProcess]:
        return [member for name, member in self._roster.guests.items() if name not in self._roster.lost_guests]

    def _step_gateways(self, now: float) -> bool:
        there = self._gateways()
        names = {member.key.id for member in there}
        if retiring := [name for name in self.state.retiring if name in names]:
            self.state.doing = f"{retiring[0]} drains"
            return True
        del self.state.retiring[:]
        ready = [member for member in there if member.state == "ready"]
        old = [member for member in ready if self._is_old(member)]
        # With autoscaling, Serve may have fewer gateways by now.
        if len(ready) < self.state.gateways and now - self._since < PATIENCE_S:
            self.state.doing = "a gateway starts"
        elif old:
            self.state.retiring.append(old[0].key.id)
            self.state.doing = f"{old[0].key.id} drains"
        else:
            return False
        return True

    def _stop(self, reason: str, now: float) -> None:
        more = self._surplus()
        self.state.done, self.state.failure, self.state.doing = True, reason, ""
        del self.state.retiring[:]
        if any(not slot.ready for slot in more):  # no process was removed that would need it
            self._scaling.give_up(reason, now)
        logger.error("the rolling restart has stopped: %s", reason)


def _fits(shape: Shape, check: Callable[[Shape], None]) -> bool:
    try:
        check(shape)
    except ConfigError:  # ResourceError among them
        return False
    return True
