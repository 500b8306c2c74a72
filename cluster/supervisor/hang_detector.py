"""Distinguishes a process that hangs from a slow one, by its heartbeats and the kernel's state of it.

| observation | meaning | fenced after |
|---|---|---|
| stopped (SIGSTOP) | hung for certain | `STOPPED_S` |
| ready, heartbeats stop | hung, or blocked | `supervisor.fence_after_s` |
| ready, heartbeats go on, there is work, the progress counter does not change | a loop that hangs | \
`supervisor.stall_after_s`, or `STEPS` times its longest step if that is more |
| not ready yet, silent, uses the processor | it imports, or reads weights | `supervisor.start_timeout_s` |
| not ready yet, silent, idle | hung | `LOADING` times `supervisor.fence_after_s` |
| under a debugger | it is inspected | never |

Time in which this process itself was not running does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.cluster.launch.processes import Sight
from alignedserve.config import SupervisorConfig
from alignedserve.proto import supervisor_pb2 as sv

STOPPED_S = 1.0
LATE_S = 1.5  # after a longer gap between two looks, the observer itself was not running
STEPS = 10.0
LOADING = 3.0
IDLE_CPU_S = 0.05


@dataclass(slots=True)
class HangDetector:
    """Watches one process from its first message on. Times are from the caller's monotonic clock."""

    heard_at: float  # of its last heartbeat or new stream
    progressed_at: float = 0.0
    """When it last had no work, or had made progress."""
    active_at: float = 0.0
    """When it was last seen to have used the processor."""
    stopped_at: float | None = None  # since when it is seen stopped (SIGSTOP); None: it is not
    traced: bool = False  # a debugger had stopped it at the last look
    progress: int = 0  # the counter in its last heartbeat
    cpu_s: float = 0.0  # its processor time at `active_at`, in seconds

    def heard(self, beat: sv.Heartbeat | None, now: float) -> None:
        """It sent a heartbeat, or opened a new stream (None)."""
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
        """Ignore the last `seconds` before now."""
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
            return f"it sent no heartbeat for {silence:g} s, and is idle" if idle else ""
        if now - self.heard_at > limits.fence_after_s:
            return f"it sent no heartbeat for {limits.fence_after_s:g} s"
        patience = max(limits.stall_after_s, STEPS * beat.step_s)
        if beat.busy and now - self.progressed_at > patience:
            return f"it has work, but made no progress for {patience:.3g} s"
        return ""
