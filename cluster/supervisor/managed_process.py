"""One process that the supervisor keeps: its phase, its hello and its last heartbeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from alignedserve.cluster.supervisor.hang_detector import HangDetector
from alignedserve.cluster.supervisor.plan import PlannedRole
from alignedserve.control.role import SERVING_STATES
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import supervisor_pb2 as sv
from alignedserve.ranks.degrees import devices_in
from alignedserve.transfer.topology import Place


class Phase(StrEnum):
    """WAITING -> STARTING -> JOINED -> LOST -> ENDING -> WAITING
                                 ^________|
    From each of them a process that is known to have ended leads back to WAITING.
    """

    WAITING = "waiting"  # no process; one is started at `launch_at`
    STARTING = "starting"  # launched, has not joined yet
    JOINED = "joined"
    LOST = "lost"  # its stream broke; it may come back in the same incarnation
    ENDING = "ending"  # being killed; not to be replaced before it is known to be dead


@dataclass(slots=True)
class ManagedProcess:
    """A process that has joined: its hello and its last heartbeat."""

    hello: sv.RoleHello
    hang_detector: HangDetector  # follows its heartbeats, and its state in the kernel
    joined_unix_s: float  # when it joined, in Unix time
    beat: sv.Heartbeat = field(default_factory=sv.Heartbeat)  # the last one; empty before the first

    @classmethod
    def told(cls, peer: sv.Peer, now: float) -> ManagedProcess:
        """A process as an earlier supervisor described it. State and stores stay valid until its first heartbeat."""
        hello = sv.RoleHello(
            process=peer.process,
            pid=peer.pid,
            node_id=peer.node_id,
            address=peer.address,
            device=peer.device,
            metrics_port=peer.metrics_port,
            started_ticks=peer.started_ticks,
        )
        serving = peer.state in SERVING_STATES
        beat = sv.Heartbeat(state=peer.state, stores=peer.stores) if serving else sv.Heartbeat()
        return cls(hello, HangDetector(now), peer.started_unix_s, beat)

    @property
    def key(self) -> pb.ProcessKey:
        return self.hello.process

    @property
    def state(self) -> str:
        return self.beat.state or "starting"

    @property
    def reports(self) -> tuple[object, ...]:
        """The parts of its last heartbeat that the view passes on to other processes."""
        beat = self.beat
        return self.state, list(beat.stores), beat.HasField("failure"), list(beat.alarms), list(beat.reaches)

    def peer(self, *, lost: bool, fenced: bool = False, detailed: bool = False) -> sv.Peer:
        """The process as other processes see it. Frequently changing fields are included only if `detailed`."""
        peer = sv.Peer(
            process=self.key,
            pid=self.hello.pid,
            node_id=self.hello.node_id,
            address=self.hello.address,
            device=self.hello.device,
            metrics_port=self.hello.metrics_port,
            state="lost" if lost else self.state,
            stores=self.beat.stores,
            started_unix_s=self.joined_unix_s,
            fenced=fenced,
            started_ticks=self.hello.started_ticks,
            alarms=self.beat.alarms,
        )
        if detailed:
            peer.holds = self.beat.holds
        if self.beat.HasField("failure"):
            peer.failure.CopyFrom(self.beat.failure)
        return peer


@dataclass(slots=True)
class Slot:
    """A planned process, and the process that fills it now. `since` is when the phase began."""

    planned: PlannedRole  # its node and device change when it is placed elsewhere
    phase: Phase = Phase.WAITING
    since: float = 0.0
    launch_at: float = 0.0  # in WAITING: when its next process is due
    deadline: float = 0.0  # in STARTING, JOINED and ENDING: when its process is fenced; 0.0 in ENDING: it is fenced
    generation: int = 0
    """Counts the processes of this slot, so that events of an earlier process do not affect its successor."""
    incarnation: int = 0
    """Of its last process. A successor's is larger, even if the clock of its node is behind."""
    device: str = ""
    """The device of its last process's model, which the successor uses again."""
    member: ManagedProcess | None = None  # the process that has joined, until it is dead or its node is gone
    found: ManagedProcess | None = None
    """The process that was found running here, if any, until it has joined or ended."""
    was_ready: bool = False  # its process has been ready under this supervisor
    used: bool = False
    """The process may have requests: it has been ready, or was found running."""
    ready_at: float = 0.0  # when it was ready first; only valid if `was_ready`
    failures: int = 0
    """Consecutive ends before the process was ready, or soon after."""
    end_reason: str = ""
    """Why the supervisor ends it, if it does."""
    draining_since: float | None = None
    """Set if it ends once no request needs it, without a successor."""

    def give_away(self, now: float) -> None:
        """Its process, a spare, has taken another slot's role. This slot waits for a new process."""
        self.member = None
        self.was_ready = False
        self.failures = 0
        self.enter(Phase.WAITING, now)

    def enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self.since = now
        if phase in (Phase.WAITING, Phase.JOINED):
            self.found = None

    @property
    def awaited(self) -> bool:
        """Its process was found running: this supervisor has started none, and it has not joined yet."""
        return self.phase is Phase.STARTING and self.generation == 0

    @property
    def draining(self) -> bool:
        return self.draining_since is not None

    @property
    def ready(self) -> bool:
        if self.draining:
            return False
        return self.phase is Phase.JOINED and self.member is not None and self.member.state == "ready"

    @property
    def place(self) -> Place:
        """The place of its model, now or planned, as far as known."""
        node_id = self.member.hello.node_id if self.member is not None else self.planned.node_id
        return Place(node_id, devices_in(self.device or self.planned.device)[0])

    @property
    def reaches(self) -> tuple[str, ...]:
        """The devices whose memory its own device can read; empty: unknown."""
        return tuple(self.member.beat.reaches) if self.member is not None else ()
