"""The supervisor's decisions, without I/O: events in, a list of actions out. Time is an argument.

It decides when processes are started, when hung ones are fenced, and when dead ones are replaced. A process is replaced
once it is known to be dead or its node is gone: at once, or after a growing delay if it dies early or repeatedly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from alignedserve.cluster.launch.processes import Sight
from alignedserve.cluster.supervisor.actions import Action, End, Fence, Launch
from alignedserve.cluster.supervisor.hang_detector import LATE_S, HangDetector
from alignedserve.cluster.supervisor.hung_gateways import hung_guests
from alignedserve.cluster.supervisor.managed_process import ManagedProcess, Phase, Slot
from alignedserve.cluster.supervisor.nodes import NodeBook, Placement
from alignedserve.cluster.supervisor.plan import SPARE, Node, PlannedRole, Shape
from alignedserve.cluster.supervisor.rolling import Rolling
from alignedserve.cluster.supervisor.roster import Roster
from alignedserve.cluster.supervisor.scaling import Scaling, next_shape
from alignedserve.cluster.supervisor.store_planner import StorePlanner
from alignedserve.cluster.supervisor.views import status_of, view_of
from alignedserve.config import Config
from alignedserve.control.role import SERVING_STATES
from alignedserve.errors import AlignedServeError, ConfigError, ModelError, StaleError, UnavailableError, by_code
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5
ADOPTION_S = 15.0
STEADY_S = 5.0
END_S = 8.0
LONGEST_BACKOFF_S = 30.0


class SupervisorCore:
    """Which processes should run, which processes run, and the view that all of them receive.

    `view_version` grows with each change that other processes must learn. It begins at the clock's time, so that it
    keeps growing when the supervisor itself is replaced.
    """

    def __init__(
        self,
        config: Config,
        planned: Sequence[PlannedRole],
        *,
        shape: Shape | None = None,
        gpus: int = 0,
        first_version: int = 1,
        agent_socket: Callable[[Node, int], str] | None = None,
    ) -> None:
        """`gpus`: of the only node before `located`; `agent_socket`: see `NodeBook`."""
        self.config = config
        self.view_version = first_version  # of the view that `view` gives now
        self.roster = Roster(planned)  # slots of planned processes and guests, by role id
        self.nodes = NodeBook(config, self.roster, gpus, agent_socket)  # used nodes, and nodes that are gone for good
        self.scaling = Scaling(config, self.roster, self.nodes, shape or Shape.configured(config))  # instances wanted
        self.planner = StorePlanner(config, self.roster, self.nodes)  # the model's shape and the store plan, once known
        longest_step_s = config.supervisor.start_timeout_s + config.gateway.drain_s
        self.rolling = Rolling(self.roster, self.scaling, longest_step_s)  # the restart under way, or the last one
        self.was_ready = False  # every role was ready at once, under this supervisor; stays so
        self.has_served = False  # ready once, under this supervisor or an earlier one
        self.paused = False  # a successor is about to take over: nothing is started or ended
        self.ending = self.stop_asked = False  # the end was announced; `alignedserve stop` asked for it
        self.grace_s = 0.0  # what gateways have for open requests; counts while `ending`
        self.failure: pb.Failure | None = None  # why the cluster cannot start; stays
        self.supervisor: sv.Peer | None = None  # this process, for node agents that may end it when it hangs
        self.incarnation = 0  # this supervisor's, from its start on
        self.own_pid = 0  # this process, which no action may end; 0 until its start
        self._ticked_at: float | None = None  # the last `tick`, to tell a late one; None before the first

    # ---- events

    def expect(self, known: Iterable[sv.Peer], now: float) -> None:
        """Note processes known to an earlier supervisor. Call it before `begin`, and before any process can join."""
        for peer in known:
            if (slot := self.roster.slots.get(peer.process.id)) is not None:
                slot.found = ManagedProcess.told(peer, now)
            elif peer.process.role == "gateway":
                self.roster.found_guests[peer.process.id] = ManagedProcess.told(peer, now)

    def begin(self, now: float, running: Iterable[str] = ()) -> list[Action]:
        """Start missing processes. `running` are the ids of processes that were found and should join."""
        found = set(running)
        for slot in self.roster.slots.values():
            if slot.planned.id in found and slot.phase is Phase.WAITING:  # otherwise it has joined already
                slot.enter(Phase.STARTING, now)
                slot.deadline = now + max(ADOPTION_S, self.config.supervisor.fence_after_s)
                self.nodes.expect(slot.planned.node_id, now)
        return self.tick(now)

    def located(self, placement: Placement, now: float) -> list[Action]:
        """Apply the current nodes and places of instances. Processes on a removed node count as ended."""
        changed = self.settle(placement, now)
        return self.tick(now) if changed else []

    def settle(self, placement: Placement, now: float) -> bool:
        """`located` without starting anything, for use before `begin`. Returns whether nodes were added or removed."""
        lost = self.nodes.take_in(placement)
        for slot in [slot for node_id in lost for slot in self.nodes.on(node_id)]:
            self._lost_with_node(slot, now)
        for member in [member for member in self.roster.guests.values() if member.hello.node_id in lost]:
            self.roster.drop_guest(member.key.id, "its node is gone")
        added = self.nodes.open(now)
        if lost or added:
            self.scaling.pair()
            self._touch()
        return bool(lost or added)

    def joined(self, hello: sv.RoleHello, now: float, unix_s: float = 0.0) -> pb.Failure | None:
        """A process said hello on a new stream. Returns why it is refused, or None."""
        key = hello.process
        if hello.node_id in self.nodes.gone:  # another process may have its place by now
            return _refusal(f"node {hello.node_id} was given up")
        slot = self.roster.slots.get(key.id)
        if slot is None:
            return self._guest_joined(hello, now, unix_s)
        if slot.planned.role != key.role:
            return _refusal(f"{key.id} is a {slot.planned.role}, not a {key.role}")
        old = slot.member
        if key.incarnation < slot.incarnation:
            return _refusal(f"{key.id} has a newer incarnation than {key.incarnation}")
        if slot.planned.node_id not in ("", hello.node_id):
            return _refusal(f"{key.id} belongs on node {slot.planned.node_id}, not on {hello.node_id!r}")
        same = old is not None and old.key.incarnation == key.incarnation
        if self.closing or (same and slot.phase is Phase.ENDING):
            return _refusal(f"{key.id} is being ended")
        if not same:
            found = self.roster.found(key)  # it keeps its last known state until its first heartbeat
            beat = found.beat if found is not None else sv.Heartbeat()
            slot.member = ManagedProcess(hello, HangDetector(now), unix_s, beat)
            slot.device = hello.device
            slot.incarnation = key.incarnation
            slot.was_ready = False
            slot.deadline = now + self.config.supervisor.start_timeout_s
        elif old is not None:
            old.hang_detector.heard(None, now)
        slot.enter(Phase.JOINED, now)
        self._pair(now)
        self._touch()
        return None

    def heard(self, key: pb.ProcessKey, beat: sv.Heartbeat, now: float) -> list[Action]:
        """A heartbeat of a process that has joined. Heartbeats of other incarnations are ignored."""
        member = self.roster.member(key)
        if member is None:
            return []
        before, reached = member.reports, list(member.beat.reaches)
        member.hang_detector.heard(beat, now)
        member.beat = beat
        if list(beat.reaches) != reached:
            self._pair(now)
        if member.reports != before:
            self._touch()
        slot = self.roster.slots.get(key.id)
        if slot is None:
            return []
        actions = self._note_state(slot, member, now)
        self._note_model(member)
        return [*actions, *self._let_go(now)]

    def broke(self, key: pb.ProcessKey, now: float) -> list[Action]:
        """The stream of a process that had joined has broken."""
        if self.roster.member(key) is None:
            return []
        slot = self.roster.slots.get(key.id)
        if slot is None:
            self.roster.lost_guests[key.id] = now + RECONNECT_S
        elif slot.phase is Phase.JOINED:
            slot.enter(Phase.LOST, now)
        self._touch()
        return []

    def seen(self, sights: Mapping[tuple[str, int], Sight], now: float) -> None:
        """The kernel's state of processes on this node, by id and incarnation."""
        for member in self.roster.watched():
            sight = sights.get((member.key.id, member.key.incarnation))
            if sight is not None:
                member.hang_detector.seen(sight, now)

    def process_ended(self, key: pb.ProcessKey, reason: str, now: float) -> list[Action]:
        """This process of a role or guest is known to be dead, even if its place is filled again by now."""
        if self.roster.member(key) is None and self.roster.found(key) is None:
            return []
        slot = self.roster.slots.get(key.id)
        if slot is not None:
            return self.ended(key.id, slot.generation, reason, now)
        self.roster.drop_guest(key.id, reason)
        self._touch()
        return []

    def ended(self, role_id: str, generation: int, reason: str, now: float) -> list[Action]:
        """This process is known to be dead."""
        slot = self.roster.slots.get(role_id)
        if slot is None or slot.phase is Phase.WAITING or slot.generation != generation:
            return []
        reason = slot.end_reason or reason
        slot.end_reason = ""
        meant = self.ending or slot.draining
        self.rolling.note_end(role_id, reason)
        logger.log(logging.INFO if meant else logging.WARNING, "%s has ended: %s", role_id, reason)
        if slot.draining:
            self.scaling.forget(slot)
            self._touch()
            return self.tick(now)
        failure = slot.member.beat.failure if slot.member and slot.member.beat.HasField("failure") else None
        steady = slot.found is not None or (slot.was_ready and now - slot.ready_at > STEADY_S)
        slot.failures = 0 if steady else slot.failures + 1
        if not slot.was_ready and not self.has_served and slot.failures >= self.config.supervisor.max_start_failures:
            cause = failure.message if failure else reason
            self._fail(failure, f"{role_id} failed to start {slot.failures} times: {cause}")
        if self.scaling.is_new(slot) and self.was_ready and slot.failures >= self.config.supervisor.max_start_failures:
            self.scaling.give_up(f"{role_id} failed to start: {failure.message if failure else reason}", now)
        # The first death after being ready is followed by a restart at once; repeated deaths by growing delays.
        doubling = max(0, slot.failures - (1 if slot.was_ready else 0))
        slot.launch_at = now + (min(LONGEST_BACKOFF_S, 0.25 * 2**doubling) if doubling else 0.0)
        slot.member = None
        slot.was_ready = slot.used = False
        slot.enter(Phase.WAITING, now)
        self._touch()
        return self.tick(now)

    def _lost_with_node(self, slot: Slot, now: float) -> None:
        """The node of this process is gone. Another process may take its place, even if it has not ended yet."""
        logger.warning("%s is lost with its node", slot.planned.id)
        slot.device = slot.end_reason = ""
        if slot.draining:
            self.scaling.forget(slot)
            return
        slot.member = None
        slot.was_ready = slot.used = False
        slot.launch_at = now
        slot.enter(Phase.WAITING, now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: launch processes that are due, fence silent ones."""
        slept_s = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        if slept_s > min(LATE_S, self.config.supervisor.fence_after_s / 2):
            self.roster.forgive(slept_s, now)  # missing heartbeats of that time do not count
        limits = self.config.supervisor
        self.nodes.follow(max(2 * limits.heartbeat_s, limits.fence_after_s / 2), now)
        if self.roster.drop_lost_guests(now, lambda node, until: self._is_cut_off(node, until - RECONNECT_S, now)):
            self._touch()
        if self.closing or self.paused:
            return []
        leaving = [*self._let_go(now), *self._roll(now)]
        due = [self._due(slot, now) for slot in self.roster.slots.values()]
        if guests := hung_guests(self.roster, limits, self.own_pid, self._is_cut_off, now):
            self._touch()
        return [action for action in (*leaving, *due, *guests) if action is not None]

    def scale(self, prefill: int, decode: int, free_bytes: Mapping[str, int], now: float) -> list[Action]:
        """Change the numbers of instances; 0: unchanged. `free_bytes`: free host memory by node, as far as known.

        Raises AlignedServeError, and changes nothing, if that is impossible.
        """
        shape = next_shape(self.scaling.shape, prefill, decode)
        self._require_running("it cannot be scaled now")
        self.rolling.refuse_others()
        self.scaling.check(shape, self.planner.model_info, self.planner.store_plan, free_bytes)
        if shape == self.scaling.shape:
            return []
        self.scaling.change(shape, now)
        self._touch()
        return self.tick(now)

    def restart(self, roles: Collection[str], free_bytes: Mapping[str, int], now: float, unix_ns: int) -> list[Action]:
        """Replace all processes of these roles that exist at `unix_ns`, one after the other (`rolling.py`).

        Raises AlignedServeError, and changes nothing, if that is impossible.
        """
        self._require_running("nothing can be restarted now")
        model, plan = self.planner.model_info, self.planner.store_plan
        self.rolling.begin(
            roles, unix_ns, now, lambda shape: self.scaling.check(shape, model, plan, free_bytes), self.incarnation
        )
        self._touch()
        return self.tick(now)

    def end(self, grace_s: float = 0.0) -> None:
        """Gateways refuse new requests, and get `grace_s` seconds for open ones. After that nothing is started.

        A further call can only shorten the time.
        """
        if not self.ending or grace_s < self.grace_s:
            self.ending = True
            self.grace_s = grace_s
            self._touch()

    @property
    def closing(self) -> bool:
        """Whether nothing is replaced or admitted any more. While gateways drain, their requests need all processes."""
        return self.ending and (self.grace_s <= 0.0 or not self.was_ready or self.roster.guests_drained())

    # ---- view and status

    def view(self) -> sv.ClusterView:
        return view_of(self)

    def state(self) -> str:
        if self.failure is not None:
            return "failed"
        if not self.was_ready:
            return "starting"
        return "degraded" if self.roster.missing() or self.degraded() else "ready"

    def degraded(self) -> list[str]:
        """Problems of roles that are still served, and instances that wait for a node."""
        return [*self.roster.degraded(), *self.planner.degraded(), *self.nodes.waiting(), *self.nodes.silent()]

    def status(self, cluster_id: str) -> sv.ClusterStatus:
        """Living processes and problems. The server adds metrics and the supervisor itself."""
        return status_of(self, cluster_id)

    # ---- inside

    def _require_running(self, otherwise: str) -> None:
        if self.paused:  # the successor has already read the state
            raise UnavailableError(
                "the application is being redeployed, and another supervisor is taking over this cluster: nothing was "
                "changed; try again in a few seconds"
            )
        if self.ending or self.failure is not None or not self.was_ready:
            raise UnavailableError(f"the cluster is still starting, or ending: {otherwise}")

    def _touch(self) -> None:
        self.view_version += 1
        if not self.was_ready and self.roster.all_ready():
            self.was_ready = self.has_served = True

    def _guest_joined(self, hello: sv.RoleHello, now: float, unix_s: float) -> pb.Failure | None:
        """A gateway joined. Ray Serve starts and replaces gateways, so any gateway may join."""
        key = hello.process
        if key.role != "gateway":
            return _refusal(f"no {key.role} with the id {key.id} belongs to this cluster")
        old = self.roster.guests.get(key.id)
        if old is not None and key.incarnation < old.key.incarnation:
            return _refusal(f"{key.id} has a newer incarnation than {key.incarnation}")
        if old is None or old.key.incarnation != key.incarnation:
            self.roster.drop_guest(key.id, "another process has its id")
            self.roster.guests[key.id] = ManagedProcess(hello, HangDetector(now), unix_s)
        self.roster.found_guests.pop(key.id, None)
        self.roster.lost_guests.pop(key.id, None)
        self._touch()
        return None

    def _pair(self, now: float) -> None:
        """Update the pairs after a device became known, and check that each pair can have its channel."""
        self.scaling.pair()
        problem = self.scaling.channel_problem()
        if problem is None:
            return
        if not self.was_ready:
            self._fail(pb.Failure(code=problem.code), problem.message)
        elif self.scaling.growing:
            self.scaling.give_up(problem.message, now)

    def _note_state(self, slot: Slot, member: ManagedProcess, now: float) -> list[Action]:
        if member.state in SERVING_STATES and not slot.was_ready:
            slot.was_ready = slot.used = True
            slot.ready_at = now
            self.scaling.settle()
        if member.state != "failed" or slot.phase is Phase.ENDING or self.paused:
            return []
        failure = member.beat.failure
        if not self.has_served and issubclass(by_code(failure.code), ModelError | ConfigError):
            self._fail(failure, failure.message)  # starting it again changes nothing
        return [self._fence(slot, f"it failed: {failure.message}", now)]

    def _note_model(self, member: ManagedProcess) -> None:
        if self.failure is not None:
            return
        try:
            changed = self.planner.note(member)
        except AlignedServeError as error:
            self._fail(pb.Failure(code=error.code), error.message)
        else:
            if changed:
                self._touch()

    def _let_go(self, now: float) -> list[Action]:
        """End the draining instances that no request needs any more, or that have drained for too long."""
        actions: list[Action] = []
        if self.ending or self.paused:
            return actions
        for slot, late in self.scaling.due(now):
            if slot.phase is Phase.WAITING:
                self.scaling.forget(slot)
                self._touch()
            elif late or slot.phase is Phase.STARTING:
                reason = "it was to be removed and was still needed" if late else "it was removed while starting"
                actions.append(self._fence(slot, reason, now))
            else:
                slot.end_reason = "it was to be removed"
                slot.deadline = now + END_S
                slot.enter(Phase.ENDING, now)
                actions.append(End(slot.planned.id))
        return actions

    def _roll(self, now: float) -> list[Action]:
        """Go on with a rolling restart."""
        if self.ending or not self.was_ready:
            return []
        before = self.rolling.state.SerializeToString(deterministic=True)
        due = self.rolling.step(now, self.incarnation)
        if self.rolling.state.SerializeToString(deterministic=True) != before:
            self._touch()
        return [self._fence(slot, "a rolling restart replaces it", now) for slot in due]

    def _due(self, slot: Slot, now: float) -> Action | None:
        limits = self.config.supervisor
        if slot.phase is Phase.WAITING and now >= slot.launch_at and self.failure is None:
            return self._launch(slot, now)
        if slot.phase is Phase.ENDING and slot.draining and 0.0 < slot.deadline < now:
            slot.deadline = 0.0
            return self._fence(slot, "it was to be removed, and did not", now)
        member = slot.member
        if slot.phase is Phase.LOST and now - slot.since >= RECONNECT_S:
            if member is not None and self._is_cut_off(member.hello.node_id, slot.since, now):
                return None
            return self._fence(slot, "its connection broke", now)
        if slot.phase is Phase.JOINED and member:
            hung = member.hang_detector.verdict(member.beat, limits, now)
            if hung and not self._is_cut_off(member.hello.node_id, member.hang_detector.heard_at, now):
                return self._fence(slot, hung, now)
        if slot.awaited:
            return self._due_to_join(slot, now)
        if slot.phase in (Phase.STARTING, Phase.JOINED) and not slot.was_ready and now > slot.deadline:
            if slot.phase is Phase.JOINED and not self.planner.store_plan and self.nodes.waiting():
                slot.deadline = now + limits.start_timeout_s  # memory is divided once all instances have a node
                return None
            state = slot.member.state if slot.member else "not joined"
            reason = f"{slot.planned.id} was not ready in time ({state})"
            if not self.has_served and slot.planned.role in self.roster.missing():
                self._fail(None, f"{reason}; supervisor.start_timeout_s is {limits.start_timeout_s:g}")
            return self._fence(slot, reason, now)
        return None

    def _due_to_join(self, slot: Slot, now: float) -> Action | None:
        if slot.found is not None and (stopped := slot.found.hang_detector.stopped(now)):
            return self._fence(slot, stopped, now)
        if now <= slot.deadline or self._is_cut_off(slot.planned.node_id, slot.since, now):
            return None
        return self._fence(slot, "it was found running, but did not join in time", now)

    def _is_cut_off(self, node_id: str, silent_since: float, now: float) -> bool:
        """Whether a process is silent because its node is unreachable. The launcher reports in time whether the node is
        gone. After `orphan_after_s` the processes there have ended themselves. A node without a node agent gets less
        time.
        """
        limits = self.config.supervisor
        credit_s = limits.orphan_after_s if self.nodes.number(node_id) is not None else limits.fence_after_s
        return now - silent_since < credit_s and self.nodes.is_cut_off(node_id, now)

    def _launch(self, slot: Slot, now: float) -> Launch | None:
        if slot.planned.role == SPARE and (self.ending or not self.roster.all_ready()):
            return None  # it would take processor time from starting processes
        planned = self.nodes.planned(slot)
        if planned is None:
            late = now - slot.launch_at > self.config.supervisor.start_timeout_s
            if late and self.was_ready and self.scaling.is_new(slot):
                self.scaling.give_up(f"there is no room for {slot.planned.id}", now)
            return None
        if planned.node_id != slot.planned.node_id:
            slot.device = ""  # another node's
        slot.planned = planned
        slot.enter(Phase.STARTING, now)
        slot.deadline = now + self.config.supervisor.start_timeout_s
        slot.generation += 1
        return Launch(slot.planned, slot.generation)

    def take_spare(self, slot: Slot, now: float) -> str:
        """As of `Roster`."""
        spare_id = self.roster.take_spare(slot.planned, now)
        self._touch()
        return spare_id

    def _fence(self, slot: Slot, reason: str, now: float) -> Fence:
        member = slot.member or slot.found
        hello = member.hello if member else None
        slot.end_reason = reason
        slot.deadline = 0.0
        slot.enter(Phase.ENDING, now)
        self._touch()
        return Fence(slot.planned.id, slot.generation, hello, reason)

    def _fail(self, failure: pb.Failure | None, message: str) -> None:
        if self.failure is None:
            logger.error("the cluster cannot start: %s", message)
            self.failure = pb.Failure(code=failure.code if failure else AlignedServeError.code, message=message)
            self._touch()


def _refusal(message: str) -> pb.Failure:
    return pb.Failure(code=StaleError.code, message=message)
