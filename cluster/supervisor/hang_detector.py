"""Telling a process that hangs from a slow one, by what it says of itself and what the kernel says of it.

| what is seen | what it is | ended after |
|---|---|---|
| stopped (SIGSTOP) | hung for certain | `STOPPED_S` |
| ready, heartbeats stop | hung, or blocked | `supervisor.fence_after_s` |
| ready, heartbeats go on, there is work, the counter of progress stands still | a loop that hangs | \
`supervisor.stall_after_s`, or `STEPS` times its longest step where that is more |
| not ready yet, silent, uses the processor | it imports, or reads weights | `supervisor.start_timeout_s` |
| not ready yet, silent, idle | hung | `LOADING` times `supervisor.fence_after_s` |
| under a debugger | somebody looks at it | not at all |

No time counts in which this process itself was not running: what was not heard meanwhile is nobody's fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.cluster.launch.processes import Sight
from alignedserve.config import SupervisorConfig
from alignedserve.proto import supervisor_pb2 as sv

STOPPED_S = 1.0
LATE_S = 1.5  # whoever looks later than this was not running itself
STEPS = 10.0
LOADING = 3.0
IDLE_CPU_S = 0.05


@dataclass(slots=True)
class HangDetector:
    """Of one process, from its first word on. Times are the caller's monotonic clock."""

    heard_at: float
    progressed_at: float = 0.0
    """When it last had no work, or had come further with it."""
    active_at: float = 0.0
    """When it was last seen to have used the processor."""
    stopped_at: float | None = None
    traced: bool = False
    progress: int = 0
    cpu_s: float = 0.0

    def heard(self, beat: sv.Heartbeat | None, now: float) -> None:
        """It gave a sign of life: a heartbeat, or none of its words but a new stream."""
        self.heard_at = now
        if beat is None or not beat.busy or beat.progress != self.progress:
            self.progressed_at = now
        if beat is not None:
            self.progress = beat.progress

    def seen(self, sight: Sight, now: float) -> None:
        self.traced = sight.traced
        if not sight.stopped:
            self.stopped_at = None
        elif self.stopped_at is None:
            self.stopped_at = now
        if sight.cpu_s - self.cpu_s >= IDLE_CPU_S:
            self.cpu_s = sight.cpu_s
            self.active_at = now

    def forgive(self, seconds: float, now: float) -> None:
        """So many seconds until now do not count."""
        self.heard_at = min(now, self.heard_at + seconds)
        self.progressed_at = min(now, self.progressed_at + seconds)
        self.active_at = min(now, self.active_at + seconds)
        if self.stopped_at is not None:
            self.stopped_at = min(now, self.stopped_at + seconds)

    def stopped(self, now: float) -> str:
        """Why it counts as stopped; empty while it does not."""
        if self.stopped_at is None or now - self.stopped_at < STOPPED_S:
            return ""
        return f"it has been stopped for {now - self.stopped_at:.1f} s"

    def verdict(self, beat: sv.Heartbeat, limits: SupervisorConfig, now: float) -> str:
        """Why it counts as hung; empty while it does not."""
        if self.traced:
            return ""
        if stopped := self.stopped(now):
            return stopped
        if beat.state in ("", "starting", "loading"):
            silence = LOADING * limits.fence_after_s
            idle = now - max(self.heard_at, self.active_at) > silence
            return f"nothing was heard of it for {silence:g} s, and it does nothing" if idle else ""
        if now - self.heard_at > limits.fence_after_s:
            return f"nothing was heard of it for {limits.fence_after_s:g} s"
        patience = max(limits.stall_after_s, STEPS * beat.step_s)
        if beat.busy and now - self.progressed_at > patience:
            return f"it has work, and came no further with it for {patience:.3g} s"
        return ""
